"""What does the guard cost a service on a real Kafka, compared with no guard, FastStream and a bare loop?

All contestants read the same events from the beginning of one topic, each turn in a new group. A turn lasts from the
first fetched events until the last one is settled: handled and, with a guard, recorded. The last commit is excluded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, TypeAlias
from uuid import uuid4

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from faststream import AckPolicy
from faststream.kafka import KafkaBroker as FastStreamBroker

from benchmarks.contestants import ensure
from benchmarks.guards import BareRequests, RawRedis
from benchmarks.measuring import Flat
from benchmarks.native import NATIVE, with_native_code
from benchmarks.observers import SpansOfSdk, Telemetry
from benchmarks.places import RedisEnvironment, redis_environment
from benchmarks.rounds import Comparison, Measured, Options, Progress, Stopwatch, Turn, compare
from benchmarks.servers import kafka_version, running
from integr8s_idem import (
    BaseEvent,
    EventDispatcher,
    EventPublisher,
    EventRouter,
    IdempotencyConfig,
    IdempotencyManager,
    IdempotentEventDispatcher,
)
from integr8s_idem.config import KafkaSettings, ServiceSettings
from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.records import Completion
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.telemetry import SILENT, Observer
from integr8s_idem.worker import ServiceWorker
from integr8s_idem.worker.batch_limits import MOST_TOGETHER
from integr8s_idem.worker.consumer import make_consumer
from tests.support.kafka.broker import Kafka, KafkaBroker

KEYS: Final = (
    "kafka_noop",
    "kafka_noop_requests",
    "kafka_by_hand",
    "kafka_default_order",
    "kafka_default_order_requests",
    "kafka_key_order",
    "kafka_one_partition",
    "kafka_1ms",
    "kafka_1ms_requests",
    "kafka_vs_raw_loop",
    "kafka_vs_faststream",
    "kafka_vs_faststream_ack",
    "telemetry_on",
    "telemetry_bound",
    "kafka_vs_raw_loop_native",
    "kafka_vs_faststream_native",
    "kafka_noop_native",
    "kafka_default_order_native",
    "kafka_1ms_native",
    "speedups",
)
EVENTS: Final = 10_000
"""Number of events in the topic, for turns of a second."""
PARTITIONS: Final = 8
POLL_RECORDS: Final = 500
ACK_ONE_IN: Final = 10
"""FastStream under `ACK` reads only one event in ten, since it takes several times as long for each."""

NOOP: Final = ServiceSettings(ordering="none", concurrency=1_000, max_in_flight=2_000)
BY_PARTITION: Final = ServiceSettings(ordering="partition", concurrency=1_000, max_in_flight=2_000)
BY_KEY: Final = ServiceSettings(ordering="key", concurrency=1_000, max_in_flight=2_000)
BY_HAND: Final = ServiceSettings(ordering="none", concurrency=64, max_in_flight=2_000)
"""Fewer handlers at once, since each of them takes a connection of redis-py."""
ONE_MS: Final = ServiceSettings(ordering="none", concurrency=64, max_in_flight=2_000)
BROKER: Final = {"group.coordinator.append.linger.ms": "0"}
"""Disables the five milliseconds that each commit waits for others in Kafka 4.0 and 4.1, but not in other versions
(KIP-1224): they would dominate the figures of contestants that commit often."""
LONGEST_TURN: Final = 120.0


class OrderPlaced(BaseEvent):
    """About 400 bytes on the wire, 250 of them fields of every event."""

    event_type: Literal["order_placed"] = "order_placed"
    order_id: str
    customer_id: str
    total_cents: int
    currency: str = "EUR"
    city: str = "Wien"


Work = Callable[[OrderPlaced], Awaitable[None]]
Fetched: TypeAlias = Mapping[Any, Sequence[Any]]
"""Messages by partition."""


class Handler:
    """Counts handled events, and signals when the last one has arrived."""

    def __init__(self, events: int, pause: float = 0.0) -> None:
        self.handled = 0
        self.finished = asyncio.Event()
        self.watch: Stopwatch | None = None
        self._events = events
        self._pause = pause

    def begin(self) -> None:
        """Start the stopwatch when the first events arrive."""
        if self.watch is None:
            self.watch = Stopwatch()

    async def handle(self, event: OrderPlaced) -> None:
        """Do nothing, or wait."""
        self.begin()
        if self._pause:
            await asyncio.sleep(self._pause)
        self.handled += 1
        if self.handled == self._events:
            self.finished.set()

    async def wait(self) -> None:
        async with asyncio.timeout(LONGEST_TURN):
            await self.finished.wait()

    def read(self) -> Measured:
        assert self.watch is not None
        return self.watch.read(self.handled)


class Topic:
    """A topic full of orders, and the contestants that read it."""

    def __init__(
        self,
        kafka: Kafka,
        repository: IdempotencyRepository,
        events: int,
        *,
        prefix: str = "bench.",
        partitions: int = PARTITIONS,
    ) -> None:
        self.kafka = kafka
        self.events = events
        self.partitions = partitions
        self.settings = KafkaSettings(bootstrap_servers=kafka.bootstrap, topic_prefix=prefix)
        self.name = f"{prefix}order_placed"
        self.repository = repository

    def server(self, env: RedisEnvironment) -> str:
        """Describe the broker, and the Redis that holds the records."""
        return f"Apache Kafka {kafka_version()}, KRaft, {self.partitions} partitions; {env.version}"

    async def fill(self) -> None:
        """Create the topic, and publish orders of different customers to all partitions."""
        await self.kafka.create_topics({self.name: self.partitions, f"{self.name}.dlq": 1})
        async with AIOKafkaProducer(bootstrap_servers=self.kafka.bootstrap, linger_ms=20) as producer:
            sent = []
            for number in range(self.events):
                event = OrderPlaced(
                    aggregate_id=f"order-{number}",
                    order_id=f"order-{number}",
                    customer_id=str(uuid4()),
                    total_cents=100 + number,
                )
                key = str(event.aggregate_id).encode()
                sent.append(await producer.send(self.name, encode_event(event), key=key, headers=event_headers(event)))
            await asyncio.gather(*sent)

    # This library.

    async def idempotent(
        self,
        _: float,
        *,
        service: ServiceSettings = NOOP,
        pause: float = 0.0,
        observer: Observer = SILENT,
        repository: IdempotencyRepository | None = None,
    ) -> Measured:
        """Run the idempotent service in a new scope, in which all events are new."""
        manager = IdempotencyManager(IdempotencyConfig(), repository or self.repository, observer, scope=new_scope())
        return await self._guarded(manager, service, pause)

    async def _guarded(self, manager: IdempotencyManager, service: ServiceSettings, pause: float = 0.0) -> Measured:
        handler = Handler(self.events, pause)
        dispatcher = IdempotentEventDispatcher(router_of(handler), manager)
        try:
            return await self.serve(dispatcher, service, handler)
        finally:
            await manager.close()

    async def plain(self, _: float, *, service: ServiceSettings = NOOP, pause: float = 0.0) -> Measured:
        """Run the same service without a guard."""
        handler = Handler(self.events, pause)
        return await self.serve(EventDispatcher(router_of(handler), scope="bench"), service, handler)

    async def by_hand(
        self, _: float, *, guard: RawRedis | BareRequests, service: ServiceSettings = BY_HAND, pause: float = 0.0
    ) -> Measured:
        """Run the same service without a guard, with a handler that is guarded by hand."""
        handler, scope = Handler(self.events, pause), new_scope()
        router = EventRouter()

        @router.on(OrderPlaced)
        async def ship(event: OrderPlaced) -> None:
            await guard.run(f"{scope}:{event.event_id}", partial(handler.handle, event))

        return await self.serve(EventDispatcher(router, scope="bench"), service, handler)

    async def with_requests(self, _: float, *, guard: BareRequests) -> Measured:
        """Run the same service without a guard, with the requests of one for as many events as it takes together."""
        handler, make_requests = Handler(self.events), requests_for_fetched(guard)

        async def begin(found: Fetched) -> None:
            handler.begin()
            await make_requests(found)

        def make(settings: KafkaSettings, group: str) -> Any:
            return after_fetching(make_consumer(settings, group), begin)

        return await self.serve(EventDispatcher(router_of(handler), scope="bench"), NOOP, handler, make)

    async def serve(
        self,
        dispatcher: EventDispatcher,
        service: ServiceSettings,
        handler: Handler,
        make: Callable[[KafkaSettings, str], Any] = make_consumer,
    ) -> Measured:
        """Measure a worker from the first fetched events until all are settled."""
        async with self.worker(dispatcher, service, handler, make) as worker:
            await handler.wait()
            tally = worker.report().tally
            while tally.handled < self.events:  # noqa: ASYNC110  # a tally has no event to wait for
                await asyncio.sleep(0.001)
            found = handler.read()
        ensure(handler.handled == tally.handled == self.events, f"{handler.handled} handled, {tally}")
        ensure(
            tally.duplicates == tally.retries == tally.dead_letters == 0,
            f"unexpected duplicates, retries or dead letters: {tally}",
        )
        return found

    @asynccontextmanager
    async def worker(
        self,
        dispatcher: EventDispatcher,
        service: ServiceSettings,
        handler: Handler,
        make: Callable[[KafkaSettings, str], Any] = make_consumer,
        group: str = "",
    ) -> AsyncIterator[ServiceWorker]:
        """Run a worker, alone in a new group unless one is given."""

        async def begin(_: object) -> None:
            handler.begin()

        def make_consumer_with_callback(settings: KafkaSettings, group: str) -> Any:
            return after_fetching(make(settings, group), begin)

        publisher = EventPublisher(self.settings)
        group = group or f"bench-{uuid4().hex}"
        worker = ServiceWorker(
            "bench", dispatcher, publisher, self.settings, service, group=group, consumer=make_consumer_with_callback
        )
        task = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop()
            await task
            await publisher.close()

    async def check_duplicates_are_refused(self) -> None:
        """Raise AssertionError unless a second group in the same scope finds every event completed."""
        scope = new_scope()
        await self._guarded(IdempotencyManager(IdempotencyConfig(), self.repository, scope=scope), NOOP)
        handler = Handler(self.events)
        manager = IdempotencyManager(IdempotencyConfig(), self.repository, scope=scope)
        dispatcher = IdempotentEventDispatcher(router_of(handler), manager)
        async with self.worker(dispatcher, NOOP, handler) as worker, asyncio.timeout(LONGEST_TURN):
            while worker.report().tally.duplicates < self.events:
                ensure(handler.handled == 0, "a duplicate got through")
                await asyncio.sleep(0.01)
        ensure(handler.handled == 0, f"{handler.handled} duplicates got through")
        await manager.close()

    # Alternatives.

    async def raw_loop(self, _: float) -> Measured:
        """aiokafka by hand: decode, await, commit after each poll."""
        handler = Handler(self.events)
        consumer = AIOKafkaConsumer(
            self.name,
            bootstrap_servers=self.kafka.bootstrap,
            group_id=f"bench-{uuid4().hex}",
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            max_poll_records=POLL_RECORDS,
        )
        async with consumer:
            while handler.handled < self.events:
                batches: Mapping[Any, list[Any]] = await consumer.getmany(timeout_ms=200)
                if not batches:
                    continue
                handler.begin()
                for records in batches.values():
                    for record in records:
                        await handler.handle(OrderPlaced.model_validate_json(record.value))
                found = handler.read()  # without the last commit, as for all contestants
                await consumer.commit()
        ensure(handler.handled == self.events, f"{handler.handled} of {self.events} handled")
        return found

    async def faststream(
        self, _: float, *, policy: AckPolicy, one_in: int = 1, middlewares: Sequence[Any] = ()
    ) -> Measured:
        """Run FastStream's subscriber with its defaults."""
        handler = Handler(self.events // one_in)
        found = await subscribe(self.kafka.bootstrap, self.name, handler, policy, middlewares)
        # With `one_in`, some more events may be handled before the broker stops; none may be handled twice.
        ensure(handler.handled <= self.events, f"{handler.handled} of {self.events} handled")
        return found


async def subscribe(
    bootstrap: str, topic: str, handler: Handler, policy: AckPolicy, middlewares: Sequence[Any] = ()
) -> Measured:
    """Read a topic with FastStream, in a new group, until the handler has finished."""
    broker = FastStreamBroker(bootstrap, logger=None, middlewares=middlewares)

    @broker.subscriber(
        topic,
        group_id=f"bench-{uuid4().hex}",
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        ack_policy=policy,
    )
    async def ship(event: OrderPlaced) -> None:
        await handler.handle(event)

    await broker.start()
    try:
        await handler.wait()
        return handler.read()
    finally:
        await broker.stop()


def new_scope() -> str:
    return f"bench-{uuid4().hex[:8]}"


def router_of(handler: Handler) -> EventRouter:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def ship(event: OrderPlaced) -> None:
        await handler.handle(event)

    return router


def requests_for_fetched(guard: BareRequests) -> Callable[[Fetched], Awaitable[None]]:
    """Return a function that makes the requests of `guard` for fetched events, as many together as a worker does."""
    scope = new_scope()

    async def make_requests(found: Fetched) -> None:
        keys = [f"{scope}:{record.partition}:{record.offset}" for records in found.values() for record in records]
        for start in range(0, len(keys), MOST_TOGETHER):
            await guard.together(keys[start : start + MOST_TOGETHER])

    return make_requests


def after_fetching(consumer: Any, act: Callable[[Fetched], Awaitable[None]]) -> Any:
    """Make `consumer` call `act` with the events that it is about to return, if there are any."""
    fetch = consumer.getmany

    async def getmany(*partitions: Any, **options: Any) -> Any:
        found = await fetch(*partitions, **options)
        if found:
            await act(found)
        return found

    consumer.getmany = getmany
    return consumer


def with_small_requests(repository: Any) -> Any:
    """Make `repository` record outcomes in requests of at most one per partition, one after another.

    So small are the requests of a service that records each outcome before it handles the next event of the partition.
    """
    complete = repository.complete

    async def complete_in_parts(completions: Sequence[Completion]) -> list[bool]:
        parts = [completions[start : start + PARTITIONS] for start in range(0, len(completions), PARTITIONS)]
        return [written for part in parts for written in await complete(part)]

    repository.complete = complete_in_parts
    return repository


async def measure(options: Options, progress: Progress) -> Flat:
    """Measure each figure of this benchmark."""
    results: Flat = {}
    async with filled_topic(int(EVENTS * options.seconds), progress) as (topic, env):
        one_partition = Topic(topic.kafka, topic.repository, topic.events, prefix="single.", partitions=1)
        await one_partition.fill()
        progress("checking that every duplicate is blocked")
        await topic.check_duplicates_are_refused()
        with Telemetry() as telemetry:
            sdk = SpansOfSdk()
            small_requests = with_small_requests(await env.repository())
            for comparison in _comparisons(topic, one_partition, RawRedis(env), small_requests, telemetry, sdk):
                results |= await compare(comparison, options, progress)
            if telemetry.turns:
                telemetry.check(telemetry.turns * topic.events)
            if sdk.recorded:
                sdk.check()
            sdk.close()
        return results | {"kafka.server": topic.server(env), "kafka.events": topic.events}


def _comparisons(
    topic: Topic,
    one_partition: Topic,
    redis: RawRedis,
    small_requests: IdempotencyRepository,
    telemetry: Telemetry,
    sdk: SpansOfSdk,
) -> list[Comparison]:
    async def with_telemetry(seconds: float) -> Measured:
        telemetry.turns += 1
        return await topic.idempotent(seconds, observer=telemetry.observer)

    noop: dict[str, Turn] = {
        "idempotent": topic.idempotent,
        "by_partition": partial(topic.idempotent, service=BY_PARTITION),
        "by_key": partial(topic.idempotent, service=BY_KEY),
        "one_partition": partial(one_partition.idempotent, service=BY_PARTITION),
        "small_requests": partial(topic.idempotent, repository=small_requests),
        "plain": topic.plain,
        "plain_by_hand": partial(topic.by_hand, guard=redis),
        "plain_with_requests": partial(topic.with_requests, guard=BareRequests(topic.repository)),
        "raw_loop": topic.raw_loop,
        "faststream_ack_first": partial(topic.faststream, policy=AckPolicy.ACK_FIRST),
        "faststream_ack": partial(topic.faststream, policy=AckPolicy.ACK, one_in=ACK_ONE_IN),
        "with_telemetry": with_telemetry,
        "with_spans_of_sdk": partial(topic.idempotent, observer=sdk),
    }
    one_ms: dict[str, Turn] = {
        "idempotent": partial(topic.idempotent, service=ONE_MS, pause=0.001),
        "plain": partial(topic.plain, service=ONE_MS, pause=0.001),
        "plain_with_requests": partial(
            topic.by_hand, guard=BareRequests(topic.repository), service=ONE_MS, pause=0.001
        ),
    }
    figures = {
        "kafka_noop": ("idempotent", "plain"),
        "kafka_noop_requests": ("plain_with_requests", "plain"),
        "kafka_by_hand": ("plain_by_hand", "plain"),
        "kafka_default_order": ("by_partition", "idempotent"),
        "kafka_key_order": ("by_key", "idempotent"),
        "kafka_one_partition": ("one_partition", "idempotent"),
        "kafka_default_order_requests": ("small_requests", "idempotent"),
        "kafka_vs_raw_loop": ("idempotent", "raw_loop"),
        "kafka_vs_faststream": ("idempotent", "faststream_ack_first"),
        "kafka_vs_faststream_ack": ("idempotent", "faststream_ack"),
        "telemetry_on": ("with_telemetry", "idempotent"),
        "telemetry_bound": ("with_spans_of_sdk", "idempotent"),
    }
    figures_1ms = {"kafka_1ms": ("idempotent", "plain"), "kafka_1ms_requests": ("plain_with_requests", "plain")}
    if NATIVE is not None:
        noop |= {f"{name}_native": with_native_code(noop[name]) for name in ("idempotent", "plain", "by_partition")}
        one_ms |= {f"{name}_native": with_native_code(one_ms[name]) for name in ("idempotent", "plain")}
        figures |= {
            "kafka_vs_raw_loop_native": ("idempotent_native", "raw_loop"),
            "kafka_vs_faststream_native": ("idempotent_native", "faststream_ack_first"),
            "kafka_noop_native": ("idempotent_native", "plain_native"),
            "kafka_default_order_native": ("by_partition_native", "idempotent_native"),
            "speedups": ("idempotent_native", "idempotent"),
        }
        figures_1ms["kafka_1ms_native"] = ("idempotent_native", "plain_native")
    return [Comparison("kafka_noop", noop, figures), Comparison("kafka_1ms", one_ms, figures_1ms)]


@asynccontextmanager
async def filled_topic(events: int, progress: Progress) -> AsyncIterator[tuple[Topic, RedisEnvironment]]:
    with TemporaryDirectory(prefix="idem-bench-kafka-") as folder:
        broker = await asyncio.to_thread(KafkaBroker, Path(folder), BROKER)
        async with running(broker), redis_environment() as env:
            topic = Topic(broker, await env.repository(), events)
            progress(f"publishing {events} events to {PARTITIONS} partitions")
            await topic.fill()
            yield topic, env
