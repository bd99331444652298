"""`FromDishka[Outbox]` in an endpoint of FastAPI, in handlers, and in services that publish the outbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
from dishka import Provider, Scope, make_async_container, provide
from dishka.integrations.fastapi import DishkaRoute
from dishka.integrations.fastapi import setup_dishka as setup_fastapi
from fastapi import APIRouter, FastAPI, HTTPException
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from integr8s_idem import BaseEvent, EventDispatcher, EventPublisher, EventRouter, Outgoing, Settings
from integr8s_idem.config import MemoryStoreSettings, SqliteStoreSettings
from integr8s_idem.engine.work import Executed, HandlerFailed
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.dishka import (
    FromDishka,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    OutboxProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.integrations.sqlalchemy import Outbox
from integr8s_idem.runtime import Service, make_container, relay_outbox
from integr8s_idem.stores.sql import migrate, sql_engine
from integr8s_idem.stores.sql.schema import outbox as outbox_table
from tests.support.conditions import eventually
from tests.support.http_server import client_of
from tests.support.outboxes import Broker


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"


class OrderPaid(BaseEvent):
    event_type: Literal["order_paid"] = "order_paid"


class DatabaseProvider(Provider):
    """Provides a session for each request; endpoints and handlers commit themselves."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__()
        self._engine = engine

    @provide(scope=Scope.REQUEST)
    async def session(self) -> AsyncGenerator[AsyncSession, None]:
        async with AsyncSession(self._engine) as session:
            yield session


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    engine = sql_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
    await migrate(engine)
    yield engine
    await engine.dispose()


async def waiting(engine: AsyncEngine) -> list[str]:
    """Return the types of the events in the outbox."""
    async with engine.connect() as connection:
        return list(await connection.scalars(select(outbox_table.c.event_type).order_by(outbox_table.c.id)))


async def waiting_ids(engine: AsyncEngine) -> list[str]:
    async with engine.connect() as connection:
        return list(await connection.scalars(select(outbox_table.c.event_id).order_by(outbox_table.c.id)))


async def test_an_endpoint_publishes_in_the_transaction_of_its_request(engine: AsyncEngine) -> None:
    router = APIRouter(route_class=DishkaRoute)

    @router.post("/orders/{order_id}")
    async def place(order_id: str, session: FromDishka[AsyncSession], outbox: FromDishka[Outbox]) -> None:
        async with session.begin():
            async with outbox(session) as out:
                out.publish(OrderPlaced(order_id=order_id))
            if order_id == "broken":
                raise HTTPException(409)

    app = FastAPI()
    app.include_router(router)
    context = {Settings: Settings(), ServiceName: ServiceName("shop")}
    container = make_async_container(TelemetryProvider(), OutboxProvider(), DatabaseProvider(engine), context=context)
    setup_fastapi(container, app)

    async with client_of(app) as client:
        answers = [(await client.post(f"/orders/{order_id}")).status_code for order_id in ("1", "broken", "2")]
    await container.close()

    assert answers == [200, 409, 200]
    assert await waiting(engine) == ["order_placed", "order_placed"]


def service_of(router: EventRouter, engine: AsyncEngine, **options: object) -> Service:
    providers = [
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(router),
        OutboxProvider(),
        DatabaseProvider(engine),
    ]
    return Service("shop", providers=providers, **options)  # type: ignore[arg-type]


def settings_of(engine: AsyncEngine) -> Settings:
    return Settings(store=SqliteStoreSettings(kind="sqlite", path=str(engine.url.database)))


async def test_a_handler_with_its_own_transaction_publishes_the_same_ids_in_each_run(engine: AsyncEngine) -> None:
    router, attempts = EventRouter(), []

    @router.on(OrderPlaced)
    async def pay(
        event: OrderPlaced,
        session: FromDishka[AsyncSession],
        outbox: FromDishka[Outbox],
        outgoing: FromDishka[Outgoing],
    ) -> None:
        async with outbox(session) as out:
            attempts.append(out.publish(OrderPaid()))
        await session.commit()
        if len(attempts) == 1:
            raise OSError("after the commit")

    container = make_container(service_of(router, engine), settings_of(engine))
    dispatcher, event = await container.get(EventDispatcher), OrderPlaced()
    [first] = await dispatcher.dispatch(event)
    [second] = await dispatcher.dispatch(event)
    await container.close()

    assert isinstance(first, HandlerFailed)
    assert isinstance(second, Executed)
    assert attempts[0] == attempts[1]
    assert await waiting_ids(engine) == attempts


async def test_ids_differ_from_those_of_the_handlers_outgoing_events(engine: AsyncEngine) -> None:
    router, broker = EventRouter(), Broker()

    @router.on(OrderPlaced)
    async def pay(
        event: OrderPlaced,
        session: FromDishka[AsyncSession],
        outbox: FromDishka[Outbox],
        outgoing: FromDishka[Outgoing],
    ) -> None:
        outgoing.publish(OrderPaid())
        async with outbox(session) as out:
            out.publish(OrderPaid())
        await session.commit()

    service = service_of(router, engine).with_providers(publishing_to(broker))
    container = make_container(service, settings_of(engine))
    await (await container.get(EventDispatcher)).dispatch(OrderPlaced())
    await container.close()

    assert len({*broker.ids(), *await waiting_ids(engine)}) == 2


def publishing_to(broker: Broker) -> Provider:
    provider = Provider(scope=Scope.APP)
    provider.provide(lambda: broker, provides=EventPublisher)
    return provider


async def test_a_service_publishes_the_outbox_in_the_background(engine: AsyncEngine) -> None:
    broker = Broker()
    service = service_of(EventRouter(), engine, background=[relay_outbox]).with_providers(publishing_to(broker))
    container = make_container(service, settings_of(engine))
    relaying = asyncio.create_task(relay_outbox(container))
    async with AsyncSession(engine) as session, session.begin(), (await container.get(Outbox))(session) as out:
        event_id = out.publish(OrderPaid())

    await eventually(lambda: broker.ids() == [event_id])

    relaying.cancel()
    await asyncio.wait({relaying})
    await container.close()


async def test_a_service_without_a_sql_store_cannot_publish_an_outbox(engine: AsyncEngine) -> None:
    service = service_of(EventRouter(), engine).with_providers(publishing_to(Broker()))
    container = make_container(service, Settings(store=MemoryStoreSettings(kind="memory")))

    with pytest.raises(ApplicationError, match="an outbox is in a SQL database, not in MemoryIdempotencyRepository"):
        await relay_outbox(container)
    await container.close()
