"""Errors of MariaDB, translated into errors of the library, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from integr8s_idem.records import Completion, InProgress, Reserved, StoredResult
from integr8s_idem.stores.sql import SqlIdempotencyRepository, check_schema, ddl, metadata, migrate, sql_engine
from integr8s_idem.stores.sql.errors import RecordHeldError
from integr8s_idem.stores.sql.migrations import _LOCK, MIGRATIONS
from integr8s_idem.testing.store_under_test import TTL, new_key, wish
from tests.support.mariadb import MariadbServer, missing_programs

pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=missing_programs())

TIMEOUT = timedelta(seconds=3)


@pytest.fixture(scope="module")
def mariadb() -> Iterator[MariadbServer]:
    with MariadbServer(keeps_commits=True) as server:
        yield server


@asynccontextmanager
async def engine_on(url: str) -> AsyncIterator[AsyncEngine]:
    engine = sql_engine(url, lock_timeout_seconds=0.3)
    try:
        yield engine
    finally:
        await engine.dispose()


@pytest.fixture
async def engine(mariadb: MariadbServer) -> AsyncIterator[AsyncEngine]:
    async with engine_on(mariadb.url) as engine:
        await migrate(engine)
        yield engine


async def run(engine: AsyncEngine, *statements: str) -> None:
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))


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


async def test_missing_tables_are_reported_with_the_command_to_create_them(engine: AsyncEngine) -> None:
    await run(engine, "DROP TABLE idempotency_records", "DROP TABLE idempotency_store")

    error = await error_of(engine)
    await migrate(engine)

    assert isinstance(error, StoreConfigurationError)
    assert "run: integr8s-idem store migrate" in str(error)
    assert await works(engine)


async def test_an_interrupted_migration_is_completed_by_the_next_one(engine: AsyncEngine) -> None:
    """Each CREATE TABLE commits at once and cannot be rolled back."""
    await run(
        engine, "DROP TABLE idempotency_store", "DROP INDEX idempotency_records_expires_at ON idempotency_records"
    )

    done = await asyncio.gather(*(migrate(engine) for _ in range(4)))

    assert sorted(len(steps) for steps in done) == [0, 0, 0, len(MIGRATIONS)]
    assert await works(engine)


@asynccontextmanager
async def table_being_changed(engine: AsyncEngine) -> AsyncIterator[None]:
    """Keep `idempotency_records` in the state that a migration causes for a moment: its definition cannot be read."""
    await run(engine, "CREATE TABLE IF NOT EXISTS zz_last (id INT)")
    renaming = "RENAME TABLE idempotency_records TO other_records, zz_last TO zz_other"
    async with engine.connect() as holder, engine.connect() as renamer:
        await holder.execute(text("SELECT * FROM zz_last"))
        # The exclusive lock of the first table is held while the statement waits for that of the second.
        number = await renamer.scalar(text("SELECT connection_id()"))
        change = asyncio.create_task(renamer.execute(text(renaming)))
        await until_state(engine, "Waiting for table metadata lock")
        try:
            yield
        finally:
            await run(engine, f"KILL QUERY {number}")
            with pytest.raises(DBAPIError, match="interrupted"):
                await change
    await run(engine, "DROP TABLE zz_last")


async def until_state(engine: AsyncEngine, state: str) -> None:
    """Return once a connection is in `state`."""
    query = text("SELECT count(*) FROM information_schema.processlist WHERE state = :state")
    async with asyncio.timeout(60), engine.connect() as connection:
        while (await connection.execute(query, {"state": state})).scalar_one() == 0:  # noqa: ASYNC110  # as below
            await asyncio.sleep(0.05)


async def test_a_worker_that_starts_while_a_table_is_changed_reports_an_outage(engine: AsyncEngine) -> None:
    store = SqlIdempotencyRepository(engine, timeout=TIMEOUT)

    async with table_being_changed(engine):
        with pytest.raises(StoreUnavailableError):  # it waits, since it holds no lock
            await store.ping()
        with pytest.raises(StoreUnavailableError, match="tables of the store are being changed"):
            await check_schema(engine, "purge", TIMEOUT)

    assert (await store.ping()).kind == "mysql"


async def test_a_migration_waits_for_another_process_that_changes_a_table(engine: AsyncEngine) -> None:
    name = f"CONCAT('integr8s-idem.{_LOCK}.', SHA1(DATABASE()))"
    async with engine.connect() as other:
        assert await other.scalar(text(f"SELECT GET_LOCK({name}, 0)")) == 1
        async with table_being_changed(engine):
            migration = asyncio.create_task(migrate(engine))
            await until_state(engine, "User lock")
        await other.execute(text(f"SELECT RELEASE_LOCK({name})"))

        assert await migration == []


async def test_the_printed_sql_creates_the_same_tables_as_migrate(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)

    await run(engine, *filter(str.strip, ddl(engine.dialect).split(";")))

    assert await migrate(engine) == []
    assert await works(engine)


@pytest.mark.parametrize(
    ("part", "replacement", "message"),
    [
        ("idem@", "unknown@", "does not accept this user and password"),
        ("/test", "/nowhere", "the database does not exist"),
    ],
)
async def test_permanent_errors_are_reported(mariadb: MariadbServer, part: str, replacement: str, message: str) -> None:
    async with engine_on(mariadb.url.replace(part, replacement)) as other:
        error = await error_of(other)

    assert isinstance(error, StoreConfigurationError)
    assert message in str(error)


async def test_a_crashed_server_is_an_outage_until_it_restarts(engine: AsyncEngine, mariadb: MariadbServer) -> None:
    assert await works(engine)

    await asyncio.to_thread(mariadb.crash)
    error = await error_of(engine)
    await asyncio.to_thread(mariadb.start_again)

    assert isinstance(error, StoreUnavailableError)
    assert await works(engine)


async def test_a_record_that_a_transaction_locks_is_in_progress_and_does_not_delay_other_keys(
    engine: AsyncEngine,
) -> None:
    store, held, free = SqlIdempotencyRepository(engine, timeout=timedelta(seconds=9)), new_key(), new_key()
    (reserved,) = await store.reserve([wish(held)])
    assert isinstance(reserved, Reserved)

    async with engine.begin() as holder:
        await holder.execute(text("SELECT 1 FROM idempotency_records WHERE `key` = :key FOR UPDATE"), {"key": held})
        first, second = await store.reserve([wish(held), wish(free)])
        with pytest.raises(RecordHeldError):
            await store.release([reserved])

    assert isinstance(first, InProgress)
    assert isinstance(second, Reserved)


@pytest.fixture
async def patient(mariadb: MariadbServer) -> AsyncIterator[AsyncEngine]:
    engine = sql_engine(mariadb.url, lock_timeout_seconds=30)
    yield engine
    await engine.dispose()


async def test_a_deadlock_is_an_outage_without_any_writes(engine: AsyncEngine, patient: AsyncEngine) -> None:
    """Only a foreign transaction can cause a deadlock, because the store locks rows in key order."""
    store, low, high = (
        SqlIdempotencyRepository(patient, timeout=timedelta(seconds=30)),
        f"a{new_key()}",
        f"b{new_key()}",
    )
    more = [f"c{new_key()}" for _ in range(20)]  # the database aborts the transaction with fewer writes
    await store.reserve([wish(key) for key in (low, high, *more)])
    write = text("UPDATE idempotency_records SET error = 'held' WHERE `key` = :key")

    async with patient.begin() as other:
        await other.execute(write, [{"key": key} for key in (high, *more)])
        deleting = asyncio.create_task(store.delete([low, high]))
        await wait_for_lock_wait(engine)
        await other.execute(write, {"key": low})

        with pytest.raises(StoreUnavailableError, match="found a deadlock"):
            await deleting
    assert None not in await store.get([low, high])


async def wait_for_lock_wait(engine: AsyncEngine) -> None:
    """Return once a transaction waits for a lock."""
    query = text("SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'")
    async with asyncio.timeout(60), engine.connect() as connection:
        while (await connection.execute(query)).scalar_one() == 0:  # noqa: ASYNC110  # the server has no event for it
            await asyncio.sleep(0.3)  # the server caches this table for a tenth of a second


async def test_a_connection_that_the_server_closes_fails_one_call(engine: AsyncEngine) -> None:
    store = SqlIdempotencyRepository(engine, timeout=TIMEOUT)
    assert await works(engine)
    async with engine.connect() as other:
        query = "SELECT id FROM information_schema.processlist WHERE user = 'idem' AND id <> connection_id()"
        for (number,) in (await other.execute(text(query))).all():
            await other.execute(text(f"KILL {number}"))

    failures = 0
    for _ in range(3):
        try:
            await store.reserve([wish(new_key())])
        except StoreUnavailableError:
            failures += 1

    assert failures <= 1


async def test_a_read_only_database_is_an_outage(engine: AsyncEngine, mariadb: MariadbServer) -> None:
    await run(engine, "CREATE USER IF NOT EXISTS plain@localhost", "GRANT ALL ON test.* TO plain@localhost")
    await run(engine, "SET GLOBAL read_only = ON")
    try:
        async with engine_on(mariadb.url.replace("idem@", "plain@")) as plain:
            error = await error_of(plain)
        health = await SqlIdempotencyRepository(engine).ping()
    finally:
        await run(engine, "SET GLOBAL read_only = OFF")

    assert isinstance(error, StoreUnavailableError)
    assert "read-only" in str(error)
    assert any("this server is read-only" in warning for warning in health.warnings)


async def test_settings_that_lose_commits_are_reported_as_warnings(engine: AsyncEngine) -> None:
    store = SqlIdempotencyRepository(engine)
    assert (await store.ping()).warnings == ()

    await run(engine, "SET GLOBAL innodb_flush_log_at_trx_commit = 2", "ALTER TABLE idempotency_records ENGINE = Aria")
    try:
        warnings = " ".join((await store.ping()).warnings)
    finally:
        await run(
            engine, "SET GLOBAL innodb_flush_log_at_trx_commit = 1", "ALTER TABLE idempotency_records ENGINE = InnoDB"
        )

    assert "innodb_flush_log_at_trx_commit is 2" in warnings
    assert "uses the engine Aria" in warnings


async def test_concurrent_batches_with_the_same_keys_do_not_deadlock(engine: AsyncEngine) -> None:
    store, keys = SqlIdempotencyRepository(engine, timeout=timedelta(seconds=30)), [new_key() for _ in range(60)]

    async def work(shift: int) -> int:
        verdicts = await store.reserve([wish(key) for key in keys[shift:] + keys[:shift]])
        reserved = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        await store.renew(reserved, timedelta(seconds=60))
        await store.release(reserved)
        verdicts = await store.reserve([wish(key) for key in keys])
        reserved = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        return sum(await store.complete([Completion(reservation=one, ttl=TTL) for one in reserved]))

    completed = await asyncio.gather(*map(work, range(0, 60, 5)))

    assert sum(completed) == 60


async def test_a_canceled_call_leaves_no_response_for_the_next_one(engine: AsyncEngine) -> None:
    store = SqlIdempotencyRepository(engine, timeout=timedelta(seconds=30))

    async def check(number: int) -> None:
        key, result = f"{new_key()}:{number}", StoredResult(str(number).encode() * 1_000)
        (verdict,) = await store.reserve([wish(key)])
        assert isinstance(verdict, Reserved)
        assert verdict.key == key
        assert await store.complete([Completion(reservation=verdict, ttl=TTL, result=result)]) == [True]
        (record,) = await store.get([key])
        assert record is not None
        assert record.result == result

    for number in range(60):
        doomed = [asyncio.create_task(check(number)) for _ in range(4)]
        await asyncio.sleep(number / 6_000)
        for task in doomed:
            task.cancel()
        results = await asyncio.gather(*doomed, return_exceptions=True)
        assert {type(result) for result in results} <= {asyncio.CancelledError, type(None)}
        await check(number)


async def test_a_record_that_is_deleted_before_its_verdict_is_read_is_reserved_again(engine: AsyncEngine) -> None:
    """The upsert commits before its rows are read, so another process can delete one in between."""
    store, keys, intercepted = SqlIdempotencyRepository(engine), [new_key(), new_key()], list[str]()

    @event.listens_for(engine.sync_engine, "before_cursor_execute")
    def _delete(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SELECT") and not intercepted:
            intercepted.append(statement)
            cursor.execute("DELETE FROM idempotency_records WHERE `key` = %s", (keys[1].encode(),))

    verdicts = await store.reserve([wish(key) for key in keys])

    assert intercepted
    assert [(verdict.key, type(verdict)) for verdict in verdicts] == [(key, Reserved) for key in keys]


async def test_times_are_utc_and_fences_grow_with_them(engine: AsyncEngine) -> None:
    """The time zone of the server is half a day off (`tests.support.mariadb`)."""
    store = SqlIdempotencyRepository(engine)

    (first,) = await store.reserve([wish(new_key())])
    async with engine.connect() as connection:
        now = int((await connection.execute(text("SELECT unix_timestamp(sysdate(6)) * 1000000"))).scalar_one())

    assert isinstance(first, Reserved)
    assert abs(now - first.fence) < 60_000_000


async def test_errors_do_not_contain_data_of_records(engine: AsyncEngine) -> None:
    store = SqlIdempotencyRepository(engine, timeout=TIMEOUT)
    await run(engine, "ALTER TABLE idempotency_records RENAME COLUMN owner TO holder")
    try:
        with pytest.raises(StoreConfigurationError) as caught:
            await store.reserve([wish("canary-key", owner="canary-owner")])
    finally:
        await run(engine, "ALTER TABLE idempotency_records RENAME COLUMN holder TO owner")

    assert "canary" not in str(caught.value)
