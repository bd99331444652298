"""Connections whose BEGIN has failed: their next statement begins a transaction."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from integr8s_idem import BaseEvent, Settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.sqlalchemy import Outbox
from integr8s_idem.stores.sql import sql_engine
from integr8s_idem.stores.sql.engine import autocommit
from tests.support.databases import url_of
from tests.support.outboxes import database_with_orders

ORDER = text("INSERT INTO orders VALUES (1)")


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"


outbox = Outbox(Settings(), service="shop")

Held = AsyncConnection | AsyncSession
Failure = Callable[[AsyncEngine, Held], Awaitable[None]]


@pytest.fixture
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    url = url_of(getattr(request, "param", "sqlite"), request, tmp_path)
    async with database_with_orders(url, lock_timeout_seconds=0.2) as engine:
        yield engine


async def committed(engine: AsyncEngine) -> tuple[int, int]:
    """Return how many orders and how many events are committed."""
    async with engine.connect() as connection:
        orders = await connection.scalar(text("SELECT count(*) FROM orders"))
        events = await connection.scalar(text("SELECT count(*) FROM idempotency_outbox"))
    return int(orders or 0), int(events or 0)


async def by_a_lock_of_another_process(engine: AsyncEngine, held: Held) -> None:
    with closing(sqlite3.connect(str(engine.url.database), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OperationalError, match="database is locked"):
            await held.execute(ORDER)


async def by_the_queue_of_the_process(engine: AsyncEngine, held: Held) -> None:
    async with engine.begin():
        with pytest.raises(OperationalError, match="another transaction of this process"):
            await asyncio.create_task(_execute(held))


async def by_a_cancellation(engine: AsyncEngine, held: Held) -> None:
    async with engine.begin():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.create_task(_execute(held)), 0.05)


async def by_a_transaction_of_the_same_code(engine: AsyncEngine, held: Held) -> None:
    async with engine.begin():
        with pytest.raises(ApplicationError, match="already is in a transaction"):
            await held.execute(ORDER)


async def _execute(held: Held) -> None:
    await held.execute(ORDER)


FAILURES = [
    by_a_lock_of_another_process,
    by_the_queue_of_the_process,
    by_a_cancellation,
    by_a_transaction_of_the_same_code,
]


@pytest.mark.parametrize("rolls_back_first", [False, True])
@pytest.mark.parametrize("held_type", [AsyncEngine.connect, AsyncSession])
@pytest.mark.parametrize("fail", FAILURES)
async def test_statements_after_a_failed_begin_are_rolled_back_and_committed_with_their_events(
    engine: AsyncEngine, fail: Failure, held_type: Callable[[AsyncEngine], Any], rolls_back_first: bool
) -> None:
    """Otherwise, each would commit on its own, and a rollback would keep it without its event."""
    async with held_type(engine) as held:
        for ending, expected in ((held.rollback, (0, 0)), (held.commit, (1, 1))):
            await fail(engine, held)
            if rolls_back_first:
                await held.rollback()
            await held.execute(ORDER)
            async with outbox(held) as out:
                out.publish(OrderPlaced())
            await ending()

            assert await committed(engine) == expected


@pytest.mark.parametrize("engine", ["mysql"], indirect=True)
async def test_a_connection_to_mysql_begins_a_transaction_after_the_server_closed_it(engine: AsyncEngine) -> None:
    """Otherwise, a commit would do nothing."""
    own = sql_engine(engine.url, pool_size=1)
    async with autocommit(own) as connection:
        await connection.execute(text("SELECT 1"))

    async with own.connect() as connection:
        driver: Any = (await connection.get_raw_connection()).driver_connection
        async with engine.connect() as other:
            await other.execute(text(f"KILL {driver.thread_id()}"))
        with pytest.raises(OperationalError):
            await connection.execute(ORDER)
        await connection.execute(ORDER)
        await connection.commit()
    await own.dispose()

    assert await committed(engine) == (1, 0)


@pytest.mark.parametrize("engine", ["mysql"], indirect=True)
async def test_a_connection_to_mysql_does_not_commit_each_statement_after_a_failed_begin(engine: AsyncEngine) -> None:
    """The store has left the pooled connection in autocommit mode."""
    own = sql_engine(engine.url, pool_size=1)
    async with autocommit(own) as connection:
        await connection.execute(text("SELECT 1"))

    def fail_once(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("SET autocommit"):
            event.remove(own.sync_engine, "before_cursor_execute", fail_once)
            raise OSError("interrupted")

    event.listen(own.sync_engine, "before_cursor_execute", fail_once)
    async with own.connect() as connection:
        with pytest.raises(OSError, match="interrupted"):
            await connection.execute(ORDER)
        await connection.execute(ORDER)
        await connection.rollback()
    await own.dispose()

    assert await committed(engine) == (0, 0)
