"""Entry points whose process stalls between reservation and start."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import aclosing, closing
from datetime import timedelta
from typing import Any, Literal

import httpx
import pytest
from aiokafka import TopicPartition
from dishka import STRICT_VALIDATION, Provider, Scope, make_async_container
from faststream import AckPolicy
from faststream.kafka import KafkaBroker, TestKafkaBroker
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from integr8s_idem import Attempt, BaseEvent, EventRouter, IdempotencyConfig, IdempotencyManager, Settings
from integr8s_idem.config import ServiceSettings
from integr8s_idem.engine.work import Executed
from integr8s_idem.errors import LeaseLostError, StoreUnavailableError
from integr8s_idem.functions.decorator import idempotent
from integr8s_idem.functions.sync_bridge import own_loop
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.handler_calls import BatchCall, HandlerCall, RegisteredHandler, call_with_event
from integr8s_idem.integrations.aiokafka import by_position
from integr8s_idem.integrations.aiokafka import guarded as guarded_by_aiokafka
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from integr8s_idem.integrations.confluent import guarded as guarded_by_confluent
from integr8s_idem.integrations.dishka import (
    EventContextProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.integrations.faststream import IdempotencyMiddleware
from integr8s_idem.records import Completed
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.telemetry import Signal
from integr8s_idem.worker import EventPublisher
from tests.support.fake_consumer import FakeBroker, FakeRecord
from tests.support.fake_worker import FakePublisher
from tests.support.guarded import LEASE
from tests.support.stalling import ManualClock, StallingObserver, StallingStore


class Entry(ABC):
    """One process that runs work by one entry point."""

    duplicate: Any = "receipt 2"
    """The answer if another process has done the work as attempt 2."""
    skipped = 0
    """Number of reservations before that of the function."""
    is_patient = False
    """Whether it retries the store itself."""

    def __init__(self, clock: ManualClock, inner: IdempotencyRepository) -> None:
        self.clock = clock
        self.store = StallingStore(inner)
        self.observer = StallingObserver(clock)
        self.manager = IdempotencyManager(
            IdempotencyConfig(processing_timeout_seconds=LEASE), self.store, self.observer, scope="billing", clock=clock
        )
        self.starts: list[Attempt] = []

    @abstractmethod
    async def call(self) -> Any:
        """Request the work once and return its value."""

    async def close(self) -> None:
        await self.manager.close()

    def start(self, attempt: Attempt | None = None) -> str:
        started = attempt or self.manager.attempt()
        assert started.fence == self.store.reserved[-1].fence
        self.starts.append(started)
        return f"receipt {started.number}"

    @property
    def prevented(self) -> int:
        return self.observer.counts[Signal.STALE_START_PREVENTED]


class Run(Entry):
    async def call(self) -> Any:
        async def charge() -> str:
            return self.start()

        return await self.manager.run("order:1", charge)


class Decorated(Entry):
    async def call(self) -> Any:
        @idempotent(key="order:{number}", manager=self.manager)
        async def charge(number: int) -> str:
            return self.start()

        return await charge(1)


class DecoratedPlain(Entry):
    async def call(self) -> Any:
        @idempotent(key="order:{number}", manager=self.manager)
        def charge(number: int) -> str:
            return self.start()

        return await asyncio.to_thread(charge, 1)

    async def close(self) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.manager.close(), own_loop()))


class Step(Entry):
    duplicate = LeaseLostError
    """The step is answered, but its unit belongs to the other process."""
    skipped = 1
    is_patient = True

    async def call(self) -> Any:
        async def charge() -> str:
            return self.start()

        async def unit() -> str:
            return await self.manager.steps().run("charge", charge)

        return await self.manager.run("order:1", unit)


class Http(Entry):
    async def call(self) -> Any:
        async def charge(request: Request) -> Response:
            return JSONResponse(self.start())

        app = Starlette(routes=[Route("/", charge, methods=["POST"])])
        app.add_middleware(IdempotencyKeyMiddleware, manager=self.manager, identity=anyone, required=True)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            response = await client.post("/", headers={"Idempotency-Key": '"order-1"'})
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise StoreUnavailableError("reserve", response.text)
        return response.json()


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"


GIVEN = OrderPlaced(event_id="event-1")


def value_of(outcome: Any) -> Any:
    """Return the value of a dispatcher's outcome, whether new or replayed."""
    if isinstance(outcome, Completed):
        assert outcome.result is not None
        return outcome.result.body.decode().strip('"')
    assert isinstance(outcome, Executed), outcome
    return outcome.value


class Dispatcher(Entry):
    async def call(self) -> Any:
        [outcome] = await self.dispatcher().dispatch(GIVEN)
        return value_of(outcome)

    def dispatcher(self) -> EventDispatcher:
        router = EventRouter()

        @router.on(OrderPlaced)
        async def charge(event: OrderPlaced) -> str:
            return self.start()

        return IdempotentEventDispatcher(router, self.manager)


class BatchHandler(Dispatcher):
    def dispatcher(self) -> EventDispatcher:
        return batch_dispatcher(self)


def batch_dispatcher(entry: Entry, wait: float = 0.01) -> EventDispatcher:
    """Return a dispatcher of a batch handler that records the attempts of its events."""
    router, calls = EventRouter(), list[BatchCall]()

    @router.on_batch(OrderPlaced, max_wait=timedelta(seconds=wait))
    async def charge(events: list[OrderPlaced]) -> list[str]:
        assert len(calls[-1].batch.attempts) == len(events)
        return [entry.start(attempt) for attempt in calls[-1].batch.attempts]

    async def invoke(handler: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        assert isinstance(call, BatchCall)
        calls.append(call)
        return await call_with_event(handler, call)

    return IdempotentEventDispatcher(router, entry.manager, invoke=invoke)


class FastStream(Entry):
    duplicate = None
    """FastStream publishes the result of the first run and returns nothing to the producer."""

    async def call(self) -> Any:
        broker = KafkaBroker(middlewares=[IdempotencyMiddleware(self.manager, key=lambda record: str(record.offset))])
        answers: list[str] = []

        @broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)
        async def charge(body: str) -> None:
            answers.append(self.start())

        async with TestKafkaBroker(broker):
            # In its own task, like that of a consumer.
            await asyncio.create_task(broker.publish("order-1", "orders"))
        return answers[0] if answers else None


class Delivered:
    """An aiokafka consumer with one record."""

    def __init__(self) -> None:
        self.assigned = {TopicPartition("orders", 0)}
        self.committed: list[Any] = []

    def assignment(self) -> Any:
        return self.assigned

    def seek(self, *_: Any) -> None:
        """Do nothing: a loop that is left goes back to what it has not processed, but no other loop follows."""

    async def commit(self, offsets: Any) -> None:
        self.committed.append(offsets)

    async def getmany(self, *, timeout_ms: int) -> Any:
        return {at: [FakeRecord("orders", 0, 0, None, b"order-1")] for at in self.assigned}


class AiokafkaLoop(Entry):
    async def call(self) -> Any:
        async def charge(record: Any) -> str:
            return self.start()

        consumer: Any = Delivered()
        async with aclosing(guarded_by_aiokafka(consumer, self.manager, key=by_position)) as deliveries:
            async for delivery in deliveries:
                return await delivery.run(charge)
        raise AssertionError("there was no delivery")


class Message:
    """A confluent-kafka message."""

    def __getattr__(self, name: str) -> Callable[[], Any]:
        attributes: dict[str, Any] = {"topic": "orders", "partition": 0, "offset": 0, "value": b"order-1"}
        return lambda: attributes.get(name)


class Polled:
    """A confluent-kafka consumer with one message."""

    def assignment(self) -> list[Any]:
        return []

    def poll(self, timeout: float) -> Message:
        return Message()


class ConfluentLoop(DecoratedPlain):
    async def call(self) -> Any:
        return await asyncio.to_thread(self._consume)

    def _consume(self) -> Any:
        def charge(message: Any) -> str:
            return self.start()

        consumer: Any = Polled()
        guarded: Any = guarded_by_confluent(consumer, self.manager, key=by_position)
        with closing(guarded) as deliveries:
            return next(deliveries).run(charge)


ENTRIES: list[type[Entry]] = [
    Run,
    Decorated,
    DecoratedPlain,
    Step,
    Http,
    Dispatcher,
    BatchHandler,
    FastStream,
    AiokafkaLoop,
    ConfluentLoop,
]
CALLED_LATER: list[type[Entry]] = [DecoratedPlain, Step, Dispatcher, BatchHandler, ConfluentLoop]
"""Entry points that call the function some time after the first check, in another thread or task."""

BY_EVERY_ENTRY = pytest.mark.parametrize("kind", ENTRIES)


class Tariff:
    """A dependency that takes time to make."""


def container_of(
    entry: Entry, router: EventRouter, tariff: Callable[..., Awaitable[Tariff]], *more: Provider, **dispatching: Any
) -> Any:
    """Return a container that provides a `Tariff` in the REQUEST scope of handlers."""
    given, requests = Provider(scope=Scope.APP), Provider(scope=Scope.REQUEST)
    given.provide(lambda: entry.manager, provides=IdempotencyManager, override=True)
    given.provide(lambda: FakePublisher(FakeBroker()), provides=EventPublisher)
    requests.provide(tariff, provides=Tariff)
    return make_async_container(
        TelemetryProvider(),
        EventContextProvider(),
        IdempotencyProvider(),
        IdempotentDispatcherProvider(router, **dispatching),
        given,
        requests,
        *more,
        context={Settings: Settings(services={"billing": ServiceSettings()}), ServiceName: ServiceName("billing")},
        validation_settings=STRICT_VALIDATION,
    )
