"""Transactions of MySQL and MariaDB that contain outcomes, on a real MariaDB.

The application's engines have SQLAlchemy's defaults: REPEATABLE READ, whose snapshot applies to plain SELECTs only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from integr8s_idem import Attempt, EventRouter, IdempotencyConfig, IdempotencyManager, Settings
from integr8s_idem.engine.work import Executed, HandlerFailed
from integr8s_idem.errors import ApplicationError, StoreConfigurationError, TransactionAbortedError
from integr8s_idem.integrations.dishka import FromDishka
from integr8s_idem.records import Completed, Completion, InProgress, Reserved
from integr8s_idem.stores.sql import SqlIdempotencyRepository, metadata, migrate, sql_engine
from integr8s_idem.testing.store_under_test import TTL, new_key, wish
from tests.support.ledger_shop import OrderPlaced, charge, open_ledger_shop
from tests.support.mariadb import MariadbServer, missing_programs

pytestmark = pytest.mark.skipif(bool(missing_programs()), reason=missing_programs())


@pytest.fixture
def url(shared_mariadb: MariadbServer) -> str:
    return shared_mariadb.url


@asynccontextmanager
async def engines_on(url: str) -> AsyncIterator[tuple[AsyncEngine, AsyncEngine]]:
    """Open an engine for the store and one for the application."""
    store_engine, app_engine = sql_engine(url, lock_timeout_seconds=1), create_async_engine(url)
    try:
        await migrate(store_engine)
        async with store_engine.begin() as connection:
            await connection.execute(text("CREATE TABLE IF NOT EXISTS balance (id int PRIMARY KEY, amount int)"))
            await connection.execute(text("REPLACE INTO balance VALUES (1, 0), (2, 0)"))
        yield store_engine, app_engine
    finally:
        await store_engine.dispose()
        await app_engine.dispose()


@pytest.fixture
async def engines(url: str) -> AsyncIterator[tuple[AsyncEngine, AsyncEngine]]:
    async with engines_on(url) as both:
        yield both


async def amounts(engine: AsyncEngine) -> list[int]:
    async with engine.connect() as connection:
        return list(await connection.scalars(text("SELECT amount FROM balance ORDER BY id")))


async def test_a_reservation_sees_records_written_after_the_snapshot(
    engines: tuple[AsyncEngine, AsyncEngine],
) -> None:
    store, key = SqlIdempotencyRepository(engines[0]), new_key()
    async with AsyncSession(engines[1]) as session, session.begin():
        await session.execute(text("SELECT * FROM idempotency_records"))  # takes the snapshot
        (reserved,) = await store.reserve([wish(key)])
        assert isinstance(reserved, Reserved)
        (early,) = await store.joined(session).reserve([wish(key)])
        assert await store.joined(session).get([key]) == [None]

    async with AsyncSession(engines[1]) as session, session.begin():
        await session.execute(text("SELECT * FROM idempotency_records"))
        assert await store.complete([Completion(reservation=reserved, ttl=TTL)]) == [True]
        (late,) = await store.joined(session).reserve([wish(key)])

    assert isinstance(early, InProgress)
    assert isinstance(late, Completed)


async def test_ownership_is_checked_against_records_written_after_the_snapshot(
    engines: tuple[AsyncEngine, AsyncEngine],
) -> None:
    store, keys = SqlIdempotencyRepository(engines[0]), [new_key(), new_key()]
    async with AsyncSession(engines[1]) as session, session.begin():
        await session.execute(text("SELECT * FROM idempotency_records"))
        completed, released = await store.reserve([wish(key) for key in keys])
        assert isinstance(completed, Reserved)
        assert isinstance(released, Reserved)
        completion = Completion(reservation=completed, ttl=TTL)
        assert await store.complete([completion]) == await store.release([released]) == [True]
        joined = store.joined(session)

        assert await joined.release([completed, released]) == [False, True]
        assert await joined.renew([completed, released], timedelta(minutes=1)) == [False, False]
        assert await joined.complete([completion]) == [True]


async def cause_deadlock(session: AsyncSession, other_engine: AsyncEngine) -> None:
    """Write two rows in the opposite order of another transaction, so that the database aborts `session`."""
    # The database aborts the transaction with fewer writes.
    more = ", ".join(f"({number}, 0)" for number in range(100, 200))
    async with other_engine.begin() as other:
        await session.execute(text("UPDATE balance SET amount = amount + 10 WHERE id = 1"))
        await other.execute(text(f"REPLACE INTO balance VALUES {more}"))
        await other.execute(text("UPDATE balance SET amount = amount + 1 WHERE id = 2"))
        waiting = asyncio.create_task(other.execute(text("UPDATE balance SET amount = amount + 1 WHERE id = 1")))
        try:
            await session.execute(text("UPDATE balance SET amount = amount + 10 WHERE id = 2"))
        finally:
            await waiting
            await other.execute(text("DELETE FROM balance WHERE id >= 100"))


async def test_a_deadlock_is_not_a_failure_of_the_handler(url: str, engines: tuple[AsyncEngine, AsyncEngine]) -> None:
    router, (_, app_engine) = EventRouter(), engines

    @router.on(OrderPlaced)
    async def bill(event: OrderPlaced, session: FromDishka[AsyncSession], attempt: FromDishka[Attempt]) -> int:
        await charge(session, event)
        if attempt.number == 1:
            await cause_deadlock(session, app_engine)
        return attempt.number

    settings = Settings(idempotency=IdempotencyConfig(max_attempts=1))
    async with open_ledger_shop(url, router, settings=settings) as shop:
        event = OrderPlaced()
        outcome, second = await shop.attempt(event), await shop.attempt(event)

        assert isinstance(outcome, HandlerFailed)
        assert isinstance(outcome.error, TransactionAbortedError)
        assert not outcome.given_up
        assert second == Executed(2, 2)
        assert await shop.charged() == ["1"]
    assert await amounts(app_engine) == [0, 0]


async def test_a_deadlock_after_a_savepoint_of_the_handler_aborts_its_transaction(
    url: str, engines: tuple[AsyncEngine, AsyncEngine]
) -> None:
    router, (_, app_engine) = EventRouter(), engines

    @router.on(OrderPlaced)
    async def bill(event: OrderPlaced, session: FromDishka[AsyncSession]) -> None:
        await charge(session, event)
        async with session.begin_nested():
            await cause_deadlock(session, app_engine)

    async with open_ledger_shop(url, router) as shop:
        outcome = await shop.attempt(OrderPlaced())

        assert isinstance(outcome, HandlerFailed)
        assert isinstance(outcome.error, TransactionAbortedError)
        assert await shop.charged() == []


async def test_a_handler_that_continues_after_a_deadlock_gets_no_outcome(
    url: str, engines: tuple[AsyncEngine, AsyncEngine]
) -> None:
    """The database has rolled back its earlier writes, but accepts later ones."""
    router, (_, app_engine) = EventRouter(), engines

    @router.on(OrderPlaced)
    async def bill(event: OrderPlaced, session: FromDishka[AsyncSession]) -> None:
        await charge(session, event)
        with pytest.raises(DBAPIError, match="Deadlock"):
            await cause_deadlock(session, app_engine)
        await session.execute(text("UPDATE balance SET amount = amount + 100 WHERE id = 2"))

    async with open_ledger_shop(url, router) as shop:
        event = OrderPlaced()
        outcome = await shop.attempt(event)

        assert isinstance(outcome, HandlerFailed)
        assert isinstance(outcome.error, ApplicationError)
        assert "ended before its outcome was written" in str(outcome.error)
        assert await shop.statuses() == {event.event_id: "processing"}
    assert await amounts(app_engine) == [0, 0]


async def test_a_handler_that_creates_a_table_gets_no_outcome(url: str) -> None:
    """CREATE TABLE commits implicitly."""
    router = EventRouter()

    @router.on(OrderPlaced)
    async def bill(event: OrderPlaced, session: FromDishka[AsyncSession]) -> None:
        await session.execute(text("CREATE OR REPLACE TABLE created_by_a_handler (id int)"))
        await charge(session, event)

    async with open_ledger_shop(url, router) as shop:
        outcome = await shop.attempt(OrderPlaced())

        assert isinstance(outcome, HandlerFailed)
        assert isinstance(outcome.error, ApplicationError)
        assert "CREATE TABLE" in str(outcome.error)
        assert await shop.charged() == []


@pytest.fixture
async def manager(engines: tuple[AsyncEngine, AsyncEngine]) -> IdempotencyManager:
    return IdempotencyManager(repository=SqlIdempotencyRepository(engines[0]), scope="refunds")


async def test_work_that_continues_after_a_deadlock_is_not_recorded(
    engines: tuple[AsyncEngine, AsyncEngine], manager: IdempotencyManager
) -> None:
    store_engine, app_engine = engines
    async with AsyncSession(app_engine) as session:

        async def refund() -> None:
            with pytest.raises(DBAPIError, match="Deadlock"):
                await cause_deadlock(session, store_engine)
            await session.execute(text("UPDATE balance SET amount = amount + 100 WHERE id = 2"))

        with pytest.raises(TransactionAbortedError, match="the whole transaction"):
            async with session.begin(), manager.in_transaction(session):
                await manager.run("refund:1", refund)

    assert await manager.get("refund:1") is None
    assert await amounts(store_engine) == [0, 0]


async def test_work_that_creates_a_table_is_not_recorded_as_completed(
    engines: tuple[AsyncEngine, AsyncEngine], manager: IdempotencyManager
) -> None:
    async with AsyncSession(engines[1]) as session, manager.in_transaction(session):

        async def refund() -> None:
            await session.execute(text("CREATE OR REPLACE TABLE created_by_the_work (id int)"))

        with pytest.raises(ApplicationError, match="ended before its outcome was written"):
            await manager.run("refund:5", refund)

    record = await manager.get("refund:5")
    assert record is not None
    assert record.settled_at is None


async def test_a_deadlock_within_the_work_aborts_the_transaction(
    engines: tuple[AsyncEngine, AsyncEngine], manager: IdempotencyManager
) -> None:
    store_engine, app_engine = engines
    async with AsyncSession(app_engine) as session:
        with pytest.raises(TransactionAbortedError, match="deadlock"):
            async with session.begin(), manager.in_transaction(session):
                await manager.run("refund:2", lambda: cause_deadlock(session, store_engine))

    assert await manager.get("refund:2") is None
    assert await amounts(store_engine) == [0, 0]


async def test_a_record_that_has_changed_since_a_strict_snapshot_aborts_the_transaction(
    engines: tuple[AsyncEngine, AsyncEngine], manager: IdempotencyManager
) -> None:
    """This is the default of MariaDB 11.6 and newer."""
    _, app_engine = engines

    async def refund() -> str:
        return "receipt"

    async with AsyncSession(app_engine) as session, session.begin():
        await session.execute(text("SET SESSION innodb_snapshot_isolation = ON"))
        await session.execute(text("SELECT * FROM idempotency_records"))
        await manager.run("refund:3", refund)

        async with manager.in_transaction(session):
            with pytest.raises(TransactionAbortedError, match="changed"):
                await manager.run("refund:3", refund)


async def test_a_session_of_another_database_on_the_same_server_is_refused(
    url: str, engines: tuple[AsyncEngine, AsyncEngine], manager: IdempotencyManager
) -> None:
    async with engines[0].begin() as connection:
        await connection.execute(text("CREATE DATABASE IF NOT EXISTS elsewhere"))
    async with engines_on(url.replace("/test?", "/elsewhere?")) as (other_engine, _):
        async with AsyncSession(other_engine) as session, session.begin(), manager.in_transaction(session):
            with pytest.raises(StoreConfigurationError, match="in another database"):
                await manager.run("refund:4", lambda: asyncio.sleep(0))

        async with other_engine.begin() as connection:
            await connection.run_sync(metadata.drop_all)


async def test_a_lock_timeout_that_rolls_back_the_transaction_aborts_it() -> None:
    with MariadbServer(settings={"innodb-rollback-on-timeout": "ON"}) as server:
        async with engines_on(server.url) as (store_engine, _):
            manager = IdempotencyManager(repository=SqlIdempotencyRepository(store_engine), scope="refunds")
            async with AsyncSession(store_engine) as session, session.begin(), manager.in_transaction(session):
                await manager.run("refund:1", lambda: asyncio.sleep(0))

                async with AsyncSession(store_engine) as other, manager.in_transaction(other):
                    await other.execute(text("UPDATE balance SET amount = amount + 10"))
                    with pytest.raises(TransactionAbortedError, match="longer than the lock timeout"):
                        await manager.run("refund:1", lambda: asyncio.sleep(0))
                    await other.commit()

            assert await amounts(store_engine) == [0, 0]
