"""The application created SQLite engines are refused unless they begin real transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, insert
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine

from integr8s_idem import EventRouter, IdempotencyManager
from integr8s_idem.engine.work import Executed, HandlerFailed
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.dishka import FromDishka
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine
from tests.support.ledger_shop import OrderPlaced, charge, charges, open_ledger_shop, tables

by_session, by_connection = EventRouter(), EventRouter()


@by_session.on(OrderPlaced)
async def bill(event: OrderPlaced, session: FromDishka[AsyncSession]) -> None:
    await charge(session, event)


@by_connection.on(OrderPlaced)
async def bill_by_connection(event: OrderPlaced, connection: FromDishka[AsyncConnection]) -> None:
    await charge(connection, event)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}"


@pytest.fixture
async def ordinary(url: str) -> AsyncIterator[AsyncEngine]:
    """Return an engine with SQLAlchemy's defaults."""
    engine = create_async_engine(url)
    yield engine
    await engine.dispose()


@pytest.fixture
async def manager(url: str) -> AsyncIterator[IdempotencyManager]:
    engine = sql_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(tables.create_all)
    await migrate(engine)
    yield IdempotencyManager(repository=SqlIdempotencyRepository(engine), scope="refunds")
    await engine.dispose()


def begin_explicitly(engine: AsyncEngine) -> None:
    """Begin transactions explicitly, as SQLAlchemy's documentation recommends."""

    @event.listens_for(engine.sync_engine, "connect")
    def _disable_implicit_begin(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")


def charged(tmp_path: Path) -> list[Any]:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as file:
        return file.execute("SELECT order_id FROM charges").fetchall()


@pytest.mark.parametrize("held", ["session", "connection"])
async def test_a_transaction_that_cannot_be_rolled_back_is_refused_before_the_work(
    held: str, ordinary: AsyncEngine, manager: IdempotencyManager, tmp_path: Path
) -> None:
    async with AsyncSession(ordinary) if held == "session" else ordinary.connect() as joined:

        async def refund() -> None:
            await joined.execute(insert(charges).values(order_id="1"))

        async with manager.in_transaction(joined):
            with pytest.raises(ApplicationError, match="sql_engine"):
                await manager.run("refund:1", refund)
        await joined.rollback()

    assert charged(tmp_path) == []
    assert await manager.get("refund:1") is None


@pytest.mark.parametrize("held", ["session", "connection"])
async def test_an_engine_that_emits_begin_is_accepted(
    held: str, ordinary: AsyncEngine, manager: IdempotencyManager, tmp_path: Path
) -> None:
    begin_explicitly(ordinary)
    async with AsyncSession(ordinary) if held == "session" else ordinary.connect() as joined:

        async def refund() -> None:
            await joined.execute(insert(charges).values(order_id="1"))

        async with manager.in_transaction(joined):
            await manager.run("refund:1", refund)
        await joined.rollback()

    assert charged(tmp_path) == []
    assert await manager.get("refund:1") is None


@pytest.mark.parametrize(("held", "handlers"), [(AsyncSession, by_session), (AsyncConnection, by_connection)])
@pytest.mark.parametrize("asks_first", [False, True])
async def test_a_handler_without_a_real_transaction_fails_before_its_first_write(
    asks_first: bool, held: type, handlers: EventRouter, url: str, ordinary: AsyncEngine
) -> None:
    async with open_ledger_shop(url, handlers, held=held) as shop:
        shop.sessions.engine, shop.sessions.asks_first = ordinary, asks_first

        outcome = await shop.attempt(OrderPlaced())

        assert isinstance(outcome, HandlerFailed)
        assert isinstance(outcome.error, ApplicationError)
        assert "sql_engine" in str(outcome.error)
        assert await shop.charged() == []


@pytest.mark.parametrize(("held", "handlers"), [(AsyncSession, by_session), (AsyncConnection, by_connection)])
async def test_a_handler_with_an_engine_that_emits_begin_succeeds(
    held: type, handlers: EventRouter, url: str, ordinary: AsyncEngine
) -> None:
    begin_explicitly(ordinary)
    async with open_ledger_shop(url, handlers, held=held) as shop:
        shop.sessions.engine = ordinary

        assert await shop.attempt(OrderPlaced()) == Executed(None, 1)
        assert await shop.charged() == ["1"]
