"""Savepoints that are rolled back while a block of the outbox is open within them, on real databases."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import Connection, event, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, AsyncTransaction

from integr8s_idem import BaseEvent, Settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.sqlalchemy import Outbox
from integr8s_idem.stores.sql.schema import outbox as outbox_table
from tests.support.databases import KINDS, url_of
from tests.support.outboxes import database_with_orders

# SQLAlchemy warns of a savepoint that ends before the ones within it.
pytestmark = pytest.mark.filterwarnings("ignore:nested transaction already deassociated")


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"


outbox = Outbox(Settings(), service="shop")

KEPT = text("INSERT INTO orders VALUES (1)")
ORDER = text("INSERT INTO orders VALUES (2)")


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    async with database_with_orders(url_of(request.param, request, tmp_path)) as engine:
        yield engine


async def committed(engine: AsyncEngine) -> tuple[list[int], int]:
    """Return the numbers of the orders, and how many events are in the outbox."""
    async with engine.connect() as connection:
        orders = list(await connection.scalars(text("SELECT number FROM orders")))
        return orders, len((await connection.scalars(select(outbox_table.c.event_id))).all())


async def by_the_outer_savepoint(held: Any) -> None:
    outer = await held.begin_nested()
    await held.begin_nested()
    async with outbox(held) as out:
        await held.execute(ORDER)
        out.publish(OrderPlaced())
        await outer.rollback()


async def by_the_own_savepoint(held: Any) -> None:
    async with held.begin_nested() as savepoint, outbox(held) as out:
        await held.execute(ORDER)
        out.publish(OrderPlaced())
        await savepoint.rollback()


@pytest.mark.parametrize("held_type", [AsyncSession, AsyncEngine.connect])
@pytest.mark.parametrize("way", [by_the_outer_savepoint, by_the_own_savepoint])
async def test_a_savepoint_that_is_rolled_back_within_the_block_is_an_error_and_nothing_is_written(
    engine: AsyncEngine, way: Callable[[Any], Awaitable[None]], held_type: Callable[[AsyncEngine], Any]
) -> None:
    async with held_type(engine) as held:
        with pytest.raises(ApplicationError, match="was rolled back within the block"):
            await way(held)
        await held.rollback()

    assert await committed(engine) == ([], 0)


async def by_the_end_of_the_block(connection: AsyncConnection, inner: AsyncTransaction) -> None:
    """Nothing follows the rollback."""


async def by_release(connection: AsyncConnection, inner: AsyncTransaction) -> None:
    with pytest.raises(DBAPIError):
        await inner.commit()


async def by_rollback(connection: AsyncConnection, inner: AsyncTransaction) -> None:
    with pytest.raises(DBAPIError):
        await inner.rollback()


async def by_later_savepoint(connection: AsyncConnection, inner: AsyncTransaction) -> None:
    async with connection.begin_nested():
        await connection.execute(ORDER)


async def publish_and_roll_back(
    connection: AsyncConnection, go_on: Callable[[AsyncConnection, AsyncTransaction], Awaitable[None]]
) -> None:
    outer = await connection.begin_nested()
    inner = await connection.begin_nested()
    async with outbox(connection) as out:
        await connection.execute(ORDER)
        out.publish(OrderPlaced())
        await outer.rollback()
        await go_on(connection, inner)


WAYS = [by_the_end_of_the_block, by_release, by_rollback, by_later_savepoint]


@pytest.mark.parametrize("way", WAYS)
async def test_events_are_not_published_if_an_outer_savepoint_of_a_connection_was_rolled_back(
    engine: AsyncEngine, way: Callable[[AsyncConnection, AsyncTransaction], Awaitable[None]]
) -> None:
    """SQLAlchemy still reports the inner savepoint as the current one."""
    async with engine.connect() as connection:
        await connection.execute(KEPT)
        with pytest.raises(ApplicationError, match="was rolled back within the block"):
            await publish_and_roll_back(connection, way)
        await connection.commit()

    orders, events = await committed(engine)
    is_aborted = engine.dialect.name == "postgresql" and way in (by_release, by_rollback)
    assert events == 0
    assert orders == ([] if is_aborted else [1, 2] if way is by_later_savepoint else [1])


async def test_a_commit_is_refused_after_an_outer_savepoint_was_rolled_back(engine: AsyncEngine) -> None:
    async def commit(connection: AsyncConnection, _: AsyncTransaction) -> None:
        with pytest.raises(ApplicationError, match="was rolled back within the block"):
            await connection.commit()

    async with engine.connect() as connection:
        await connection.execute(KEPT)
        with suppress(ApplicationError):
            await publish_and_roll_back(connection, commit)

    assert await committed(engine) == ([], 0)


async def test_a_savepoint_that_cannot_begin_does_not_hide_the_rollback_of_an_outer_one(engine: AsyncEngine) -> None:
    """In PostgreSQL, none can begin after an error, until a rollback to an earlier one."""

    def refuse(_: Connection, name: str | None) -> None:
        raise OSError("no savepoint")

    async def begin_another_and_roll_back(connection: AsyncConnection, outer: AsyncTransaction) -> None:
        async with outbox(connection) as out:
            await connection.execute(ORDER)
            out.publish(OrderPlaced())
            with pytest.raises(OSError, match="no savepoint"):
                await connection.begin_nested()
            await outer.rollback()

    async with engine.connect() as connection:
        outer = await connection.begin_nested()
        await connection.begin_nested()
        event.listen(connection.sync_connection, "savepoint", refuse)
        with pytest.raises(ApplicationError, match="was rolled back within the block"):
            await begin_another_and_roll_back(connection, outer)
        await connection.commit()

    assert await committed(engine) == ([], 0)


async def test_synchronous_code_cannot_publish_after_a_rollback_of_an_outer_savepoint(engine: AsyncEngine) -> None:
    def roll_back_the_outer_one(connection: Connection) -> None:
        outer = connection.begin_nested()
        connection.begin_nested()
        with outbox(connection) as out:
            connection.execute(ORDER)
            out.publish(OrderPlaced())
            outer.rollback()

    async with engine.connect() as connection:
        with pytest.raises(ApplicationError, match="was rolled back within the block"):
            await connection.run_sync(roll_back_the_outer_one)
        await connection.commit()

    assert await committed(engine) == ([], 0)


@pytest.mark.parametrize("held_type", [AsyncSession, AsyncEngine.connect])
async def test_a_later_savepoint_may_be_rolled_back(
    engine: AsyncEngine, held_type: Callable[[AsyncEngine], Any]
) -> None:
    async with held_type(engine) as held:
        async with held.begin_nested(), held.begin_nested(), outbox(held) as out:
            await held.execute(KEPT)
            out.publish(OrderPlaced())
            later = await held.begin_nested()
            await held.execute(ORDER)
            await later.rollback()
        await held.commit()

    assert await committed(engine) == ([1], 1)
