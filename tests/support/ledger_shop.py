"""A service whose handlers write to the database of the store.

There is no broker: tests dispatch the events, and look up outgoing events in the outbox.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from dishka import STRICT_VALIDATION, AsyncContainer, Provider, Scope, make_async_container, provide
from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

from integr8s_idem import BaseEvent, EventDispatcher, EventRouter, IdempotentEventDispatcher, Settings
from integr8s_idem.engine.work import Outcome
from integr8s_idem.integrations.dishka import (
    EventContextProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.sql import SqlIdempotencyRepository, metadata, migrate, sql_engine
from integr8s_idem.stores.sql.schema import outbox
from integr8s_idem.telemetry import SILENT, Observer

tables = MetaData()
charges = Table(
    "charges", tables, Column("id", Integer, primary_key=True), Column("order_id", String(100), nullable=False)
)
"""A row for each charge; only the guard prevents a second row."""


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"


class OrderCharged(BaseEvent):
    event_type: Literal["order_charged"] = "order_charged"
    order_id: str = "1"


class SessionProvider(Provider):
    """Provides a session or connection for each event and commits it after the `yield`, as applications do."""

    scope = Scope.REQUEST

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__()
        self.engine = engine
        self.commits: Callable[[BaseException | None], bool] = lambda error: error is None
        self.asks_first = False
        """Whether the provider starts the transaction with its own query."""

    @provide
    async def session(self) -> AsyncGenerator[AsyncSession, BaseException | None]:
        async with AsyncSession(self.engine) as session:
            if self.asks_first:
                await session.execute(select(charges.c.id))
            error = yield session
            if self.commits(error):
                await session.commit()

    @provide
    async def connection(self) -> AsyncGenerator[AsyncConnection, BaseException | None]:
        async with self.engine.connect() as connection:
            if self.asks_first:
                await connection.execute(select(charges.c.id))
            error = yield connection
            if self.commits(error):
                await connection.commit()


@dataclass
class LedgerShop:
    """The service and its database."""

    container: AsyncContainer
    dispatcher: IdempotentEventDispatcher
    store: SqlIdempotencyRepository
    sessions: SessionProvider

    async def attempt(self, event: OrderPlaced) -> Outcome[Any]:
        """Dispatch the event once and return the outcome of the only handler."""
        [execution] = self.dispatcher.executions(event)
        return await execution.attempt()

    async def charged(self) -> list[str]:
        """Return the charged orders, repeated if charged several times."""
        async with self.store.engine.connect() as connection:
            return list(await connection.scalars(select(charges.c.order_id).order_by(charges.c.id)))

    async def waiting(self) -> list[str]:
        """Return the ids of the events in the outbox."""
        async with self.store.engine.connect() as connection:
            return list(await connection.scalars(select(outbox.c.event_id).order_by(outbox.c.id)))

    async def statuses(self) -> dict[str, str]:
        """Return the status of each record, by event id."""
        return {record.key.rpartition(":")[2]: record.status.value async for record in self.store.scan("")}


@asynccontextmanager
async def open_ledger_shop(
    url: str,
    router: EventRouter,
    *,
    held: type = AsyncSession,
    isolation: str | None = None,
    settings: Settings | None = None,
    observer: Observer = SILENT,
) -> AsyncIterator[LedgerShop]:
    """Open the service on the database `url`; its handlers use a `held` with the isolation level `isolation`."""
    engine = sql_engine(url, lock_timeout_seconds=0.3)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
        await connection.run_sync(tables.drop_all)
        await connection.run_sync(tables.create_all)
    await migrate(engine)
    own = sql_engine(url)
    sessions = SessionProvider(own.execution_options(isolation_level=isolation) if isolation else own)
    store = SqlIdempotencyRepository(engine, timeout=timedelta(seconds=5))
    context = {Settings: settings or Settings(), ServiceName: ServiceName("billing")}
    container = make_async_container(
        TelemetryProvider(),
        EventContextProvider(),
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(router, transaction=held),
        sessions,
        _replacements(store, observer),
        context=context,
        validation_settings=STRICT_VALIDATION,
    )
    dispatcher = await container.get(EventDispatcher)
    assert isinstance(dispatcher, IdempotentEventDispatcher)
    try:
        yield LedgerShop(container, dispatcher, store, sessions)
    finally:
        await container.close()
        await own.dispose()
        await engine.dispose()


def _replacements(store: SqlIdempotencyRepository, observer: Observer) -> Provider:
    provider = Provider(scope=Scope.APP)
    provider.provide(lambda: store, provides=IdempotencyRepository, override=True)
    if observer is not SILENT:
        provider.provide(lambda: observer, provides=Observer, override=True)
    return provider


async def charge(session: AsyncSession | AsyncConnection, event: OrderPlaced) -> None:
    """Insert a charge."""
    await session.execute(insert(charges).values(order_id=event.order_id))
