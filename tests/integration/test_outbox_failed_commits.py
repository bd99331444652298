"""Commits and rollbacks within a block of the outbox that fail, and code that continues after them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import Connection, event, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from integr8s_idem import BaseEvent, Settings
from integr8s_idem.errors import ApplicationError, StoreConfigurationError
from integr8s_idem.integrations.sqlalchemy import Outbox
from integr8s_idem.stores.sql.schema import outbox as outbox_table
from tests.support.databases import KINDS, url_of
from tests.support.outboxes import database_with_orders

ORDER = text("INSERT INTO orders VALUES (1)")
LATER_ORDER = text("INSERT INTO orders VALUES (2)")

Held = AsyncSession | AsyncConnection
both_kinds_of_held = pytest.mark.parametrize("held_type", [AsyncSession, AsyncEngine.connect])


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"


outbox = Outbox(Settings(), service="shop")


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    # One connection, so that the next user of the pool gets it.
    async with database_with_orders(url_of(request.param, request, tmp_path), pool_size=1) as engine:
        yield engine


async def orders(engine: AsyncEngine) -> list[int]:
    async with engine.connect() as connection:
        return list(await connection.scalars(text("SELECT number FROM orders ORDER BY number")))


async def waiting(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        return len((await connection.scalars(select(outbox_table.c.event_id))).all())


async def drop_the_outbox(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(outbox_table.drop)


async def order_and_commit(held: Held) -> None:
    async with outbox(held) as out:
        await held.execute(ORDER)
        out.publish(OrderPlaced())
        await held.commit()


@both_kinds_of_held
async def test_a_commit_that_cannot_write_events_leaves_nothing_for_later_transactions(
    engine: AsyncEngine, held_type: Callable[[AsyncEngine], Any]
) -> None:
    await drop_the_outbox(engine)

    async with held_type(engine) as held:
        with pytest.raises(StoreConfigurationError, match="store migrate"):
            await order_and_commit(held)
        await held.rollback()
        await held.execute(LATER_ORDER)
        await held.commit()

    assert await orders(engine) == [2]


@both_kinds_of_held
async def test_a_commit_that_is_refused_leaves_nothing_for_the_next_user_of_the_pool(
    engine: AsyncEngine, held_type: Callable[[AsyncEngine], Any]
) -> None:
    """The database has not seen an error, so it would commit what it has."""

    async def commit_after_a_rollback(held: Held) -> None:
        async with outbox(held) as out:
            out.publish(OrderPlaced())
            await held.execute(LATER_ORDER)
            await held.rollback()
            await held.execute(ORDER)
            await held.commit()

    with pytest.raises(ApplicationError, match="was rolled back within the block"):
        async with held_type(engine) as held:
            await commit_after_a_rollback(held)
    async with engine.begin() as connection:
        await connection.execute(LATER_ORDER)

    assert await orders(engine) == [2]


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
async def test_a_connection_whose_rollback_fails_is_closed(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise OSError("no rollback")

    await drop_the_outbox(engine)
    async with engine.connect() as connection:
        monkeypatch.setattr(engine.dialect, "do_rollback", refuse)
        with pytest.raises(StoreConfigurationError, match="store migrate") as caught:
            await order_and_commit(connection)
        monkeypatch.undo()
    async with engine.begin() as connection:
        await connection.execute(LATER_ORDER)

    assert caught.value.__notes__ == ["The connection was closed, because the rollback failed: OSError: no rollback"]
    assert await orders(engine) == [2]


@both_kinds_of_held
async def test_a_savepoint_that_cannot_write_events_is_rolled_back(
    engine: AsyncEngine, held_type: Callable[[AsyncEngine], Any]
) -> None:
    async def order_in_a_savepoint(held: Held) -> None:
        async with held.begin_nested() as savepoint, outbox(held) as out:
            await held.execute(ORDER)
            out.publish(OrderPlaced())
            await savepoint.commit()

    await drop_the_outbox(engine)
    async with held_type(engine) as held:
        await held.execute(LATER_ORDER)
        with pytest.raises(StoreConfigurationError, match="store migrate"):
            await order_in_a_savepoint(held)
        await held.commit()

    assert await orders(engine) == [2]


@contextmanager
def one_refused_commit(engine: AsyncEngine) -> Iterator[None]:
    refusals = [OSError("the commit was refused")]

    def refuse(connection: Connection) -> None:
        if refusals:
            connection.connection.rollback()
            raise refusals.pop()

    event.listen(engine.sync_engine, "commit", refuse)
    yield
    event.remove(engine.sync_engine, "commit", refuse)


async def by_another_commit(session: AsyncSession) -> None:
    """Repeat the transaction, but not the event."""
    async with outbox(session) as out:
        out.publish(OrderPlaced())
        for _ in range(2):
            with suppress(OSError):
                await session.execute(ORDER)
                await session.commit()
                break
            await session.rollback()


async def by_another_event(session: AsyncSession) -> None:
    async with outbox(session) as out:
        for _ in range(2):
            out.publish(OrderPlaced())
            with suppress(OSError):
                await session.commit()
                break
            await session.rollback()


@pytest.mark.parametrize("way", [by_another_commit, by_another_event])
async def test_a_commit_that_the_database_refuses_is_a_rollback_within_the_block(
    engine: AsyncEngine, way: Callable[[AsyncSession], Awaitable[None]]
) -> None:
    """Without the error, the order of the second attempt would have no event, and nobody would know."""
    async with AsyncSession(engine) as session:
        with one_refused_commit(engine), pytest.raises(ApplicationError, match="was rolled back within the block"):
            await way(session)

    assert await waiting(engine) == 0


@both_kinds_of_held
async def test_events_of_a_released_savepoint_share_the_outcome_of_the_transaction(
    engine: AsyncEngine, held_type: Callable[[AsyncEngine], Any]
) -> None:
    async def release_and_end(held: Held, *ends: Callable[[], Awaitable[None]]) -> None:
        savepoint = await held.begin_nested()
        async with outbox(held) as out:
            out.publish(OrderPlaced())
            await savepoint.commit()
            for end in ends:
                await end()
                await held.execute(ORDER)

    async with held_type(engine) as held:
        with pytest.raises(ApplicationError, match="was rolled back within the block"):
            await release_and_end(held, held.rollback)
        await held.rollback()
        await release_and_end(held, held.commit)
        await held.rollback()
        # What follows the commit is another transaction.
        await release_and_end(held, held.commit, held.rollback)
        await held.rollback()

    assert await waiting(engine) == 2


@both_kinds_of_held
async def test_a_savepoint_around_released_savepoints_takes_their_events_with_it(
    engine: AsyncEngine, held_type: Callable[[AsyncEngine], Any]
) -> None:
    async def roll_back_around(held: Held) -> None:
        around = await held.begin_nested()
        savepoint = await held.begin_nested()
        async with outbox(held) as out:
            out.publish(OrderPlaced())
            await savepoint.commit()
            await around.rollback()

    async def roll_back_another(held: Held) -> None:
        savepoint = await held.begin_nested()
        async with outbox(held) as out:
            out.publish(OrderPlaced())
            await savepoint.commit()
            await (await held.begin_nested()).rollback()
        await held.commit()

    async with held_type(engine) as held:
        with pytest.raises(ApplicationError, match="was rolled back within the block"):
            await roll_back_around(held)
        await held.rollback()
        await roll_back_another(held)

    assert await waiting(engine) == 1
