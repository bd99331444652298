"""`WorkerHarness` with events that plain code and handlers write with an `Outbox`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal

import pytest
from dishka import FromDishka, Provider, Scope, provide
from dishka.provider import BaseProvider
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from integr8s_idem import BaseEvent, EventRouter, Platform, Service, Settings
from integr8s_idem.config import SqliteStoreSettings
from integr8s_idem.integrations.dishka import (
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    OutboxProvider,
)
from integr8s_idem.integrations.sqlalchemy import Outbox
from integr8s_idem.runtime import relay_outbox
from integr8s_idem.stores.sql import sql_engine
from integr8s_idem.testing import WorkerHarness

pytestmark = pytest.mark.slow


class Ordered(BaseEvent):
    event_type: Literal["outbox_ordered"] = "outbox_ordered"
    order: str


class Shipped(BaseEvent):
    event_type: Literal["outbox_shipped"] = "outbox_shipped"
    order: str


orders, shipments = EventRouter(), EventRouter()
shipped: list[str] = []


@orders.on(Ordered)
async def order(event: Ordered, session: FromDishka[AsyncSession], outbox: FromDishka[Outbox]) -> None:
    async with outbox(session) as out:
        out.publish(Shipped(order=event.order))


@shipments.on(Shipped)
async def ship(event: Shipped) -> None:
    shipped.append(event.order)


class Database(Provider):
    @provide(scope=Scope.APP)
    async def engine(self, settings: Settings) -> AsyncGenerator[AsyncEngine, None]:
        assert isinstance(settings.store, SqliteStoreSettings)
        engine = sql_engine(f"sqlite+aiosqlite:///{settings.store.path}")
        yield engine
        await engine.dispose()

    @provide(scope=Scope.REQUEST)
    async def session(self, engine: AsyncEngine) -> AsyncGenerator[AsyncSession, BaseException | None]:
        async with AsyncSession(engine) as session:
            error = yield session
            if error is None:
                await session.commit()


def order_providers(settings: Settings) -> Sequence[BaseProvider]:
    transactional = IdempotentDispatcherProvider(orders, transaction=AsyncSession)
    return [IdempotencyProvider(), KafkaProvider(), OutboxProvider(), transactional, Database()]


def shipment_providers(settings: Settings) -> Sequence[BaseProvider]:
    return [IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(shipments)]


ordering = Service("orders", providers=order_providers)
shipping = Service("shipments", providers=shipment_providers)
relaying = Service("shipments", providers=shipment_providers, background=[relay_outbox])


@pytest.fixture(autouse=True)
def _nothing_shipped() -> None:
    shipped.clear()


async def write(file: Path, *events: BaseEvent) -> None:
    """Write events as plain code does."""
    engine = sql_engine(f"sqlite+aiosqlite:///{file}")
    async with AsyncSession(engine) as session, session.begin(), Outbox(Settings(), service="shop")(session) as out:
        for event in events:
            out.publish(event)
    await engine.dispose()


async def test_the_events_of_a_transactional_handlers_outbox_are_published_and_handled(tmp_path: Path) -> None:
    platform = Platform(ordering, shipping)
    async with WorkerHarness(platform, settings=Settings(), sqlite_file=tmp_path / "shop.db") as harness:
        await harness.publish(Ordered(order="1"))

        assert shipped == ["1"]
        [event] = harness.published
        assert isinstance(event, Shipped)
        assert event.order == "1"


async def test_the_event_of_a_handler_that_crashed_before_its_commit_is_published_once(tmp_path: Path) -> None:
    platform = Platform(ordering, shipping)
    async with WorkerHarness(platform, settings=Settings(), sqlite_file=tmp_path / "shop.db") as harness:
        harness.crash_at("after_publish")
        await harness.publish(Ordered(order="1"))

        assert shipped == ["1"]
        assert [type(event) for event in harness.published] == [Shipped]


async def test_the_rows_of_plain_code_are_relayed_by_a_background_task_before_all_is_settled(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    async with WorkerHarness(relaying, settings=Settings(), sqlite_file=file) as harness:
        await write(file, Shipped(order="1"), Shipped(order="2"))
        await harness.settled()

        assert sorted(shipped) == ["1", "2"]
        assert [event.event_type for event in harness.published] == ["outbox_shipped"] * 2


async def test_settled_waits_for_the_rows_that_are_written_after_it_has_returned(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    async with WorkerHarness(relaying, settings=Settings(), sqlite_file=file) as harness:
        for number in range(3):
            await write(file, Shipped(order=str(number)))
            await harness.settled()
            assert shipped == [str(each) for each in range(number + 1)]


async def test_a_row_whose_event_has_no_class_is_only_in_the_messages(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    async with WorkerHarness(relaying, settings=Settings(), sqlite_file=file) as harness:
        await write(file, Shipped(order="1"))
        engine = sql_engine(f"sqlite+aiosqlite:///{file}")
        async with engine.begin() as connection:
            await connection.execute(text("UPDATE idempotency_outbox SET event_type = 'of_another_program'"))
        await engine.dispose()
        await harness.settled()

        assert harness.published == []
        assert len(harness.messages()) == 1


@pytest.mark.parametrize("is_relayed", [True, False])
async def test_settled_does_not_wait_for_rows_that_nobody_relays(tmp_path: Path, is_relayed: bool) -> None:
    file = tmp_path / "shop.db"
    async with WorkerHarness(relaying if is_relayed else shipping, settings=Settings(), sqlite_file=file) as harness:
        await write(file, Shipped(order="1"))
        await harness.settled()

        assert shipped == (["1"] if is_relayed else [])
