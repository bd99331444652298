"""Round trips that `in_transaction` adds to a transaction of the application, counted on real PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from integr8s_idem import IdempotencyManager
from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.stores.sql import SqlIdempotencyRepository, metadata, migrate, sql_engine
from tests.support.ledger_shop import charges, tables
from tests.support.postgres import PostgresServer
from tests.support.turns import TurnCounter


@pytest.fixture
async def counter(shared_postgres: PostgresServer) -> AsyncIterator[TurnCounter]:
    async with TurnCounter(shared_postgres.folder / ".s.PGSQL.5432") as counter:
        yield counter


@pytest.fixture
async def engine(shared_postgres: PostgresServer, counter: TurnCounter) -> AsyncIterator[AsyncEngine]:
    """Return an engine with one connection through the counter."""
    engine = sql_engine(f"postgresql://postgres@127.0.0.1:{counter.port}/postgres", pool_size=1)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
        await connection.run_sync(tables.drop_all)
        await connection.run_sync(tables.create_all)
    await migrate(engine)
    yield engine
    await engine.dispose()


@pytest.fixture
async def manager(engine: AsyncEngine) -> IdempotencyManager:
    return IdempotencyManager(repository=SqlIdempotencyRepository(engine), scope="refunds")


async def refund(session: AsyncSession, manager: IdempotencyManager, key: str) -> None:
    async def work() -> str:
        await session.execute(insert(charges).values(order_id=key))
        return "receipt"

    await manager.run(key, work)


async def turns_of(counter: TurnCounter, engine: AsyncEngine, manager: IdempotencyManager, *, late: bool) -> int:
    """Count the round trips of a transaction with one run; `late` adds a statement before the run."""
    before = counter.turns
    async with AsyncSession(engine) as session, session.begin(), manager.in_transaction(session):
        if late:
            await session.execute(select(charges.c.id).limit(1))
        await refund(session, manager, f"refund:{late}:{before}")
    return counter.turns - before


@pytest.mark.parametrize(("late", "turns"), [(False, 5), (True, 8)])
async def test_a_run_adds_two_round_trips_and_two_for_a_savepoint_after_other_statements(
    late: bool, turns: int, counter: TurnCounter, engine: AsyncEngine, manager: IdempotencyManager
) -> None:
    await turns_of(counter, engine, manager, late=late)  # prepares the statements

    # BEGIN, the statement of the work and COMMIT are three of them; the statement before is one more.
    assert await turns_of(counter, engine, manager, late=late) == turns


async def test_at_most_one_call_fails_after_a_change_of_the_tables(engine: AsyncEngine) -> None:
    store = SqlIdempotencyRepository(engine)
    manager = IdempotencyManager(repository=store, scope="refunds")

    async def done() -> str:
        return "receipt"

    await manager.run("refund:1", done)
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE idempotency_records ALTER COLUMN attempt TYPE bigint"))

    failed = 0
    for number in range(2, 5):
        try:
            await manager.run(f"refund:{number}", done)
        except StoreUnavailableError:
            failed += 1

    assert failed <= 1
