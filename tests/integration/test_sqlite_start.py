"""Start of a store in a SQLite file while another process writes to it."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from integr8s_idem.config import SqliteStoreSettings
from integr8s_idem.stores.factory import open_store


async def test_a_migrated_store_starts_while_another_process_writes(tmp_path: Path) -> None:
    settings = SqliteStoreSettings(kind="sqlite", path=str(tmp_path / "idem.db"), lock_timeout_seconds=0.2)
    async with open_store(settings, key_prefix="idempotency"):
        pass

    with closing(sqlite3.connect(settings.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with asyncio.timeout(20), open_store(settings, key_prefix="idempotency") as store:
            records = await store.get(["idempotency:billing::one"])

    assert records == [None]
