"""Statements of a joined run that bypass SQLAlchemy on asyncpg's connections, and where they do not.

The servers, drivers and connections are real. Statements that SQLAlchemy executes are counted by its own event, those
that reach the server by a proxy, and greenlets by Python's profiler.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from sqlalchemy import event, insert, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.util import greenlet_spawn

from integr8s_idem import IdempotencyManager
from integr8s_idem.config import OnInProgress
from integr8s_idem.diagnostics import Code
from integr8s_idem.errors import (
    ApplicationError,
    InProgressError,
    StoreConfigurationError,
    StoreUnavailableError,
)
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.stores.sql import SqlIdempotencyRepository, metadata, migrate, savepoints, sql_engine
from tests.support.conditions import LONGEST_WAIT
from tests.support.databases import KINDS, url_of
from tests.support.ledger_shop import charges, tables
from tests.support.postgres import PostgresServer
from tests.support.turns import TurnCounter


async def create_tables(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
        await connection.run_sync(tables.drop_all)
        await connection.run_sync(tables.create_all)
    await migrate(engine)


@asynccontextmanager
async def engine_on(url: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = sql_engine(url, **options)
    await create_tables(engine)
    yield engine
    await engine.dispose()


@pytest.fixture
async def postgres(shared_postgres: PostgresServer) -> AsyncIterator[AsyncEngine]:
    async with engine_on(shared_postgres.url, lock_timeout_seconds=20) as engine:
        yield engine


@pytest.fixture
async def counter(shared_postgres: PostgresServer) -> AsyncIterator[TurnCounter]:
    async with TurnCounter(shared_postgres.folder / ".s.PGSQL.5432") as counter:
        yield counter


def manager_on(engine: AsyncEngine) -> IdempotencyManager:
    return IdempotencyManager(repository=SqlIdempotencyRepository(engine), scope="refunds")


def charging(connection: AsyncConnection | AsyncSession, order: str = "1") -> Callable[[], Awaitable[str]]:
    async def charge() -> str:
        await connection.execute(insert(charges).values(order_id=order))
        return f"receipt {order}"

    return charge


async def nothing() -> None: ...


async def charged(engine: AsyncEngine) -> list[str]:
    async with engine.connect() as connection:
        return list(await connection.scalars(select(charges.c.order_id).order_by(charges.c.order_id)))


@contextmanager
def statements_of_sqlalchemy(engine: AsyncEngine) -> Iterator[list[str]]:
    executed: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        executed.append(statement)

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    yield executed
    event.remove(engine.sync_engine, "before_cursor_execute", note)


@contextmanager
def greenlets() -> Iterator[list[str]]:
    """Collect the callers of SQLAlchemy's `greenlet_spawn` in this thread."""
    spawned: list[str] = []
    code = greenlet_spawn.__code__

    def note(frame: FrameType, what: str, _: object) -> None:
        if what == "call" and frame.f_code is code and frame.f_lineno == code.co_firstlineno and frame.f_back:
            spawned.append(frame.f_back.f_code.co_qualname)

    sys.setprofile(note)
    try:
        yield spawned
    finally:
        sys.setprofile(None)


def records_in(statements: list[str]) -> int:
    return sum("idempotency_records" in statement for statement in statements)


async def test_a_run_on_asyncpg_uses_neither_sqlalchemys_execution_nor_a_greenlet(postgres: AsyncEngine) -> None:
    manager = manager_on(postgres)
    async with postgres.begin() as connection, manager.in_transaction(connection):
        with statements_of_sqlalchemy(postgres) as executed, greenlets() as spawned:
            await manager.run("refund:1", nothing)

    assert executed == []
    assert spawned == []
    assert await manager.get("refund:1") is not None


@pytest.mark.parametrize("kind", KINDS)
async def test_only_asyncpg_is_used_directly(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    async with engine_on(url_of(kind, request, tmp_path)) as engine:
        manager = manager_on(engine)
        with statements_of_sqlalchemy(engine) as executed:
            async with engine.begin() as connection, manager.in_transaction(connection):
                assert await manager.run("refund:1", charging(connection)) == "receipt 1"

        assert records_in(executed) == {"postgresql": 0, "sqlite": 2, "mysql": 3}[kind]
        assert await charged(engine) == ["1"]


async def test_a_connection_with_a_schema_map_uses_sqlalchemy(postgres: AsyncEngine) -> None:
    manager = manager_on(postgres)
    mapped = postgres.execution_options(schema_translate_map={None: "public"})
    with statements_of_sqlalchemy(postgres) as executed:
        async with mapped.begin() as connection, manager.in_transaction(connection):
            await manager.run("refund:1", charging(connection))

    assert records_in(executed) == 2
    assert await charged(postgres) == ["1"]


async def test_a_driver_without_the_coroutine_uses_sqlalchemy(
    postgres: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with postgres.connect() as connection:
        cursor: Any = type((await connection.get_raw_connection()).cursor())
    own = cursor._prepare_and_execute
    monkeypatch.delattr(cursor, "_prepare_and_execute")
    monkeypatch.setattr(cursor, "execute", lambda self, *arguments: _await(own(self, *arguments)))
    manager = manager_on(postgres)
    with statements_of_sqlalchemy(postgres) as executed:
        async with postgres.begin() as connection, manager.in_transaction(connection):
            await manager.run("refund:1", charging(connection))

    assert records_in(executed) == 2
    assert await charged(postgres) == ["1"]


def _await(awaitable: Awaitable[Any]) -> Any:
    from sqlalchemy.util import await_only

    return await_only(awaitable)


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "SERIALIZABLE"])
async def test_the_first_statement_of_a_run_begins_the_transaction_once(
    isolation: str, counter: TurnCounter, postgres: AsyncEngine
) -> None:
    engine = create_async_engine(
        f"postgresql+asyncpg://postgres@127.0.0.1:{counter.port}/postgres", isolation_level=isolation, pool_size=1
    )
    manager = manager_on(postgres)
    for number in (1, 2):  # the first transaction also prepares the statements
        async with engine.connect() as connection, connection.begin(), manager.in_transaction(connection):
            counter.requests.clear()
            await manager.run(f"refund:{number}", charging(connection))
        sent = bytes(counter.requests)

        assert b"BEGIN" in sent[:10]  # it is the first request
        assert sent.count(b"BEGIN") == 1
        assert sent.count(b"COMMIT;") == 1
        if number == 1:
            order = [
                b"BEGIN",
                b"INSERT INTO idempotency_records",
                b"INSERT INTO charges",
                b"UPDATE idempotency_records",
            ]
            assert sorted(order, key=sent.index) == order
        assert (b"SERIALIZABLE" in sent) == (isolation == "SERIALIZABLE")
    await engine.dispose()


@pytest.mark.parametrize("first", ["the run", "another statement"])
async def test_a_rolled_back_transaction_leaves_neither_the_row_nor_the_record(
    first: str, postgres: AsyncEngine
) -> None:
    manager = manager_on(postgres)
    async with postgres.connect() as connection, manager.in_transaction(connection):
        transaction = await connection.begin()
        if first == "another statement":
            await connection.execute(insert(charges).values(order_id="before"))
        await manager.run("refund:1", charging(connection))
        await transaction.rollback()

    assert await charged(postgres) == []
    assert await manager.get("refund:1") is None


async def test_the_engine_decides_how_statements_are_prepared(counter: TurnCounter, postgres: AsyncEngine) -> None:
    numbers = itertools.count()
    engine = create_async_engine(
        f"postgresql+asyncpg://postgres@127.0.0.1:{counter.port}/postgres",
        pool_size=1,
        connect_args={
            "statement_cache_size": 0,
            "prepared_statement_cache_size": 0,
            "prepared_statement_name_func": lambda: f"__shop_{next(numbers)}__",
        },
    )
    manager = manager_on(postgres)
    for number in (1, 2):
        async with engine.connect() as connection, connection.begin(), manager.in_transaction(connection):
            counter.requests.clear()
            await manager.run(f"refund:{number}", charging(connection))

        # As behind a pooler that gives each transaction another connection: nothing was prepared by an earlier one.
        assert counter.requests.count(b"INSERT INTO idempotency_records") == 1
        assert counter.requests.count(b"UPDATE idempotency_records") == 1
        assert b"__asyncpg" not in counter.requests
        assert b"__shop_" in counter.requests
    await engine.dispose()


async def test_a_missing_table_is_a_configuration_error(postgres: AsyncEngine) -> None:
    manager = manager_on(postgres)
    async with postgres.begin() as connection:
        await connection.run_sync(metadata.drop_all)

    async with postgres.connect() as connection, connection.begin(), manager.in_transaction(connection):
        with pytest.raises(StoreConfigurationError) as raised:
            await manager.run("refund:1", charging(connection))
        assert await connection.scalar(text("SELECT 1")) == 1  # its transaction continues

    assert raised.value.code == Code.SCHEMA_MISSING


@pytest.mark.parametrize("first", [True, False])
async def test_a_cancelled_statement_leaves_no_connection_in_the_middle_of_a_response(
    first: bool, postgres: AsyncEngine
) -> None:
    manager = manager_on(postgres)

    async def duplicate() -> None:
        async with postgres.begin() as connection, manager.in_transaction(connection):
            if not first:
                await connection.execute(select(charges))
            await manager.run("refund:1", charging(connection))

    async with postgres.begin() as connection, manager.in_transaction(connection):
        await manager.run("refund:1", charging(connection))
        waiting = asyncio.create_task(duplicate())
        await _blocked(postgres)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    assert await charged(postgres) == ["1"]
    for number in range(2, 7):  # on each pooled connection
        async with postgres.begin() as connection, manager.in_transaction(connection):
            assert await manager.run(f"refund:{number}", charging(connection, f"{number}")) == f"receipt {number}"


async def _blocked(engine: AsyncEngine) -> None:
    """Wait until a statement waits for a transaction."""
    await _until(engine, "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted")


async def _until(engine: AsyncEngine, query: str) -> None:
    """Wait until `query` returns true."""
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        async with asyncio.timeout(LONGEST_WAIT):
            while not await connection.scalar(text(query)):  # noqa: ASYNC110  # the server sends no event
                await asyncio.sleep(0.02)


async def test_concurrent_transactions_for_one_key_charge_once(shared_postgres: PostgresServer) -> None:
    async with engine_on(shared_postgres.url, pool_size=12, lock_timeout_seconds=20) as engine:
        manager = manager_on(engine)

        async def order(key: str) -> str:
            async with AsyncSession(engine) as session, session.begin(), manager.in_transaction(session):
                return await manager.run(key, charging(session, key))

        for number in range(5):
            results = await asyncio.gather(*(order(f"refund:{number}") for _ in range(12)))
            assert results == [f"receipt refund:{number}"] * 12

        assert await charged(engine) == [f"refund:{number}" for number in range(5)]


async def test_transactions_that_deadlock_are_aborted_and_leave_whole_outcomes(postgres: AsyncEngine) -> None:
    manager = manager_on(postgres)
    both_hold_one = asyncio.Barrier(2)

    async def order(*keys: str) -> str:
        async with postgres.begin() as connection, manager.in_transaction(connection):
            await manager.run(keys[0], charging(connection, keys[0]))
            await both_hold_one.wait()
            await manager.run(keys[1], charging(connection, keys[1]))
        return "committed"

    outcomes = await asyncio.gather(order("a", "b"), order("b", "a"), return_exceptions=True)

    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["TransactionAbortedError", "str"]
    assert await charged(postgres) == ["a", "b"]
    for key in ("a", "b"):
        record = await manager.get(key)
        assert record is not None
        assert record.status is IdempotencyStatus.COMPLETED


async def kill(session: AsyncSession, engine: AsyncEngine) -> None:
    """Close the connection of `session` from the server's side."""
    pid = await session.scalar(text("SELECT pg_backend_pid()"))
    await _until(engine, f"SELECT pg_terminate_backend({pid})")
    await _until(engine, f"SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = {pid}")


@pytest.mark.parametrize("notices", [True, False], ids=["the work notices", "the work does not notice"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "after another statement"])
async def test_a_connection_killed_between_reserve_and_complete_leaves_nothing(
    first: bool, notices: bool, postgres: AsyncEngine
) -> None:
    manager = manager_on(postgres)
    async with AsyncSession(postgres) as session:

        async def killed() -> None:
            await charging(session)()
            await kill(session, postgres)
            if notices:
                with suppress(DBAPIError):
                    await session.execute(select(charges))

        async with manager.in_transaction(session):
            if not first:
                await session.execute(select(charges))
            with pytest.raises(StoreUnavailableError):
                await manager.run("refund:1", killed)

    assert await charged(postgres) == []
    assert await manager.get("refund:1") is None
    async with AsyncSession(postgres) as session, session.begin(), manager.in_transaction(session):
        assert await manager.run("refund:1", charging(session)) == "receipt 1"
    assert await charged(postgres) == ["1"]


@pytest.mark.parametrize("first", [True, False])
async def test_a_lock_timeout_undoes_only_the_statement(first: bool, shared_postgres: PostgresServer) -> None:
    async with engine_on(shared_postgres.url, lock_timeout_seconds=0.05) as engine:
        manager = manager_on(engine)
        async with engine.begin() as holder, manager.in_transaction(holder):
            await manager.run("refund:1", charging(holder))
            async with engine.begin() as connection, manager.in_transaction(connection):
                if not first:
                    await connection.execute(insert(charges).values(order_id="0"))
                with pytest.raises(InProgressError):
                    await manager.run("refund:1", charging(connection), on_in_progress=OnInProgress.RAISE)
                await manager.run("refund:2", charging(connection, "2"))

        assert await charged(engine) == (["1", "2"] if first else ["0", "1", "2"])


async def test_a_connection_that_commits_each_statement_is_refused(postgres: AsyncEngine) -> None:
    manager = manager_on(postgres)
    async with postgres.connect() as connection, manager.in_transaction(connection):
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(StoreConfigurationError, match="SAVEPOINT can only be used in transaction blocks"):
            await manager.run("refund:1", charging(connection))

    assert await charged(postgres) == []
    assert await manager.get("refund:1") is None


async def test_a_commit_is_refused_without_the_private_method_of_sqlalchemy(
    postgres: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(savepoints, "_COMMIT_METHOD", "_renamed_by_a_later_version")
    manager = manager_on(postgres)
    async with postgres.connect() as connection, manager.in_transaction(connection):

        async def committing() -> None:
            await charging(connection)()
            await connection.commit()

        with pytest.raises(ApplicationError, match="before its outcome was written"):
            await manager.run("refund:1", committing)

    assert await charged(postgres) == []


async def test_statements_outside_a_run_report_no_events(postgres: AsyncEngine) -> None:
    manager = manager_on(postgres)
    async with postgres.begin() as connection, manager.in_transaction(connection):
        await manager.run("refund:1", charging(connection))

    # SQLAlchemy dispatches events as soon as one listener is registered, which slows down each statement.
    assert not postgres.sync_engine._has_events
