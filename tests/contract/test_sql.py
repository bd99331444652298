"""The contract of all stores, held by those in SQL: PostgreSQL, MariaDB and SQLite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import delete, update

from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine
from integr8s_idem.stores.sql.engine import writing
from integr8s_idem.stores.sql.schema import records
from integr8s_idem.testing.contract import HistorySize, RepositoryContract, StoreUnderTest
from tests.support.mariadb import MariadbServer, missing_programs
from tests.support.postgres import PostgresServer


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


class TestPostgreSQL(RepositoryContract):
    @pytest.fixture
    async def store(self, postgres: PostgresServer) -> AsyncIterator[StoreUnderTest]:
        async with store_on(postgres.url) as store:
            yield store


@pytest.mark.skipif(bool(missing_programs()), reason=missing_programs())
class TestMariaDB(RepositoryContract):
    histories = HistorySize(histories=30)

    @pytest.fixture
    async def store(self, mariadb: MariadbServer) -> AsyncIterator[StoreUnderTest]:
        async with store_on(mariadb.url) as store:
            yield store


class TestSQLite(RepositoryContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[StoreUnderTest]:
        async with store_on(f"sqlite+aiosqlite:///{tmp_path / 'idem.db'}") as store:
            yield store
