"""SQLite files are only accessible to the user of the worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from integr8s_idem.config import SqliteStoreSettings
from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.records import ReserveRequest
from integr8s_idem.stores.factory import open_store

pytestmark = pytest.mark.scenario(134)


async def use(file: Path) -> list[int]:
    """Return the permissions of the file and its companion files while it is open."""
    hour = timedelta(hours=1)
    async with open_store(SqliteStoreSettings(kind="sqlite", path=str(file)), key_prefix="idempotency") as store:
        await store.reserve([ReserveRequest(key="idempotency:a:b", token=bytes(16), lease=hour / 60, retention=hour)])
        found = sorted(file.parent.glob(f"{file.name}*"))
        assert [each.name for each in found] == [file.name, f"{file.name}-shm", f"{file.name}-wal"]
        return [each.stat().st_mode & 0o777 for each in found]


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


async def test_a_new_file_is_only_accessible_to_its_user(tmp_path: Path) -> None:
    assert await use(tmp_path / "records.db") == [0o600] * 3


async def test_an_existing_file_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "records.db"
    file.touch()
    file.chmod(0o660)
    assert await use(file) == [0o660] * 3


async def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreConfigurationError, match="check its directory"):
        await use(tmp_path / "nowhere" / "records.db")
