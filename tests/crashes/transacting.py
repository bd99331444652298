"""A worker with a relay, whose handlers write into the database of the store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from dishka import STRICT_VALIDATION, AsyncContainer, Provider, Scope, make_async_container, provide
from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table, insert
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from integr8s_idem import Attempt, EventDispatcher, EventRouter, Outgoing, PermanentError, Settings
from integr8s_idem.handlers.router import Invoke
from integr8s_idem.integrations.dishka import (
    EventContextProvider,
    FromDishka,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.sql import sql_engine
from integr8s_idem.testing.crash_points import CrashingPublisher, CrashPlan, CrashPoint
from integr8s_idem.testing.transactional_crash_points import CrashingOutbox, CrashingSqlStore, crashing_transaction
from integr8s_idem.worker import EventPublisher
from integr8s_idem.worker.relay import Relay
from tests.crashes.jobs import Job, JobDone
from tests.crashes.orders import SERVICE, Order
from tests.crashes.stores import LOCK_TIMEOUT, open_sql_store
from tests.crashes.transactional_bugs import BUGS
from tests.support.effects import Effects
from tests.support.homes import CONNECTIONS

CLAIM: Final = 4.0
"""Seconds for which a relay claims buckets; its successor waits that long for the buckets of a dead relay."""

STORE_TIMEOUT: Final = 2.0

STEPS: Final = 2
"""Events that each job publishes."""

RelayContext = Callable[[], AbstractAsyncContextManager[None]]
"""Context manager that runs a relay."""

tables = MetaData()
entries: Final = Table(
    "entries",
    tables,
    Column("id", Integer, primary_key=True),
    Column("work", String(200), nullable=False),
    Column("key", String(255), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("pid", Integer, nullable=False),
)
"""One row for each execution of a job; only the library prevents a second one."""


class Clerk:
    """Handles jobs by writing one row and publishing two events."""

    def __init__(self, effects: Effects, plan: CrashPlan) -> None:
        self._effects = effects
        self._plan = plan
        self.router = EventRouter()
        self.router.on(Job, name="clerk")(self.handle)

    async def handle(
        self,
        job: Job,
        session: FromDishka[AsyncSession],
        attempt: FromDishka[Attempt],
        outgoing: FromDishka[Outgoing],
    ) -> str:
        self._effects.note("begin", job.work, attempt)
        await asyncio.sleep(job.seconds)
        self._plan.reached(CrashPoint.IN_HANDLER_BEFORE_EFFECT)
        row = {"work": job.work, "key": attempt.key, "attempt": attempt.number, "fence": attempt.fence}
        await session.execute(insert(entries).values(**row, pid=os.getpid()))
        self._plan.reached(CrashPoint.IN_HANDLER_AFTER_EFFECT)
        for step in range(STEPS):
            outgoing.publish(JobDone(work=job.work, step=step, aggregate_id=job.aggregate_id))
        # Fail after the effect, which must be rolled back.
        if job.kind == "poison":
            raise PermanentError(f"{job.work} always fails")
        if job.kind == "flaky" and attempt.number == 1:
            raise RuntimeError(f"{job.work} fails in its first run")
        return self._effects.receipt(job.work, attempt)


class _Sessions(Provider):
    """Provides a session per event, and commits it after the `yield`."""

    scope = Scope.REQUEST

    def __init__(self, engine: AsyncEngine, plan: CrashPlan) -> None:
        super().__init__()
        self._engine = engine
        self._plan = plan

    @provide
    async def session(self) -> AsyncGenerator[AsyncSession, BaseException | None]:
        async with AsyncSession(self._engine) as session:
            error = yield session
            if error is None:
                await self._plan.around("transaction_commit", session.commit)


class _Dispatching(IdempotentDispatcherProvider):
    def __init__(self, router: EventRouter, plan: CrashPlan) -> None:
        super().__init__(router, transaction=AsyncSession)
        self._plan = plan

    def invoker(self, container: AsyncContainer) -> Invoke:
        return crashing_transaction(self._plan, super().invoker(container))


def _overrides(store: CrashingSqlStore, publisher: CrashingPublisher) -> Provider:
    provider = Provider(scope=Scope.APP)
    provider.provide(lambda: store, provides=IdempotencyRepository, override=True)
    provider.provide(lambda: publisher, provides=EventPublisher)
    return provider


@asynccontextmanager
async def open_transactional(
    order: Order, plan: CrashPlan
) -> AsyncIterator[tuple[EventDispatcher, EventPublisher, RelayContext]]:
    """Provide dispatcher, publisher and relay for the worker of `order`."""
    if order.bug:
        BUGS[order.bug]()
    url = order.store["url"]
    engine = sql_engine(url, pool_size=CONNECTIONS, lock_timeout_seconds=LOCK_TIMEOUT)
    handler_engine = engine.execution_options(isolation_level=order.isolation) if order.isolation else engine
    async with open_sql_store(url, STORE_TIMEOUT) as store:
        publisher = CrashingPublisher(order.kafka, plan)
        clerk = Clerk(Effects(Path(order.folder)), plan)
        settings = Settings(kafka=order.kafka, idempotency=order.idempotency, services={SERVICE: order.service})
        container = make_async_container(
            TelemetryProvider(),
            EventContextProvider(),
            IdempotencyProvider(),
            _Dispatching(clerk.router, plan),
            _Sessions(handler_engine, plan),
            _overrides(CrashingSqlStore(store, plan), publisher),
            context={Settings: settings, ServiceName: ServiceName(SERVICE)},
            validation_settings=STRICT_VALIDATION,
        )
        dispatcher: Any = await container.get(EventDispatcher)
        relay = Relay(CrashingOutbox(dispatcher.outbox, plan), publisher, claim_seconds=CLAIM)
        yield dispatcher, publisher, lambda: _relaying(relay, order.request_timeout)
        await container.close()
        await publisher.close()
    await engine.dispose()


@asynccontextmanager
async def _relaying(relay: Relay, seconds: float) -> AsyncIterator[None]:
    """Run the relay like a service does: at the end, it may publish the events of the last handlers."""
    running = asyncio.create_task(relay.run())
    yield
    relay.stop()
    await asyncio.wait({running}, timeout=seconds)
    running.cancel()
    await asyncio.wait({running})
    if not running.cancelled():
        running.result()
