"""The contract suite on PostgreSQL, MariaDB and SQLite."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import delete, literal, update

from integr8s_idem.errors import CorruptRecordError
from integr8s_idem.records import Corrupt, Reserved
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine
from integr8s_idem.stores.sql.engine import writing
from integr8s_idem.stores.sql.schema import COMPLETED, FAILED, records
from integr8s_idem.testing.contract import HistorySize, RecordAdminContract, RepositoryContract, StoreUnderTest
from integr8s_idem.testing.store_under_test import take, wish
from tests.support.mariadb import MariadbServer, missing_programs
from tests.support.postgres import PostgresServer

DAMAGES = {
    "owner_not_ascii": {"owner": "ü"},
    "owner_with_a_bad_escape": {"owner": "\\x"},
    "lease_far_in_the_future": {"lease_until": 2**62},
    "expiry_far_in_the_future": {"expires_at": 2**62},
    "negative_attempt": {"attempt": -1},
    "unknown_status": {"status": 9},
    "settled_without_a_time": {"status": COMPLETED},
    "result_without_a_type": {"status": COMPLETED, "settled_at": 1, "result": b"1"},
    "content_type_with_a_bad_escape": {
        "status": COMPLETED,
        "settled_at": 1,
        "result": b"1",
        "content_type": "\\u12",
    },
    "error_with_a_bad_escape": {"status": FAILED, "settled_at": 1, "error": "\\x"},
}
INVALID_TYPES = {
    "lease_not_a_number": {"lease_until": "x"},
    "expiry_a_huge_float": {"expires_at": 9e30},
    "fence_not_a_number": {"fence": "abc"},
    "result_a_text": {"status": COMPLETED, "settled_at": 1, "result": "1", "content_type": "a"},
    "fingerprint_a_text": {"fingerprint": "abc"},
}
"""Values that SQLite accepts regardless of the type of the column."""


class SqlContract(RepositoryContract, RecordAdminContract):
    """The contract suite, and tests of records with a single damaged column."""

    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    async def test_a_damaged_row_does_not_affect_the_rest_of_its_batch(
        self, store: StoreUnderTest, damage: dict[str, object]
    ) -> None:
        assert isinstance(store.repository, SqlIdempotencyRepository)
        root = f"contract:{uuid.uuid4().hex}:"
        bad, good = root + "bad", root + "good"
        await take(store, bad, fingerprint=b"f" * 16)
        values = {name: literal(value) for name, value in damage.items()}  # bypasses the type of the column
        async with writing(store.repository.engine) as connection:
            await connection.execute(update(records).where(records.c.key == bad).values(values))

        first, second = await store.repository.reserve([wish(bad, fingerprint=b"f" * 16), wish(good)])

        assert isinstance(first, Corrupt)
        assert first.reason
        assert isinstance(second, Reserved)
        with pytest.raises(CorruptRecordError):
            await store.repository.get([good, bad])
        assert [record.key async for record in store.repository.scan(root)] == [good]
        assert await store.repository.delete([bad]) == 1


@asynccontextmanager
async def store_on(url: str) -> AsyncIterator[StoreUnderTest]:
    engine = sql_engine(url, lock_timeout_seconds=20)
    await migrate(engine)

    async def advance(duration: timedelta) -> None:
        by = duration // timedelta(microseconds=1)
        times = ("lease_until", "expires_at", "settled_at")
        async with writing(engine) as connection:
            await connection.execute(update(records).values({name: records.c[name] - by for name in times}))

    async def spoil(key: str) -> None:
        async with writing(engine) as connection:
            await connection.execute(delete(records).where(records.c.key == key))
            row = {"key": key, "status": 9, "attempt": 1, "fence": 1, "token": b"", "expires_at": 2**60, "previous": 0}
            await connection.execute(records.insert(), row | {"owner": "", "result_dropped": False, "error": ""})

    yield StoreUnderTest(SqlIdempotencyRepository(engine, timeout=timedelta(seconds=30)), advance, spoil)
    await engine.dispose()


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariadbServer]:
    with MariadbServer() as server:
        yield server


class TestPostgreSQL(SqlContract):
    @pytest.fixture
    async def store(self, postgres: PostgresServer) -> AsyncIterator[StoreUnderTest]:
        async with store_on(postgres.url) as store:
            yield store


@pytest.mark.skipif(bool(missing_programs()), reason=missing_programs())
class TestMariaDB(SqlContract):
    histories = HistorySize(histories=30)

    @pytest.fixture
    async def store(self, mariadb: MariadbServer) -> AsyncIterator[StoreUnderTest]:
        async with store_on(mariadb.url) as store:
            yield store


class TestSQLite(SqlContract):
    @pytest.mark.parametrize("damage", INVALID_TYPES.values(), ids=INVALID_TYPES)
    async def test_a_value_of_the_wrong_type_does_not_affect_the_rest_of_its_batch(
        self, store: StoreUnderTest, damage: dict[str, object]
    ) -> None:
        await self.test_a_damaged_row_does_not_affect_the_rest_of_its_batch(store, damage)

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[StoreUnderTest]:
        async with store_on(f"sqlite+aiosqlite:///{tmp_path / 'idem.db'}") as store:
            yield store
