"""What does the guard cost a service on a real Kafka, beside the same service without it, FastStream and a bare loop?

All read the same events from the beginning of one topic, each turn in a group of its own.  A turn lasts from
the first events that are fetched until the last is settled: handled, and for a guarded one recorded.  Nobody's last
commit is in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal
from uuid import uuid4

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from faststream import AckPolicy
from faststream.kafka import KafkaBroker as FastStreamBroker

from benchmarks.contestants import must
from benchmarks.measuring import Flat
from benchmarks.observers import Telemetry
from benchmarks.places import RedisPlace, redis_place
from benchmarks.rounds import Comparison, Measured, Options, Stopwatch, Tell, Turn, compared
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
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.telemetry import SILENT, Observer
from integr8s_idem.worker import ServiceWorker
from integr8s_idem.worker.consumer import make_consumer
from tests.support.kafka.broker import Kafka, KafkaBroker

KEYS: Final = (
    "kafka_noop",
    "kafka_1ms",
    "kafka_vs_raw_loop",
    "kafka_vs_faststream",
    "kafka_vs_faststream_ack",
    "telemetry_on",
)
EVENTS: Final = 10_000
"""In the topic, for turns of a second."""
PARTITIONS: Final = 8
POLL_RECORDS: Final = 500
ACKED_PART: Final = 10
"""FastStream that commits each message reads one event of so many: it takes several times as long for each."""

NOOP: Final = ServiceSettings(ordering="none", concurrency=1_000, max_in_flight=2_000)
ONE_MS: Final = ServiceSettings(ordering="none", concurrency=64, max_in_flight=2_000)
BROKER: Final = {"group.coordinator.append.linger.ms": "0"}
"""Kafka 4.0 and 4.1 let each commit wait five milliseconds for others, which brokers before and after them do not
(KIP-1224): whoever commits often would be measured by that wait."""
LONGEST_TURN: Final = 120.0


class OrderPlaced(BaseEvent):
    """About 400 bytes on the wire, 250 of them what every event has."""

    event_type: Literal["order_placed"] = "order_placed"
    order_id: str
    customer_id: str
    total_cents: int
    currency: str = "EUR"
    city: str = "Wien"


Work = Callable[[OrderPlaced], Awaitable[None]]


class Handler:
    """Counts what is handled, and tells when the last event has come."""

    def __init__(self, events: int, pause: float = 0.0) -> None:
        self.handled = 0
        self.all = asyncio.Event()
        self.watch: Stopwatch | None = None
        self._events = events
        self._pause = pause

    def begin(self) -> None:
        """The first events are here."""
        if self.watch is None:
            self.watch = Stopwatch()

    async def handle(self, event: OrderPlaced) -> None:
        """The no-op, or the wait."""
        self.begin()
        if self._pause:
            await asyncio.sleep(self._pause)
        self.handled += 1
        if self.handled == self._events:
            self.all.set()

    async def wait(self) -> None:
        async with asyncio.timeout(LONGEST_TURN):
            await self.all.wait()

    def read(self) -> Measured:
        assert self.watch is not None
        return self.watch.read(self.handled)


class Topic:
    """One topic full of orders, and who reads it."""

    name: Final = "bench.order_placed"

    def __init__(self, kafka: Kafka, repository: IdempotencyRepository, events: int) -> None:
        self.kafka = kafka
        self.events = events
        self.settings = KafkaSettings(bootstrap_servers=kafka.bootstrap, topic_prefix="bench.")
        self.repository = repository

    def server(self, place: RedisPlace) -> str:
        """What answers, with the Redis that the records are in."""
        return f"Apache Kafka {kafka_version()}, KRaft, {PARTITIONS} partitions; {place.version}"

    async def fill(self) -> None:
        """Orders of different customers, by their keys in all partitions."""
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
        self, _: float, *, service: ServiceSettings = NOOP, pause: float = 0.0, observer: Observer = SILENT
    ) -> Measured:
        """All events are new to a scope of its own."""
        return await self._guarded(new_scope(), service, pause, observer)

    async def _guarded(self, scope: str, service: ServiceSettings, pause: float, observer: Observer) -> Measured:
        handler = Handler(self.events, pause)
        manager = IdempotencyManager(IdempotencyConfig(), self.repository, observer, scope=scope)
        dispatcher = IdempotentEventDispatcher(router_of(handler), manager)
        try:
            return await self.served(dispatcher, service, handler)
        finally:
            await manager.close()

    async def plain(self, _: float, *, service: ServiceSettings = NOOP, pause: float = 0.0) -> Measured:
        """The same service, unguarded."""
        handler = Handler(self.events, pause)
        return await self.served(EventDispatcher(router_of(handler), scope="bench"), service, handler)

    async def served(
        self,
        dispatcher: EventDispatcher,
        service: ServiceSettings,
        handler: Handler,
        make: Callable[[KafkaSettings, str], Any] = make_consumer,
    ) -> Measured:
        """From the first events that a consumer brings until all are settled."""
        async with self.worker(dispatcher, service, handler, make) as worker:
            await handler.wait()
            tally = worker.report().tally
            while tally.handled < self.events:  # noqa: ASYNC110  # a tally tells nobody
                await asyncio.sleep(0.001)
            found = handler.read()
        must(handler.handled == tally.handled == self.events, f"{handler.handled} handled, {tally}")
        must(tally.duplicates == tally.retries == tally.dead_letters == 0, f"more happened: {tally}")
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
        """A running worker, alone in a new group unless one is named."""

        def noting(settings: KafkaSettings, group: str) -> Any:
            return noted(make(settings, group), handler.begin)

        publisher = EventPublisher(self.settings)
        group = group or f"bench-{uuid4().hex}"
        worker = ServiceWorker("bench", dispatcher, publisher, self.settings, service, group=group, consumer=noting)
        task = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop()
            await task
            await publisher.close()

    async def refuses_twice(self) -> None:
        """A second group of one scope must find every event done."""
        scope = new_scope()
        await self._guarded(scope, NOOP, 0.0, SILENT)
        handler = Handler(self.events)
        manager = IdempotencyManager(IdempotencyConfig(), self.repository, scope=scope)
        dispatcher = IdempotentEventDispatcher(router_of(handler), manager)
        async with self.worker(dispatcher, NOOP, handler) as worker, asyncio.timeout(LONGEST_TURN):
            while worker.report().tally.duplicates < self.events:
                must(handler.handled == 0, "a duplicate got through")
                await asyncio.sleep(0.01)
        must(handler.handled == 0, f"{handler.handled} duplicates got through")
        await manager.close()

    # The others.

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
                found = handler.read()  # without its last commit, as all others
                await consumer.commit()
        must(handler.handled == self.events, f"{handler.handled} of {self.events} handled")
        return found

    async def faststream(self, _: float, *, policy: AckPolicy, part: int = 1) -> Measured:
        """FastStream's subscriber as it comes."""
        handler = Handler(self.events // part)
        broker = FastStreamBroker(self.kafka.bootstrap, logger=None)

        @broker.subscriber(
            self.name,
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
            found = handler.read()
        finally:
            await broker.stop()
        # Of a part, more may be handled before all has ended; of all, nothing may come twice.
        must(handler.handled <= self.events, f"{handler.handled} of {self.events} handled")
        return found


def new_scope() -> str:
    return f"bench-{uuid4().hex[:8]}"


def router_of(handler: Handler) -> EventRouter:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def ship(event: OrderPlaced) -> None:
        await handler.handle(event)

    return router


def noted(consumer: Any, begin: Callable[[], None]) -> Any:
    """`consumer`, which tells of the first events that it gives out."""
    fetch = consumer.getmany

    async def getmany(*partitions: Any, **how: Any) -> Any:
        found = await fetch(*partitions, **how)
        if found:
            begin()
        return found

    consumer.getmany = getmany
    return consumer


async def measured(options: Options, tell: Tell) -> Flat:
    """Each figure of this question."""
    told: Flat = {}
    async with filled_topic(int(EVENTS * options.seconds), tell) as (topic, place):
        tell("every event must be blocked when it comes again")
        await topic.refuses_twice()
        with Telemetry() as telemetry:
            for comparison in _comparisons(topic, telemetry):
                told |= await compared(comparison, options, tell)
            if telemetry.turns:
                telemetry.check(telemetry.turns * topic.events)
        return told | {"kafka.server": topic.server(place), "kafka.events": topic.events}


def _comparisons(topic: Topic, telemetry: Telemetry) -> list[Comparison]:
    async def with_telemetry(seconds: float) -> Measured:
        telemetry.turns += 1
        return await topic.idempotent(seconds, observer=telemetry.observer)

    noop: dict[str, Turn] = {
        "idempotent": topic.idempotent,
        "plain": topic.plain,
        "raw_loop": topic.raw_loop,
        "faststream_ack_first": partial(topic.faststream, policy=AckPolicy.ACK_FIRST),
        "faststream_ack": partial(topic.faststream, policy=AckPolicy.ACK, part=ACKED_PART),
        "with_telemetry": with_telemetry,
    }
    one_ms: dict[str, Turn] = {
        "idempotent": partial(topic.idempotent, service=ONE_MS, pause=0.001),
        "plain": partial(topic.plain, service=ONE_MS, pause=0.001),
    }
    figures = {
        "kafka_noop": ("idempotent", "plain"),
        "kafka_vs_raw_loop": ("idempotent", "raw_loop"),
        "kafka_vs_faststream": ("idempotent", "faststream_ack_first"),
        "kafka_vs_faststream_ack": ("idempotent", "faststream_ack"),
        "telemetry_on": ("with_telemetry", "idempotent"),
    }
    return [
        Comparison("kafka_noop", noop, figures),
        Comparison("kafka_1ms", one_ms, {"kafka_1ms": ("idempotent", "plain")}),
    ]


@asynccontextmanager
async def filled_topic(events: int, tell: Tell) -> AsyncIterator[tuple[Topic, RedisPlace]]:
    with TemporaryDirectory(prefix="idem-bench-kafka-") as folder:
        broker = await asyncio.to_thread(KafkaBroker, Path(folder), BROKER)
        async with running(broker), redis_place() as place:
            await broker.create_topics({Topic.name: PARTITIONS, f"{Topic.name}.dlq": 1})
            topic = Topic(broker, await place.repository(), events)
            tell(f"{events} events into {PARTITIONS} partitions")
            await topic.fill()
            yield topic, place
