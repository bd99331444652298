"""The entry points of the library, each as a function that does all works of a bench.

Handlers block the thread that calls them.  Each process has its own broker in memory; the processes compete through
their shared store.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing, suppress
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, Literal

import confluent_kafka
import httpx
from aiokafka import TopicPartition
from dishka import STRICT_VALIDATION, Provider, Scope, make_async_container
from faststream import AckPolicy, BaseMiddleware
from faststream.kafka import KafkaBroker, TestKafkaBroker
from faststream.message import AckStatus, StreamMessage
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from integr8s_idem import Attempt, BaseEvent, EventRouter, IdempotencyManager, Settings
from integr8s_idem.config import KafkaSettings, ServiceSettings
from integr8s_idem.errors import IdempotencyConflictError, InProgressError, LeaseLostError, StoreError
from integr8s_idem.functions.decorator import idempotent
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.handler_calls import BatchCall, HandlerCall, RegisteredHandler, call_with_event
from integr8s_idem.integrations.aiokafka import by_header
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
from integr8s_idem.records import Completed, Reserved
from integr8s_idem.stores.sql import SqlIdempotencyRepository, sql_engine
from integr8s_idem.worker import EventPublisher, ServiceWorker
from tests.crashes.orders import SERVICE
from tests.crashes.stores import LOCK_TIMEOUT
from tests.crashes.transacting import entries
from tests.stalled_starts.orders import StallOrder
from tests.support.fake_consumer import FakeBroker, FakeConsumer, FakeRecord
from tests.support.fake_worker import FakePublisher
from tests.support.homes import CONNECTIONS

logger = logging.getLogger(__name__)

PAUSE: Final = 0.02
"""Seconds before a caller retries."""

LOOPS: Final = 8
"""Maximum number of consumer loops per process."""

SLOWEST_DEPENDENCY: Final = 0.05
"""Seconds."""

OK: Final = 200
RETRIABLE: Final = (409, 503)
"""Statuses after which a client retries."""

GIVEN_AT: Final = datetime(2026, 1, 1, tzinfo=UTC)
"""Timestamp of all events, which must be equal in all processes."""

BATCH: Final = 8
"""Maximum number of events in a call of a batch handler."""


class Bench(ABC):
    """The order and manager of a process, and the behavior of its handlers."""

    def __init__(self, order: StallOrder, manager: IdempotencyManager) -> None:
        self.order = order
        self.manager = manager

    @abstractmethod
    def handle(self, work: str, key: str, attempt: int, fence: int) -> str:
        """Do a work in the calling thread, and return its result."""

    @abstractmethod
    def handle_together(self, attempts: Mapping[str, Attempt]) -> list[str]:
        """Do the works of one batch, given with their attempts."""

    @abstractmethod
    def ready(self) -> None:
        """Note that the process is ready."""

    def handle_here(self, work: str) -> str:
        """Do a work with the attempt of the current run."""
        attempt = self.manager.attempt()
        return self.handle(work, attempt.key, attempt.number, attempt.fence)

    async def do_all(self, do: Callable[[str], Awaitable[object]]) -> None:
        """Call `do` with every work, several at a time, until each succeeds."""
        waiting = iter(self.order.names)

        async def take_turns() -> None:
            for work in waiting:
                await _until_done(partial(do, work))

        self.ready()
        async with asyncio.TaskGroup() as group:
            for _ in range(self.order.concurrency):
                group.create_task(take_turns())


async def _until_done(do: Callable[[], Awaitable[object]]) -> None:
    while True:
        try:
            await do()
        except (LeaseLostError, InProgressError, IdempotencyConflictError, StoreError) as error:
            logger.info("retrying after: %s", error)
            await asyncio.sleep(PAUSE)
        else:
            return


# Callers.


async def run_by_manager(bench: Bench) -> None:
    """`manager.run`."""

    async def do(work: str) -> None:
        async def function() -> str:
            return bench.handle_here(work)

        await bench.manager.run(work, function)

    await bench.do_all(do)


async def run_decorated(bench: Bench) -> None:
    """`@idempotent` of an async function."""

    @idempotent(key="{work}", manager=bench.manager)
    async def do(work: str) -> str:
        return bench.handle_here(work)

    await bench.do_all(do)


async def run_decorated_plain(bench: Bench) -> None:
    """`@idempotent` of a plain function, called in threads."""
    await _take_loop(bench.manager)

    @idempotent(key="{work}", manager=bench.manager)
    def do(work: str) -> str:
        return bench.handle_here(work)

    await bench.do_all(lambda work: asyncio.to_thread(do, work))


async def _take_loop(manager: IdempotencyManager) -> None:
    """Bind the manager to this event loop before it is called from threads."""

    async def nothing() -> None:
        return None

    await _until_done(lambda: manager.run("none", nothing))


async def run_steps(bench: Bench) -> None:
    """A step in a run."""

    async def do(work: str) -> None:
        async def step() -> str:
            return bench.handle_here(work)

        async def unit() -> str:
            return await bench.manager.steps().run("only", step)

        await bench.manager.run(work, unit)

    await bench.do_all(do)


async def run_batch_verbs(bench: Bench) -> None:
    """A loop over `acquire_batch`, `may_start` and `confirm_batch`."""
    left = list(bench.order.names)
    bench.ready()
    while left:
        asked = left[: bench.order.concurrency]
        try:
            done = await _done_of(bench, asked)
        except StoreError as error:
            logger.info("retrying after: %s", error)
            done = set()
        # Try the works of other workers last.
        left = left[len(asked) :] + [work for work in asked if work not in done]
        if not done:
            await asyncio.sleep(PAUSE)


async def _done_of(bench: Bench, asked: Sequence[str]) -> set[str]:
    """Do the available works, and return all that are done by any process."""
    verdicts = await bench.manager.acquire_batch(asked)
    done = {work for work, verdict in verdicts.items() if isinstance(verdict, Completed)}
    return done | await _do_batch(bench, {work: v for work, v in verdicts.items() if isinstance(v, Reserved)})


async def _do_batch(bench: Bench, reserved: Mapping[str, Reserved]) -> set[str]:
    results: dict[Reserved, str] = {}
    for work, reservation in reserved.items():
        if not hasattr(bench.manager, "may_start") or await bench.manager.may_start(reservation):
            results[reservation] = bench.handle(work, reservation.key, reservation.attempt, reservation.fence)
    kept = await bench.manager.confirm_batch(results)
    keys = {reservation.key: work for work, reservation in reserved.items()}
    return {keys[reservation.key] for reservation, is_kept in zip(results, kept, strict=True) if is_kept}


# The worker's pipeline.


class WorkGiven(BaseEvent):
    event_type: Literal["work_given"] = "work_given"
    work: str


async def _run_worker(bench: Bench, dispatcher: EventDispatcher, broker: FakeBroker) -> None:
    # All processes must derive the same keys, so the event ids must be equal.
    for work in bench.order.names:
        broker.publish(WorkGiven(event_id=f"event-{work}", work=work, aggregate_id=work, timestamp=GIVEN_AT))
    worker = ServiceWorker(
        SERVICE,
        dispatcher,
        FakePublisher(broker),
        KafkaSettings(),
        ServiceSettings(
            ordering=bench.order.ordering,
            concurrency=bench.order.concurrency,
            retry_initial_seconds=0.02,
            retry_max_seconds=0.05,
            commit_interval_seconds=0.05,
        ),
        consumer=lambda settings, group: FakeConsumer(broker),
    )
    bench.ready()
    running = asyncio.create_task(worker.run())
    while sum(broker.committed.values()) < bench.order.works:
        await asyncio.wait({running}, timeout=PAUSE)
        if running.done():
            running.result()
            raise RuntimeError("the worker ended before its work")
    worker.stop()
    await running


async def run_worker(bench: Bench) -> None:
    """`ServiceWorker`."""
    router = EventRouter()

    @router.on(WorkGiven)
    async def handle(event: WorkGiven) -> str:
        return bench.handle_here(event.work)

    broker = FakeBroker()
    dispatcher = IdempotentEventDispatcher(router, bench.manager, publisher=FakePublisher(broker))
    await _run_worker(bench, dispatcher, broker)


async def run_batch_handler(bench: Bench) -> None:
    """`ServiceWorker` with a handler of batches."""
    router = EventRouter()

    @router.on_batch(WorkGiven, max_size=BATCH, max_wait=timedelta(milliseconds=20))
    async def handle(events: Sequence[WorkGiven]) -> list[str]:
        attempts = _CALL.get().batch.attempts
        return bench.handle_together({event.work: attempt for event, attempt in zip(events, attempts, strict=True)})

    async def invoke(registered: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        assert isinstance(call, BatchCall)
        _CALL.set(call)
        return await call_with_event(registered, call)

    broker = FakeBroker()
    dispatcher = IdempotentEventDispatcher(router, bench.manager, publisher=FakePublisher(broker), invoke=invoke)
    await _run_worker(bench, dispatcher, broker)


_CALL: ContextVar[BatchCall] = ContextVar("the call of the batch that is being handled")


async def run_dishka(bench: Bench) -> None:
    """`ServiceWorker` whose handlers wait for a dependency of their REQUEST scope."""
    router = EventRouter()

    @router.on(WorkGiven)
    async def handle(event: WorkGiven, attempt: FromDishka[Attempt], _: FromDishka[SlowDependency]) -> str:
        return bench.handle(event.work, attempt.key, attempt.number, attempt.fence)

    provider = Provider(scope=Scope.REQUEST)
    provider.provide(_slow_dependency)
    async with _container(bench, IdempotentDispatcherProvider(router), provider) as (dispatcher, broker):
        await _run_worker(bench, dispatcher, broker)


async def run_transactional(bench: Bench) -> None:
    """`ServiceWorker` with transactional handlers: their rows and their outcomes commit together."""
    router = EventRouter()

    @router.on(WorkGiven)
    async def handle(event: WorkGiven, attempt: FromDishka[Attempt], session: FromDishka[AsyncSession]) -> str:
        result = bench.handle(event.work, attempt.key, attempt.number, attempt.fence)
        row = {"work": event.work, "key": attempt.key, "attempt": attempt.number, "fence": attempt.fence}
        await session.execute(insert(entries).values(**row, pid=os.getpid()))
        return result

    store = bench.manager.repository
    assert isinstance(store, SqlIdempotencyRepository)
    engine = sql_engine(store.engine.url, pool_size=CONNECTIONS, lock_timeout_seconds=LOCK_TIMEOUT)

    async def session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine) as session:
            error = yield session
            if error is None:
                await session.commit()

    provider = Provider(scope=Scope.REQUEST)
    provider.provide(session)
    dispatching = IdempotentDispatcherProvider(router, transaction=AsyncSession)
    async with _container(bench, dispatching, provider) as (dispatcher, broker):
        await _run_worker(bench, dispatcher, broker)
    await engine.dispose()


class SlowDependency:
    """A dependency that takes a while to create."""


async def _slow_dependency() -> SlowDependency:
    await asyncio.sleep(random.uniform(0, SLOWEST_DEPENDENCY))
    return SlowDependency()


@asynccontextmanager
async def _container(
    bench: Bench, dispatching: IdempotentDispatcherProvider, provider: Provider
) -> AsyncIterator[tuple[EventDispatcher, FakeBroker]]:
    broker = FakeBroker()
    overrides = Provider(scope=Scope.APP)
    overrides.provide(lambda: bench.manager, provides=IdempotencyManager, override=True)
    overrides.provide(lambda: FakePublisher(broker), provides=EventPublisher)
    container = make_async_container(
        TelemetryProvider(),
        EventContextProvider(),
        IdempotencyProvider(),
        dispatching,
        provider,
        overrides,
        context={Settings: Settings(services={SERVICE: ServiceSettings()}), ServiceName: ServiceName(SERVICE)},
        validation_settings=STRICT_VALIDATION,
    )
    yield await container.get(EventDispatcher), broker
    await container.close()


# Frameworks.


async def run_http(bench: Bench) -> None:
    """`IdempotencyKeyMiddleware`."""

    async def endpoint(request: Request) -> Response:
        return JSONResponse(bench.handle_here((await request.body()).decode()))

    app = Starlette(routes=[Route("/work", endpoint, methods=["POST"])])
    app.add_middleware(IdempotencyKeyMiddleware, manager=bench.manager, identity=anyone, required=True)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop", timeout=60) as client:

        async def do(work: str) -> None:
            while True:
                response = await client.post("/work", content=work, headers={"Idempotency-Key": f'"{work}"'})
                if response.status_code == OK:
                    return
                assert response.status_code in RETRIABLE, response.text
                await asyncio.sleep(PAUSE)

        await bench.do_all(do)


async def run_faststream(bench: Bench) -> None:
    """A FastStream subscriber."""

    async def handle(body: str) -> str:
        return bench.handle_here(body)

    async with _subscribed(bench, handle) as (broker, messages):

        async def do(work: str) -> None:
            while not _is_acknowledged(messages.get(work)):
                # A separate task, like the one of a consumer.
                await asyncio.create_task(broker.publish(work, "works"))

        await bench.do_all(do)


def _is_acknowledged(message: StreamMessage[Any] | None) -> bool:
    return message is not None and message.committed is AckStatus.ACKED


async def run_faststream_batch(bench: Bench) -> None:
    """A FastStream subscriber that takes batches."""
    runs = bench.manager.executor.runs

    async def handle(bodies: list[str]) -> None:
        attempts = {run.work.key.label.split()[-1]: run.attempt for run in map(runs.of, runs.keys()) if run is not None}
        bench.handle_together({body: attempts[body] for body in bodies})

    async with _subscribed(bench, handle, batch=True) as (broker, messages):
        bench.ready()
        # One batch after the other, in a fixed order, as from a partition.
        names = sorted(bench.order.names)
        for first in range(0, len(names), BATCH):
            works = names[first : first + BATCH]
            while not all(_is_acknowledged(messages.get(work)) for work in works):
                await asyncio.create_task(broker.publish_batch(*works, topic="works"))


@asynccontextmanager
async def _subscribed(
    bench: Bench, handle: Callable[..., Any], *, batch: bool = False
) -> AsyncIterator[tuple[KafkaBroker, dict[str, StreamMessage[Any]]]]:
    """Open a broker with one guarded subscriber, and return it with the last message of each work."""
    messages: dict[str, StreamMessage[Any]] = {}

    class Watch(BaseMiddleware[Any, Any]):
        async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]) -> Any:
            records = msg.raw_message if batch else [msg.raw_message]
            messages.update({key(record): msg for record in records})
            return await call_next(msg)

    def key(record: Any) -> str:
        return str(record.value, "utf-8")

    guard = IdempotencyMiddleware(bench.manager, key=key)
    # The first middleware is the outermost.
    broker = KafkaBroker(middlewares=[Watch, guard])
    broker.subscriber("works", group_id=SERVICE, ack_policy=AckPolicy.NACK_ON_ERROR, batch=batch)(handle)
    async with TestKafkaBroker(broker):
        yield broker, messages


# Consumer loops of applications.


class MemoryConsumer:
    """An aiokafka consumer in memory."""

    def __init__(self, works: Sequence[str], number: int) -> None:
        self.committed = 0
        self._at = TopicPartition("works", number)
        self._records = [
            FakeRecord("works", number, offset, None, work.encode(), [("event_id", work.encode())])
            for offset, work in enumerate(works)
        ]
        self._position = 0
        self._paused: set[Any] = set()

    @property
    def is_done(self) -> bool:
        return self.committed == len(self._records)

    def assignment(self) -> set[Any]:
        return {self._at}

    def paused(self) -> set[Any]:
        return set(self._paused)

    def pause(self, *partitions: Any) -> None:
        self._paused.update(partitions)

    def resume(self, *partitions: Any) -> None:
        self._paused.difference_update(partitions)

    def seek(self, partition: Any, offset: int) -> None:
        self._position = offset

    async def commit(self, offsets: Mapping[Any, int]) -> None:
        self.committed = offsets[self._at]

    async def position(self, partition: Any) -> int:
        return self._position

    async def getmany(self, *partitions: Any, timeout_ms: int) -> Mapping[Any, Sequence[FakeRecord]]:
        if self._paused or self._position == len(self._records):
            await asyncio.sleep(min(timeout_ms / 1000, PAUSE))
            return {}
        fetched = self._records[self._position :]
        self._position = len(self._records)
        return {self._at: fetched}


async def run_aiokafka(bench: Bench) -> None:
    """Several aiokafka loops in one event loop."""
    names, loops = bench.order.names, min(bench.order.concurrency, LOOPS)

    async def consume(number: int) -> None:
        consumer: Any = MemoryConsumer(names[number::loops], number)
        deliveries = guarded_by_aiokafka(
            consumer, bench.manager, key=by_header("event_id"), commit_interval=timedelta(seconds=PAUSE)
        )
        async with aclosing(deliveries):
            left = len(names[number::loops])
            async for delivery in deliveries:
                with suppress(LeaseLostError, StoreError):
                    await delivery.run(handle)
                left -= delivery.settled
                if not left:
                    return

    async def handle(record: Any) -> str:
        return bench.handle_here(record.value.decode())

    bench.ready()
    async with asyncio.TaskGroup() as group:
        for number in range(loops):
            group.create_task(consume(number))


class MemoryMessage:
    """A confluent-kafka message in memory."""

    def __init__(self, work: str, number: int, offset: int) -> None:
        self._values: dict[str, Any] = {
            "topic": "works",
            "partition": number,
            "offset": offset,
            "value": work.encode(),
            "key": None,
            "headers": [("event_id", work.encode())],
            "error": None,
        }

    def __getattr__(self, name: str) -> Callable[[], Any]:
        return lambda: self._values[name]


class ConfluentMemoryConsumer:
    """A confluent-kafka consumer in memory."""

    def __init__(self, works: Sequence[str], number: int) -> None:
        self._at = confluent_kafka.TopicPartition("works", number)
        self._messages = [MemoryMessage(work, number, offset) for offset, work in enumerate(works)]
        self._position = 0
        self._is_paused = False

    def assignment(self) -> list[Any]:
        return [self._at]

    def pause(self, partitions: Sequence[Any]) -> None:
        self._is_paused = True

    def resume(self, partitions: Sequence[Any]) -> None:
        self._is_paused = False

    def seek(self, partition: Any) -> None:
        self._position = partition.offset

    def commit(self, *, offsets: Sequence[Any], asynchronous: bool) -> None:
        pass

    def poll(self, timeout: float) -> MemoryMessage | None:
        if self._is_paused or self._position == len(self._messages):
            time.sleep(min(timeout, PAUSE))
            return None
        self._position += 1
        return self._messages[self._position - 1]


async def run_confluent(bench: Bench) -> None:
    """confluent-kafka loops, each in its own thread."""
    names, loops = bench.order.names, min(bench.order.concurrency, LOOPS)
    await _take_loop(bench.manager)

    def handle(message: Any) -> str:
        return bench.handle_here(message.value().decode())

    def consume(number: int) -> None:
        consumer: Any = ConfluentMemoryConsumer(names[number::loops], number)
        left = len(names[number::loops])
        guarded: Any = guarded_by_confluent(consumer, bench.manager, key=by_header("event_id"))
        with closing(guarded) as deliveries:
            for delivery in deliveries:
                with suppress(LeaseLostError, StoreError):
                    delivery.run(handle)
                left -= delivery.settled
                if not left:
                    return

    bench.ready()
    async with asyncio.TaskGroup() as group:
        for number in range(loops):
            group.create_task(asyncio.to_thread(consume, number))


TRANSACTIONAL: Final = "transactional"

ENTRIES: Final[Mapping[str, Callable[[Bench], Awaitable[None]]]] = {
    "worker": run_worker,
    "batch-handler": run_batch_handler,
    "dishka": run_dishka,
    TRANSACTIONAL: run_transactional,
    "run": run_by_manager,
    "decorator": run_decorated,
    "decorator-plain": run_decorated_plain,
    "steps": run_steps,
    "batch-verbs": run_batch_verbs,
    "http": run_http,
    "faststream": run_faststream,
    "faststream-batch": run_faststream_batch,
    "aiokafka": run_aiokafka,
    "confluent": run_confluent,
}
