"""Errors of PostgreSQL and SQLite, translated into errors of the library, on real servers and files."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from integr8s_idem.records import Failure, InProgress, Reserved
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine
from integr8s_idem.stores.sql.schema import VERSION
from integr8s_idem.testing.store_under_test import TTL, new_key, wish
from tests.support.conditions import eventually
from tests.support.postgres import PostgresServer

TIMEOUT = timedelta(seconds=3)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer(keeps_commits=True) as server:
        yield server


@asynccontextmanager
async def engine_on(url: str) -> AsyncIterator[AsyncEngine]:
    engine = sql_engine(url, lock_timeout_seconds=0.3)
    yield engine
    await engine.dispose()
    # Each SQLite connection has a thread, which must end even if the connection failed.
    await eventually(lambda: not [thread for thread in threading.enumerate() if "_connection_worker" in thread.name])


@pytest.fixture
async def engine(postgres: PostgresServer) -> AsyncIterator[AsyncEngine]:
    async with engine_on(postgres.url) as engine:
        await migrate(engine)
        yield engine


async def run(engine: AsyncEngine, *statements: str) -> None:
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))


def file(folder: Path) -> str:
    return f"sqlite+aiosqlite:///{folder / 'idem.db'}"


async def error_of(engine: AsyncEngine) -> StoreError:
    """Return the error of a reservation; a ping must fail with the same type."""
    store = SqlIdempotencyRepository(engine, timeout=TIMEOUT)
    with pytest.raises(StoreError) as pinged:
        await store.ping()
    with pytest.raises(StoreError) as reserved:
        await store.reserve([wish(new_key())])
    assert type(reserved.value) is type(pinged.value)
    return reserved.value


async def works(engine: AsyncEngine) -> bool:
    (verdict,) = await SqlIdempotencyRepository(engine, timeout=TIMEOUT).reserve([wish(new_key())])
    return isinstance(verdict, Reserved)


@pytest.mark.scenario(59)
@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
async def test_missing_tables_are_reported_with_the_command_to_create_them(
    kind: str, postgres: PostgresServer, tmp_path: Path
) -> None:
    async with engine_on(postgres.url if kind == "postgresql" else file(tmp_path)) as engine:
        await run(engine, "DROP TABLE IF EXISTS idempotency_records", "DROP TABLE IF EXISTS idempotency_store")
        error = await error_of(engine)
        assert isinstance(error, StoreConfigurationError)
        assert "run: integr8s-idem store migrate" in str(error)

        await migrate(engine)
        assert await works(engine)


@pytest.mark.scenario(59)
@pytest.mark.parametrize(
    ("version", "message"), [(0, "store migrate"), (VERSION + 1, "a newer integr8s-idem migrated it")]
)
async def test_a_schema_of_another_version_is_refused(engine: AsyncEngine, version: int, message: str) -> None:
    await run(engine, f"UPDATE idempotency_store SET version = {version}")

    with pytest.raises(StoreConfigurationError, match=message):
        await SqlIdempotencyRepository(engine).ping()

    await run(engine, "UPDATE idempotency_store SET version = 1")


@pytest.mark.scenario(55)
async def test_a_crashed_server_is_an_outage_until_it_restarts(engine: AsyncEngine, postgres: PostgresServer) -> None:
    assert await works(engine)

    await asyncio.to_thread(postgres.crash)
    error = await error_of(engine)
    await asyncio.to_thread(postgres.start_again)

    assert isinstance(error, StoreUnavailableError)
    assert await works(engine)


@pytest.mark.scenario(55)
async def test_a_record_that_a_transaction_locks_is_in_progress_and_does_not_delay_other_keys(
    engine: AsyncEngine,
) -> None:
    store, held, free = SqlIdempotencyRepository(engine, timeout=TIMEOUT), new_key(), new_key()
    (reserved,) = await store.reserve([wish(held)])
    assert isinstance(reserved, Reserved)

    async with engine.begin() as holder:
        await holder.execute(text("SELECT 1 FROM idempotency_records WHERE key = :key FOR UPDATE"), {"key": held})
        first, second = await store.reserve([wish(held), wish(free)])
        with pytest.raises(StoreUnavailableError, match="another transaction locks a record"):
            await store.release([reserved])

    assert isinstance(first, InProgress)
    assert first.owner == "an open transaction"
    assert isinstance(second, Reserved)


@pytest.mark.scenario(55)
async def test_a_connection_that_the_server_closes_fails_one_call(engine: AsyncEngine) -> None:
    store = SqlIdempotencyRepository(engine, timeout=TIMEOUT)
    async with engine.begin() as other:
        await other.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        )

    failures = 0
    for _ in range(3):
        try:
            await store.reserve([wish(new_key())])
        except StoreUnavailableError:
            failures += 1

    assert failures <= 1


@pytest.mark.scenario(55)
async def test_a_read_only_database_is_an_outage(engine: AsyncEngine, postgres: PostgresServer) -> None:
    await run(engine, "ALTER DATABASE postgres SET default_transaction_read_only = on")
    try:
        async with engine_on(postgres.url) as read_only:
            error = await error_of(read_only)
    finally:
        await run(engine, "SET TRANSACTION READ WRITE", "ALTER DATABASE postgres RESET default_transaction_read_only")

    assert isinstance(error, StoreUnavailableError)
    assert "read-only" in str(error)


async def test_backslashes_may_be_escapes_in_all_strings_of_a_database(
    engine: AsyncEngine, postgres: PostgresServer
) -> None:
    await run(engine, "ALTER DATABASE postgres SET standard_conforming_strings = off")
    try:
        async with engine_on(postgres.url) as escaping:
            store, key = SqlIdempotencyRepository(escaping, timeout=TIMEOUT), new_key()
            (first,) = await store.reserve([wish(key)])
            assert isinstance(first, Reserved)
            await store.release([first])
            (second,) = await store.reserve([wish(key)])
    finally:
        await run(engine, "ALTER DATABASE postgres RESET standard_conforming_strings")

    assert isinstance(second, Reserved)
    assert second.attempt == 2


@pytest.mark.scenario(58)
async def test_a_locked_sqlite_file_is_an_outage_until_it_is_unlocked(tmp_path: Path) -> None:
    async with engine_on(file(tmp_path)) as engine:
        await migrate(engine)
        other = sqlite3.connect(tmp_path / "idem.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")

        error = await error_of(engine)
        other.execute("ROLLBACK")
        other.close()

        assert isinstance(error, StoreUnavailableError)
        assert "another process locks the SQLite file" in str(error)
        assert await works(engine)


@pytest.mark.scenario(58)
@pytest.mark.parametrize(
    ("replace", "kind", "message"),
    [
        (lambda path: path.write_bytes(b"not a database" * 500), StoreConfigurationError, "not a SQLite database"),
        (lambda path: path.mkdir(), StoreConfigurationError, "cannot be opened"),
    ],
    ids=["another file", "a directory"],
)
async def test_a_path_without_a_database_is_reported(
    tmp_path: Path, replace: object, kind: type[StoreError], message: str
) -> None:
    assert callable(replace)
    replace(tmp_path / "idem.db")

    async with engine_on(file(tmp_path)) as engine:
        error = await error_of(engine)

    assert isinstance(error, kind)
    assert message in str(error)


@pytest.mark.parametrize("database", ["", "/:memory:", "/file:idem?mode=memory&cache=shared&uri=true"])
def test_in_memory_sqlite_is_refused_with_the_store_to_use_instead(database: str) -> None:
    with pytest.raises(StoreConfigurationError, match="MemoryIdempotencyRepository"):
        sql_engine(f"sqlite+aiosqlite://{database}")


@pytest.mark.scenario(58)
async def test_a_corrupt_sqlite_file_is_reported_and_no_record_counts_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "idem.db"
    async with engine_on(file(tmp_path)) as engine:
        await migrate(engine)
        store = SqlIdempotencyRepository(engine)
        await store.reserve([wish(f"key-{number}") for number in range(500)])
    content = bytearray(path.read_bytes())
    content[4096 : len(content)] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)

    async with engine_on(file(tmp_path)) as engine:
        error = await error_of(engine)

    assert isinstance(error, StoreConfigurationError)
    assert "corrupt" in str(error)


async def test_concurrent_batches_with_the_same_keys_do_not_deadlock(
    engine: AsyncEngine, postgres: PostgresServer
) -> None:
    """Each statement locks its rows in key order, regardless of their order on disk."""
    patient, rng = sql_engine(postgres.url, lock_timeout_seconds=30), random.Random(7)
    store = SqlIdempotencyRepository(patient, timeout=timedelta(seconds=60))
    batches = [[wish(new_key()) for _ in range(10)] for _ in range(20)]
    verdicts = [verdict for batch in batches for verdict in await store.reserve(batch)]
    held = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]

    async def work() -> None:
        for _ in range(5):
            await store.reserve([wish(one.key) for one in rng.sample(held, 150)])
            await store.renew(rng.sample(held, 150), timedelta(seconds=60))
            await store.fail([Failure(reservation=one, ttl=TTL, error="no") for one in rng.sample(held, 2)])

    await asyncio.gather(*(work() for _ in range(4)))

    assert await store.delete([one.key for one in held]) == 200
    await patient.dispose()


async def test_errors_do_not_contain_data_of_records(engine: AsyncEngine) -> None:
    store = SqlIdempotencyRepository(engine, timeout=TIMEOUT)
    await run(engine, "ALTER TABLE idempotency_records RENAME COLUMN owner TO holder")
    try:
        with pytest.raises(StoreConfigurationError) as caught:
            await store.reserve([wish("canary-key", owner="canary-owner")])
    finally:
        await run(engine, "ALTER TABLE idempotency_records RENAME COLUMN holder TO owner")

    assert "canary" not in str(caught.value)
