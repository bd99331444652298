"""Every entry point reserves work again if its lease has expired before its function starts.

The lease clock and the store's clock jump together, and the event loop's clock does not move, as after a stall.  The
store is in memory, except for transactional handlers.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, closing, suppress
from contextvars import Context
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from aiokafka import TopicPartition
from dishka import STRICT_VALIDATION, Provider, Scope, make_async_container
from faststream import AckPolicy
from faststream.kafka import KafkaBroker, TestKafkaBroker
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from integr8s_idem import Attempt, BaseEvent, EventRouter, IdempotencyConfig, IdempotencyManager, Settings
from integr8s_idem._util.loop_fairness import LONGEST_TURN
from integr8s_idem.config import ServiceSettings
from integr8s_idem.engine.work import Executed
from integr8s_idem.errors import LeaseLostError, StoreUnavailableError
from integr8s_idem.functions.decorator import idempotent
from integr8s_idem.functions.sync_bridge import own_loop
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.handler import EventHandler
from integr8s_idem.handlers.handler_calls import BatchCall, HandlerCall, RegisteredHandler, call_with_event
from integr8s_idem.integrations.aiokafka import by_position
from integr8s_idem.integrations.aiokafka import guarded as guarded_by_aiokafka
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from integr8s_idem.integrations.confluent import guarded as guarded_by_confluent
from integr8s_idem.integrations.dishka import (
    EventContextProvider,
    FromDishka,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.integrations.faststream import IdempotencyMiddleware
from integr8s_idem.records import Completed, Completion, Reserved, ReserveRequest, StoredResult, Verdict
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine
from integr8s_idem.telemetry import Past, Phase, Signal, Span
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.worker import EventPublisher
from tests.support.conditions import eventually
from tests.support.counting import CountingObserver
from tests.support.fake_consumer import FakeBroker, FakeRecord
from tests.support.fake_worker import FakePublisher
from tests.support.guarded import guarded

LEASE = 30.0
HOUR = timedelta(hours=1)


class ManualClock:
    """A clock that only moves when `leap` is called, past the end of a lease."""

    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def __call__(self) -> float:
        return self.seconds

    def wall(self) -> datetime:
        return datetime.fromtimestamp(self.seconds, UTC)

    def leap(self) -> None:
        self.seconds += 2 * LEASE


class StallingStore(FlakyStore):
    """Stalls once, right after a reservation."""

    def __init__(self, inner: IdempotencyRepository) -> None:
        super().__init__(inner)
        self.stall: Callable[[], Awaitable[None]] | None = None
        self.skipped = 0
        """Number of `reserve` calls before the one that stalls."""
        self.reserved: list[Reserved] = []

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        verdicts = await super().reserve(requests)
        self.reserved += [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        if self.stall is not None and self.skipped == 0:
            stall, self.stall = self.stall, None
            await stall()
        elif self.stall is not None:
            self.skipped -= 1
        return verdicts


class StallingObserver(CountingObserver):
    """Stalls once when the phase of a handler begins: after the first check, before the call."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock = clock
        self.stalls_in = 0
        """Countdown to the handler that stalls; 0 for none."""

    def phase(
        self, phase: Phase, event_type: str = "", *, attempt: int = 0, handler: str = "", past: Past | None = None
    ) -> AbstractContextManager[Span]:
        if phase is Phase.HANDLE and self.stalls_in:
            self.stalls_in -= 1
            if not self.stalls_in:
                self.clock.leap()
        return super().phase(phase, event_type, attempt=attempt, handler=handler, past=past)


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
        raise AssertionError("nothing is fetched again")

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


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.integrations.faststream.pause_after", lambda _: 0.0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def inner(clock: ManualClock) -> MemoryIdempotencyRepository:
    return MemoryIdempotencyRepository(clock=clock.wall)


@BY_EVERY_ENTRY
async def test_work_with_a_late_lease_that_is_still_held_starts_as_the_same_attempt(
    kind: type[Entry], clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = kind(clock, inner)

    async def leap() -> None:
        clock.leap()

    entry.store.stall, entry.store.skipped = leap, kind.skipped
    await entry.call()
    await entry.close()

    assert [attempt.number for attempt in entry.starts] == [1]
    assert entry.prevented == 1
    first, again = entry.store.reserved[-2:]
    assert (first.key, first.token, first.fence) == (again.key, again.token, again.fence)


@BY_EVERY_ENTRY
async def test_work_completed_by_another_process_is_answered_as_a_duplicate(
    kind: type[Entry], clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry, other = kind(clock, inner), kind(clock, inner)

    async def done_elsewhere() -> None:
        clock.leap()
        # In a separate context, as in another process.
        await asyncio.create_task(other.call(), context=Context())

    entry.store.stall, entry.store.skipped = done_elsewhere, kind.skipped
    if kind.duplicate is LeaseLostError:
        with pytest.raises(LeaseLostError):
            await entry.call()
    else:
        assert await entry.call() == kind.duplicate
    await entry.close()
    await other.close()

    assert entry.starts == []
    assert [attempt.number for attempt in other.starts] == [2]
    assert entry.prevented == 1


@BY_EVERY_ENTRY
async def test_nothing_starts_on_a_late_lease_while_the_store_does_not_answer(
    kind: type[Entry], clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = kind(clock, inner)

    async def leap_into_an_outage() -> None:
        clock.leap()
        entry.store.fail_next("reserve")

    entry.store.stall, entry.store.skipped = leap_into_an_outage, kind.skipped
    if not kind.is_patient:
        with suppress(StoreUnavailableError):
            assert await entry.call() is None
        assert entry.starts == []
    await entry.call()
    await entry.close()

    assert len(entry.starts) == 1
    assert entry.prevented == 1


@pytest.mark.parametrize("kind", CALLED_LATER)
async def test_a_lease_that_ends_between_the_first_check_and_the_call_prevents_the_start(
    kind: type[Entry], clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = kind(clock, inner)
    entry.observer.stalls_in = kind.skipped + 1

    await entry.call()
    await entry.close()

    assert [attempt.number for attempt in entry.starts] == [1]
    assert entry.prevented == 1
    first, again = entry.store.reserved[-2:]
    assert (first.token, first.fence) == (again.token, again.fence)


# Dependencies of a handler.


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


async def test_a_lease_that_ends_while_dependencies_are_made_prevents_the_start(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry, router, made = Run(clock, inner), EventRouter(), list[Tariff]()

    async def tariff() -> Tariff:
        if not made:
            clock.leap()
        made.append(Tariff())
        return made[-1]

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced, tariff: FromDishka[Tariff], attempt: FromDishka[Attempt]) -> str:
        assert tariff is made[-1]
        return entry.start(attempt)

    container = container_of(entry, router, tariff)
    [outcome] = await (await container.get(EventDispatcher)).dispatch(GIVEN)
    await container.close()

    assert value_of(outcome) == "receipt 1"
    assert (len(made), len(entry.starts), entry.prevented) == (2, 1, 1)


# Transactional handlers, on SQLite: its clock cannot be moved.


class Transactional(Run):
    """A handler whose outcome commits with its session."""

    lease = 1.0

    def __init__(self, clock: ManualClock, store: SqlIdempotencyRepository) -> None:
        super().__init__(clock, store)
        config = IdempotencyConfig(processing_timeout_seconds=self.lease)
        self.manager = IdempotencyManager(config, store, self.observer, scope="billing", clock=clock)
        self.engine = store.engine

    async def call(self) -> Any:
        router, requests = EventRouter(), Provider(scope=Scope.REQUEST)

        async def session() -> AsyncIterator[AsyncSession]:
            async with AsyncSession(self.engine) as opened:
                error = yield opened
                if error is None:
                    await opened.commit()

        async def tariff(session: AsyncSession) -> Tariff:
            return Tariff()

        @router.on(OrderPlaced)
        async def charge(event: OrderPlaced, tariff: FromDishka[Tariff], attempt: FromDishka[Attempt]) -> str:
            self.starts.append(attempt)
            return f"receipt {attempt.number}"

        requests.provide(session)
        container = container_of(self, router, tariff, requests, transaction=AsyncSession)
        try:
            [outcome] = await (await container.get(EventDispatcher)).dispatch(GIVEN)
        finally:
            await container.close()
        return value_of(outcome)


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[Callable[[], SqlIdempotencyRepository]]:
    """Makes stores, one per process, that share a file."""
    engines: list[AsyncEngine] = []

    def made() -> SqlIdempotencyRepository:
        engines.append(sql_engine(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}"))
        return SqlIdempotencyRepository(engines[-1])

    await migrate(made().engine)
    yield made
    for engine in engines:
        await engine.dispose()


def stall_after_reserve(
    store: SqlIdempotencyRepository,
    monkeypatch: pytest.MonkeyPatch,
    stall: Callable[[], Awaitable[None]],
    is_silent: asyncio.Event | None = None,
) -> list[Reserved]:
    """Stall once after the store has reserved; returns the reservations that are made.

    Call it before the manager of the store is made.  `is_silent`: set while the store does not answer.
    """
    reserve, reserved, calls = store.reserve, list[Reserved](), iter([stall])

    async def stalling(requests: Sequence[ReserveRequest]) -> list[Verdict]:
        if is_silent is not None and is_silent.is_set():
            raise StoreUnavailableError("reserve", "switched off by the test")
        verdicts = await reserve(requests)
        reserved.extend(verdict for verdict in verdicts if isinstance(verdict, Reserved))
        for each in calls:
            await each()
        return verdicts

    monkeypatch.setattr(store, "reserve", stalling)
    return reserved


async def test_a_transactional_handler_with_a_late_lease_still_held_starts_as_the_same_attempt(
    clock: ManualClock, stores: Callable[[], SqlIdempotencyRepository], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores()

    async def leap() -> None:
        clock.leap()

    reserved = stall_after_reserve(store, monkeypatch, leap)
    entry = Transactional(clock, store)

    assert await entry.call() == "receipt 1"
    await entry.close()

    assert [(attempt.number, attempt.fence) for attempt in entry.starts] == [(1, reserved[0].fence)]
    assert [each.token for each in reserved] == [reserved[0].token] * 2
    assert entry.prevented == 1


async def test_a_transactional_handler_completed_by_another_process_does_not_start(
    clock: ManualClock, stores: Callable[[], SqlIdempotencyRepository], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other_store = stores(), stores()

    async def done_elsewhere() -> None:
        clock.leap()
        await asyncio.sleep(1.1 * Transactional.lease)
        asked = ReserveRequest(key=reserved[0].key, token=bytes(16), lease=timedelta(seconds=60), retention=HOUR)
        [taken_over] = await other_store.reserve([asked])
        assert isinstance(taken_over, Reserved)
        assert taken_over.attempt == 2
        result = StoredResult(b'"receipt 2"')
        assert await other_store.complete([Completion(reservation=taken_over, ttl=HOUR, result=result)]) == [True]

    reserved = stall_after_reserve(store, monkeypatch, done_elsewhere)
    entry = Transactional(clock, store)

    assert await entry.call() == "receipt 2"
    await entry.close()

    assert entry.starts == []
    assert entry.prevented == 1


async def test_a_transactional_handler_does_not_start_on_a_late_lease_while_its_database_does_not_answer(
    clock: ManualClock, stores: Callable[[], SqlIdempotencyRepository], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores()

    async def leap_into_an_outage() -> None:
        clock.leap()
        is_silent.set()

    is_silent = asyncio.Event()
    stall_after_reserve(store, monkeypatch, leap_into_an_outage, is_silent)
    entry = Transactional(clock, store)

    with pytest.raises(StoreUnavailableError):
        await entry.call()
    await entry.close()

    assert entry.starts == []


# Batches.


async def test_a_batch_handler_is_called_without_events_whose_lease_is_late(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = Run(clock, inner)
    sizes: list[list[str]] = []
    router, calls = EventRouter(), list[BatchCall]()

    @router.on_batch(OrderPlaced, max_size=3, max_wait=timedelta(seconds=60))
    async def charge(events: list[OrderPlaced]) -> None:
        sizes.append([event.order_id for event in events])
        entry.starts.extend(calls[-1].batch.attempts)

    async def invoke(handler: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        assert isinstance(call, BatchCall)
        calls.append(call)
        return await call_with_event(handler, call)

    dispatcher = IdempotentEventDispatcher(router, entry.manager, invoke=invoke)

    def dispatch(order: int) -> asyncio.Task[Any]:
        return asyncio.create_task(dispatcher.dispatch(OrderPlaced(event_id=f"event-{order}", order_id=f"{order}")))

    late = dispatch(1)
    await eventually(lambda: len(entry.store.reserved) == 1)
    clock.seconds += LEASE - 0.5
    rest = [dispatch(2), dispatch(3)]
    await asyncio.wait(rest)
    # The omitted event waits for the next batch.
    rest += [dispatch(4), dispatch(5)]
    await asyncio.wait([late, *rest])
    await entry.close()

    assert sizes[0] == ["2", "3"]
    assert sorted(sizes[1]) == ["1", "4", "5"]
    assert {attempt.number for attempt in entry.starts} == {1}
    assert entry.prevented == 1


class FastStreamBatch(Run):
    """A FastStream subscriber of batches of two messages."""

    def __init__(self, clock: ManualClock, inner: IdempotencyRepository) -> None:
        super().__init__(clock, inner)
        self.given: list[list[str]] = []

    async def call(self, *orders: str) -> None:
        broker = KafkaBroker(middlewares=[IdempotencyMiddleware(self.manager, key=lambda record: str(record.value))])

        @broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR, batch=True)
        async def charge(bodies: list[str]) -> None:
            self.given.append(bodies)

        async with TestKafkaBroker(broker):
            await asyncio.create_task(broker.publish_batch(*orders, topic="orders"))


async def test_a_faststream_batch_with_late_leases_is_reserved_again_as_the_same_attempts(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = FastStreamBatch(clock, inner)

    async def leap() -> None:
        clock.leap()

    entry.store.stall = leap
    await entry.call("1", "2")
    await entry.close()

    assert entry.given == [["1", "2"]]
    assert {record.attempt async for record in inner.scan("")} == {1}
    assert len(entry.store.reserved) == 4
    assert len({(each.key, each.token, each.fence) for each in entry.store.reserved}) == 2
    assert entry.prevented == 2


async def test_a_faststream_batch_omits_messages_completed_by_another_process(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry, other = FastStreamBatch(clock, inner), FastStreamBatch(clock, inner)

    async def done_elsewhere() -> None:
        clock.leap()
        await asyncio.create_task(other.call("1"), context=Context())

    entry.store.stall = done_elsewhere
    await entry.call("1", "2")
    await entry.close()
    await other.close()

    assert (other.given, entry.given) == ([["1"]], [["2"]])


async def test_a_faststream_batch_does_not_start_on_late_leases_while_the_store_does_not_answer(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = FastStreamBatch(clock, inner)

    async def leap_into_an_outage() -> None:
        clock.leap()
        entry.store.down.add("reserve")

    entry.store.stall = leap_into_an_outage
    await entry.call("1", "2")
    assert entry.given == []

    entry.store.down.clear()
    await entry.call("1", "2")
    await entry.close()
    assert entry.given == [["1", "2"]]


# Batches in a custom consumer loop.


async def acquired(entry: Entry, *keys: str) -> list[Reserved]:
    """Acquire a batch of free keys."""
    verdicts = (await entry.manager.acquire_batch(keys)).values()
    reserved = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
    assert len(reserved) == len(keys)
    return reserved


async def test_may_start_asks_the_store_only_when_a_lease_is_late(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = Run(clock, inner)
    reserved = await acquired(entry, "1", "2")

    assert [await entry.manager.may_start(each) for each in reserved] == [True, True]
    assert (entry.store.calls["renew"], entry.prevented) == (0, 0)


async def test_may_start_renews_all_late_leases_of_its_batch_in_one_call(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = Run(clock, inner)
    reserved = [*await acquired(entry, "1", "2"), *await acquired(entry, "3")]
    clock.seconds += LEASE - 0.5

    assert [await entry.manager.may_start(each) for each in reserved] == [True] * 3
    assert (entry.store.calls["renew"], entry.prevented) == (2, 2), "leases of other batches are not renewed"
    assert await entry.manager.confirm_batch(reserved) == [True] * 3
    assert {record.attempt async for record in inner.scan("")} == {1}


async def test_may_start_is_false_for_keys_taken_over_by_another_process(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry, other = Run(clock, inner), Run(clock, inner)
    lost, kept = await acquired(entry, "1", "2")
    clock.leap()
    [taken_over] = await acquired(other, "1")

    assert [await entry.manager.may_start(each) for each in (lost, kept)] == [False, True]
    assert taken_over.attempt == 2
    assert await entry.manager.confirm_batch([lost, kept]) == [False, True]


async def test_may_start_renews_an_unknown_reservation(clock: ManualClock, inner: MemoryIdempotencyRepository) -> None:
    entry, other = Run(clock, inner), Run(clock, inner)
    [reserved] = await acquired(other, "1")

    assert await entry.manager.may_start(reserved)
    assert entry.store.calls["renew"] == 1
    assert await entry.manager.may_start(reserved)
    assert entry.store.calls["renew"] == 1


async def test_may_start_raises_while_the_store_does_not_answer(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = Run(clock, inner)
    [reserved] = await acquired(entry, "1")
    clock.leap()
    entry.store.down.add("renew")

    with pytest.raises(StoreUnavailableError):
        await entry.manager.may_start(reserved)

    entry.store.down.clear()
    assert await entry.manager.may_start(reserved)


async def test_renewing_a_batch_manually_gives_its_starts_a_new_lease(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = Run(clock, inner)
    reserved = await acquired(entry, "1", "2")
    clock.seconds += 0.8 * LEASE
    assert await entry.manager.renew(*reserved) == [True, True]
    clock.seconds += 0.8 * LEASE

    assert [await entry.manager.may_start(each) for each in reserved] == [True, True]
    assert entry.store.calls["renew"] == 1


async def test_a_run_with_an_expired_lease_is_not_restarted_by_nested_runs(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    """Its side effects have happened, so a late start of a nested run must not look as if it had not started."""
    entry = Run(clock, inner)
    charges: list[int] = []

    async def inner_handler(event: BaseEvent) -> str:
        return "inner"

    unguarded = EventHandler(inner_handler, name="inner")

    async def charge() -> str:
        charges.append(1)
        clock.seconds += 2 * LEASE  # the event loop is blocked
        return str(await unguarded(BaseEvent(event_type="inner")))

    assert await entry.manager.run("outer", charge) == "inner"
    assert charges == [1]


async def test_functions_that_do_not_await_let_the_event_loop_run_between_them() -> None:
    """Outcomes and renewals are written between functions that do not await."""
    here = guarded()
    started, completed = list[int](), list[int]()

    async def work(number: int) -> None:
        started.append(number)
        completed.append(here.store.calls["complete"])
        time.sleep(2 * LONGEST_TURN)  # noqa: ASYNC251  # a badly behaved function

    await asyncio.gather(*(here.manager.run(f"job:{number}", partial(work, number)) for number in range(10)))

    assert sorted(started) == list(range(10))
    assert completed[-1] >= 8, "outcomes do not wait for the last function"
