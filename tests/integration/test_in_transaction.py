"""`IdempotencyManager.in_transaction`: work and its record commit with the caller's transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
)
from sqlalchemy.orm import Session

from integr8s_idem import IdempotencyManager
from integr8s_idem.config import OnInProgress
from integr8s_idem.errors import (
    ApplicationError,
    InProgressError,
    LeaseLostError,
    StoreConfigurationError,
    TransactionAbortedError,
)
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.stores.sql import SqlIdempotencyRepository, metadata, migrate, sql_engine
from tests.support.databases import KINDS, url_of
from tests.support.ledger_shop import charges, tables


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    engine = sql_engine(url_of(request.param, request, tmp_path), lock_timeout_seconds=0.3)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
        await connection.run_sync(tables.drop_all)
        await connection.run_sync(tables.create_all)
    await migrate(engine)
    yield engine
    await engine.dispose()


@pytest.fixture
def manager(engine: AsyncEngine) -> IdempotencyManager:
    return IdempotencyManager(repository=SqlIdempotencyRepository(engine), scope="refunds")


class Refund:
    """Work that writes in the caller's session."""

    def __init__(self, session: AsyncSession | AsyncConnection) -> None:
        self.session = session
        self.runs = 0

    async def __call__(self) -> str:
        self.runs += 1
        await self.session.execute(insert(charges).values(order_id=f"run {self.runs}"))
        return "receipt"


@asynccontextmanager
async def session_of(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine) as session, session.begin():
        yield session


async def charged(engine: AsyncEngine) -> list[str]:
    async with engine.connect() as connection:
        return list(await connection.scalars(select(charges.c.order_id)))


async def test_record_and_write_commit_together_and_a_second_caller_gets_the_result(
    engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    for _ in range(2):
        async with session_of(engine) as session, manager.in_transaction(session):
            assert await manager.run("refund:1", Refund(session)) == "receipt"

    assert await charged(engine) == ["run 1"]
    record = await manager.get("refund:1")
    assert record is not None
    assert record.status is IdempotencyStatus.COMPLETED


async def test_an_iterator_is_read_within_the_transaction(engine: AsyncEngine, manager: IdempotencyManager) -> None:
    async def refund() -> object:
        await work()
        return map(str, [1, 2])

    results = []
    for _ in range(2):
        async with session_of(engine) as session, manager.in_transaction(session):
            work = Refund(session)
            results.append(await manager.run("refund:1", refund))

    assert results == [["1", "2"]] * 2
    assert await charged(engine) == ["run 1"]


async def test_work_is_rolled_back_if_its_result_can_be_read_only_once(
    engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    async with session_of(engine) as session, manager.in_transaction(session):

        async def refund() -> object:
            await Refund(session)()
            return {"rows": iter([1])}

        with pytest.raises(ApplicationError, match=r"contains an iterator .* at \['rows'\]"):
            await manager.run("refund:1", refund)

    assert await charged(engine) == []
    assert await manager.get("refund:1") is None


async def test_a_rolled_back_transaction_leaves_no_record(engine: AsyncEngine, manager: IdempotencyManager) -> None:
    async with AsyncSession(engine) as session, manager.in_transaction(session):
        await manager.run("refund:1", Refund(session))
        await session.rollback()

    assert await charged(engine) == []
    assert await manager.get("refund:1") is None


async def test_failed_work_is_rolled_back_and_the_rest_of_the_transaction_commits(
    engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    async with session_of(engine) as session, manager.in_transaction(session):

        async def failing() -> None:
            await Refund(session)()
            raise ConnectionError("the bank is down")

        await session.execute(insert(charges).values(order_id="before"))
        with pytest.raises(ConnectionError, match="the bank is down"):
            await manager.run("refund:1", failing)

    assert await charged(engine) == ["before"]
    assert await manager.get("refund:1") is None


async def test_work_that_fails_first_is_rolled_back_and_the_transaction_continues(
    engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    async with session_of(engine) as session, manager.in_transaction(session):

        async def failing() -> None:
            await Refund(session)()
            raise ConnectionError("the bank is down")

        with pytest.raises(ConnectionError, match="the bank is down"):
            await manager.run("refund:1", failing)
        await manager.run("refund:2", Refund(session))
        await session.execute(insert(charges).values(order_id="after"))

    assert await charged(engine) == ["run 1", "after"]
    assert await manager.get("refund:1") is None
    assert await manager.get("refund:2") is not None


async def test_failed_nested_work_is_rolled_back_alone(engine: AsyncEngine, manager: IdempotencyManager) -> None:
    async with session_of(engine) as session, manager.in_transaction(session):

        async def failing() -> None:
            await session.execute(insert(charges).values(order_id="inner"))
            raise ConnectionError("the bank is down")

        async def outer() -> None:
            await session.execute(insert(charges).values(order_id="outer"))
            with suppress(ConnectionError):
                await manager.run("refund:inner", failing)

        await manager.run("refund:outer", outer)

    assert await charged(engine) == ["outer"]
    assert await manager.get("refund:inner") is None
    assert await manager.get("refund:outer") is not None


@pytest.mark.parametrize("is_undone", [False, True])
async def test_a_savepoint_of_the_session_contains_a_later_run(
    is_undone: bool, engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    async with session_of(engine) as session, manager.in_transaction(session):
        await manager.run("refund:1", Refund(session))
        with suppress(ConnectionError):
            async with session.begin_nested():
                await manager.run("refund:2", Refund(session))
                if is_undone:
                    raise ConnectionError("the bank is down")

    assert len(await charged(engine)) == (1 if is_undone else 2)
    assert (await manager.get("refund:2") is None) is is_undone


async def test_failed_work_in_a_savepoint_of_the_session_is_rolled_back_alone(
    engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    async with session_of(engine) as session, manager.in_transaction(session):

        async def failing() -> None:
            await session.execute(insert(charges).values(order_id="failed"))
            raise ConnectionError("the bank is down")

        await manager.run("refund:1", Refund(session))
        async with session.begin_nested():
            with suppress(ConnectionError):
                await manager.run("refund:2", failing)
            await session.execute(insert(charges).values(order_id="in the savepoint"))

    assert sorted(await charged(engine)) == ["in the savepoint", "run 1"]
    assert await manager.get("refund:2") is None


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
async def test_work_that_rolls_back_the_transaction_loses_its_lease(
    engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    async with AsyncSession(engine) as session, manager.in_transaction(session):

        async def rolling_back() -> None:
            await session.rollback()
            await session.execute(insert(charges).values(order_id="by the work, after its rollback"))

        with pytest.raises(LeaseLostError):
            await manager.run("refund:1", rolling_back)

    assert await charged(engine) == []
    assert await manager.get("refund:1") is None


async def test_a_database_error_in_the_work_is_raised_unchanged(
    engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    async with session_of(engine) as session, manager.in_transaction(session):

        async def failing() -> None:
            await session.execute(insert(charges).values(id=1, order_id="twice"))

        await session.execute(insert(charges).values(id=1, order_id="before"))
        with pytest.raises(IntegrityError):
            await manager.run("refund:1", failing)

    assert await charged(engine) == ["before"]
    assert await manager.get("refund:1") is None


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
async def test_a_serialization_conflict_aborts_the_transaction(
    engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    strict = engine.execution_options(isolation_level="REPEATABLE READ")
    async with session_of(engine) as session:
        await session.execute(insert(charges).values(id=1, order_id="before"))

    async with AsyncSession(strict) as session, manager.in_transaction(session):

        async def work() -> None:
            await session.execute(select(charges))
            async with engine.begin() as other:
                await other.execute(update(charges).values(order_id="changed"))
            await session.execute(update(charges).values(order_id="changed as well"))

        with pytest.raises(TransactionAbortedError):
            await manager.run("refund:1", work)

    assert await charged(engine) == ["changed"]


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
async def test_a_concurrent_duplicate_waits_for_the_transaction_and_gets_its_result(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    engine = sql_engine(url_of(kind, request, tmp_path), lock_timeout_seconds=20)
    manager = IdempotencyManager(repository=SqlIdempotencyRepository(engine), scope="refunds")
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
        await connection.run_sync(tables.drop_all)
        await connection.run_sync(tables.create_all)
    await migrate(engine)

    async def duplicate() -> str:
        async with session_of(engine) as session, manager.in_transaction(session):
            return await manager.run("refund:1", Refund(session))

    async with session_of(engine) as session, manager.in_transaction(session):
        await manager.run("refund:1", Refund(session))
        waiting = asyncio.create_task(duplicate())
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done

    assert await waiting == "receipt"
    assert await charged(engine) == ["run 1"]
    await engine.dispose()


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
async def test_a_concurrent_duplicate_is_in_progress_after_the_lock_timeout(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    engine = sql_engine(url_of(kind, request, tmp_path), lock_timeout_seconds=0.1)
    manager = IdempotencyManager(repository=SqlIdempotencyRepository(engine), scope="refunds")
    await migrate(engine)
    async with session_of(engine) as session, manager.in_transaction(session):
        await manager.run("refund:2", Refund(session))

        async with session_of(engine) as other, manager.in_transaction(other):
            with pytest.raises(InProgressError):
                await manager.run("refund:2", Refund(other), on_in_progress=OnInProgress.RAISE)
            # Its own transaction continues.
            assert await manager.run("refund:3", Refund(other)) == "receipt"

    assert await manager.get("refund:3") is not None
    await engine.dispose()


@pytest.mark.parametrize("engine", ["postgresql", "mysql"], indirect=True)
async def test_a_concurrent_duplicate_retries_after_each_lock_timeout_and_gets_the_result(
    engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    async def duplicate() -> str:
        async with session_of(engine) as session, manager.in_transaction(session):
            return await manager.run("refund:1", Refund(session))

    async with session_of(engine) as session, manager.in_transaction(session):
        await manager.run("refund:1", Refund(session))
        waiting = asyncio.create_task(duplicate())
        done, _ = await asyncio.wait({waiting}, timeout=1.5)  # the lock timeout is 0.3 s here, 1 s in MySQL
        assert not done

    assert await waiting == "receipt"
    assert await charged(engine) == ["run 1"]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
async def test_a_concurrent_duplicate_at_a_strict_isolation_level_is_aborted(
    isolation: str, engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    strict = engine.execution_options(isolation_level=isolation)

    async def duplicate() -> str:
        async with session_of(strict) as session, manager.in_transaction(session):
            return await manager.run("refund:1", Refund(session))

    async with session_of(engine) as session, manager.in_transaction(session):
        await manager.run("refund:1", Refund(session))
        waiting = asyncio.create_task(duplicate())
        await asyncio.wait({waiting}, timeout=0.2)

    with pytest.raises(TransactionAbortedError):
        await waiting
    assert await duplicate() == "receipt"
    assert await charged(engine) == ["run 1"]


async def test_work_outside_the_block_has_its_own_transaction(engine: AsyncEngine, manager: IdempotencyManager) -> None:
    async with engine.connect() as connection, manager.in_transaction(connection):
        await manager.run("refund:1", Refund(connection))
        await connection.rollback()

    async def plain() -> str:
        return "alone"

    assert await manager.run("refund:1", plain) == "alone"


async def test_a_store_without_sql_cannot_join() -> None:
    manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="refunds")

    with pytest.raises(ApplicationError, match="use a SQL store"):
        async with manager.in_transaction(object()):
            pass


@pytest.mark.parametrize("ignores_the_error", [False, True])
@pytest.mark.parametrize("held", ["session", "connection"])
async def test_a_commit_in_the_work_is_refused_and_rolled_back(
    held: str, ignores_the_error: bool, engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    async with AsyncSession(engine) if held == "session" else engine.connect() as joined:

        async def committing() -> None:
            await Refund(joined)()
            with suppress(*([ApplicationError] if ignores_the_error else [])):
                await joined.commit()

        async with manager.in_transaction(joined):
            with pytest.raises(ApplicationError, match="before its outcome was written"):
                await manager.run("refund:1", committing)

    assert await charged(engine) == []
    assert await manager.get("refund:1") is None


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
async def test_a_commit_is_refused_on_each_engine_that_shares_the_connections(
    engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    strict = engine.execution_options(isolation_level="REPEATABLE READ")
    for one in (strict, engine, strict):
        async with AsyncSession(one) as session, manager.in_transaction(session):
            await session.execute(select(charges))
            with pytest.raises(ApplicationError, match="before its outcome was written"):
                await manager.run("refund:1", session.commit)

    assert await manager.get("refund:1") is None


async def test_the_same_session_can_run_the_work_after_a_refused_commit(
    engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    async with AsyncSession(engine) as session:
        with pytest.raises(ApplicationError):
            async with session.begin(), manager.in_transaction(session):
                await manager.run("refund:1", session.commit)

        async with session.begin(), manager.in_transaction(session):
            await manager.run("refund:1", Refund(session))

    assert await charged(engine) == ["run 1"]
    assert await manager.get("refund:1") is not None


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
@pytest.mark.parametrize("held", ["nonsense", None, Session()], ids=["text", "nothing", "a session without asyncio"])
async def test_unsupported_objects_are_refused_immediately(
    held: object, engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    with pytest.raises(ApplicationError, match=f"AsyncSession or AsyncConnection, not {type(held).__name__}"):
        async with manager.in_transaction(held):
            pass


async def test_a_connection_that_is_not_open_is_refused_immediately(
    engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    closed = await engine.connect()
    await closed.close()

    for held in (closed, engine.connect()):
        with pytest.raises(ApplicationError, match="is not open"):
            async with manager.in_transaction(held):
                pass


async def test_a_connection_closed_in_the_block_is_an_error(engine: AsyncEngine, manager: IdempotencyManager) -> None:
    connection = await engine.connect()
    refund = Refund(connection)

    async with manager.in_transaction(connection):
        await connection.close()
        with pytest.raises(ApplicationError, match="is not open"):
            await manager.run("refund:1", refund)

    assert refund.runs == 0


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
async def test_a_scoped_session_is_accepted(engine: AsyncEngine, manager: IdempotencyManager) -> None:
    sessions = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)

    async with manager.in_transaction(sessions):
        await manager.run("refund:1", Refund(sessions()))
    await sessions.commit()
    await sessions.remove()

    assert await charged(engine) == ["run 1"]


@pytest.mark.parametrize("engine", ["postgresql", "mysql"], indirect=True)
@pytest.mark.parametrize("kind", ["sqlite", "sqlite without tables"])
async def test_a_session_of_another_kind_of_database_is_a_configuration_error(
    kind: str, engine: AsyncEngine, manager: IdempotencyManager, tmp_path: Path
) -> None:
    other_engine = sql_engine(f"sqlite+aiosqlite:///{tmp_path / 'other.db'}")
    if kind == "sqlite":
        await migrate(other_engine)

    async with session_of(other_engine) as session, manager.in_transaction(session):
        with pytest.raises(StoreConfigurationError, match="in another database than the store"):
            await manager.run("refund:1", Refund(session))

    await other_engine.dispose()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
async def test_a_session_of_a_database_without_the_tables_is_a_configuration_error(
    engine: AsyncEngine, manager: IdempotencyManager, tmp_path: Path
) -> None:
    other_engine = sql_engine(f"sqlite+aiosqlite:///{tmp_path / 'other.db'}")

    async with session_of(other_engine) as session, manager.in_transaction(session):
        with pytest.raises(StoreConfigurationError, match="in another database than the store"):
            await manager.run("refund:1", Refund(session))

    await other_engine.dispose()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
async def test_a_session_accepted_by_one_store_is_refused_by_another(
    engine: AsyncEngine, manager: IdempotencyManager, tmp_path: Path
) -> None:
    other_engine = sql_engine(f"sqlite+aiosqlite:///{tmp_path / 'other.db'}")
    await migrate(other_engine)
    other = IdempotencyManager(repository=SqlIdempotencyRepository(other_engine), scope="refunds")
    same_file = sql_engine(f"sqlite+aiosqlite:///{tmp_path}/./shop.db")
    async with session_of(same_file) as session, manager.in_transaction(session):
        await manager.run("refund:1", Refund(session))

    async with session_of(same_file) as session, other.in_transaction(session):
        with pytest.raises(StoreConfigurationError, match="in another database than the store"):
            await other.run("refund:2", Refund(session))

    await same_file.dispose()
    await other_engine.dispose()
