"""Workers in the process of the test, on real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiokafka import AIOKafkaConsumer, TopicPartition

from integr8s_idem import (
    BaseEvent,
    EventDispatcher,
    EventPublisher,
    EventRouter,
    IdempotencyConfig,
    IdempotencyManager,
    IdempotentEventDispatcher,
)
from integr8s_idem.config import KafkaSettings, RedisStoreSettings, ServiceSettings
from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_client
from integr8s_idem.telemetry import SILENT, Observer
from integr8s_idem.worker import ServiceWorker
from tests.support.conditions import eventually
from tests.support.kafka.broker import Kafka
from tests.support.replays import SIGNED


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str


QUICK = ServiceSettings(
    retry_initial_seconds=0.05, retry_max_seconds=0.2, commit_interval_seconds=0.1, drain_timeout_seconds=5
)
"""Settings with short intervals, so that tests do not have to wait."""


def kafka_settings(kafka: Kafka, prefix: str, **changes: Any) -> KafkaSettings:
    """Return Kafka settings with short sessions and a topic prefix."""
    settings = {
        "bootstrap_servers": kafka.bootstrap,
        "topic_prefix": prefix,
        "session_timeout_seconds": 6,
        "heartbeat_interval_seconds": 0.5,
        "rebalance_timeout_seconds": 10,
        "metadata_max_age_seconds": 1,
    }
    return KafkaSettings.model_validate({**settings, **changes})


@dataclass
class Shop:
    """A topic of orders, workers that handle them, and their effects."""

    kafka: Kafka
    settings: KafkaSettings
    redis_url: str
    publisher: EventPublisher
    stack: AsyncExitStack
    group: str = "billing"
    lease: float = 5.0
    observer: Observer = SILENT
    """Of its workers and their managers and publishers."""
    charged: list[str] = field(default_factory=list)
    """Order ids in the order in which handlers finished."""

    @property
    def topic(self) -> str:
        return self.publisher.topic_of("order_placed")

    async def worker(
        self,
        router: EventRouter,
        *,
        service: ServiceSettings = QUICK,
        kafka: KafkaSettings | None = None,
        guarded: bool = True,
        list_topics: Any = None,
        **config: Any,
    ) -> WorkerInTest:
        """Start a worker and wait until it has joined its group."""
        settings = kafka or self.settings
        manager = self.manager(**config)
        publisher = EventPublisher(settings, self.observer)
        dispatcher: EventDispatcher
        if guarded:
            dispatcher = IdempotentEventDispatcher(router, manager, publisher=publisher)
        else:
            dispatcher = EventDispatcher(router, scope=self.group, publisher=publisher, observer=self.observer)
        worker = ServiceWorker(
            "billing",
            dispatcher,
            publisher,
            settings,
            service,
            group=self.settings.topic_prefix + self.group,
            replay=SIGNED.replay,
            list_topics=list_topics,
        )
        running = WorkerInTest(worker, manager, publisher, asyncio.create_task(worker.run()))
        self.stack.push_async_callback(running.stop)
        await eventually(lambda: worker.health().ready or running.task.done(), state=worker.health)
        return running

    def manager(self, **config: Any) -> IdempotencyManager:
        """Create a manager with the Redis of the shop."""
        client = redis_client(RedisStoreSettings(url=self.redis_url))
        self.stack.push_async_callback(client.aclose)
        settings = IdempotencyConfig.model_validate({"processing_timeout_seconds": self.lease, **config})
        return IdempotencyManager(settings, RedisIdempotencyRepository(client), self.observer, scope="billing")

    def publisher_of_workers(self) -> EventPublisher:
        """Return a publisher with the observer of the workers; the caller closes it."""
        return EventPublisher(self.settings, self.observer)

    async def deliver(self, event: BaseEvent, *, partition: int = 0) -> None:
        """Send a copy of `event` to a partition, like a producer's retry or a replay."""
        async with _producer(self.settings) as producer:
            await producer.send_and_wait(
                self.topic, encode_event(event), headers=event_headers(event), partition=partition
            )

    async def committed(self, partition: int = 0) -> int | None:
        """Return the committed offset of the group."""
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.kafka.bootstrap, group_id=self.settings.topic_prefix + self.group
        )
        await consumer.start()
        try:
            offset: int | None = await consumer.committed(TopicPartition(self.topic, partition))
            return offset
        finally:
            await consumer.stop()

    async def messages(self, topic: str, count: int) -> list[Any]:
        """Return the first `count` messages of a topic."""
        consumer = AIOKafkaConsumer(
            topic, bootstrap_servers=self.kafka.bootstrap, auto_offset_reset="earliest", enable_auto_commit=False
        )
        await consumer.start()
        try:
            async with asyncio.timeout(30):
                return [await consumer.getone() for _ in range(count)]
        finally:
            await consumer.stop()


@dataclass
class WorkerInTest:
    """A running worker."""

    worker: ServiceWorker
    manager: IdempotencyManager
    publisher: EventPublisher
    task: asyncio.Task[None]

    @property
    def tally(self) -> Any:
        return self.worker.report().tally

    async def stop(self) -> None:
        """Drain the worker and check that it ended without an error."""
        self.worker.stop()
        try:
            await asyncio.wait_for(self.task, 30)
        finally:
            await self.manager.close()
            await self.publisher.close()

    async def idle(self, settled: int) -> None:
        """Return once `settled` deliveries are settled and everything is committed."""

        def done() -> bool:
            report = self.worker.report()
            tally = report.tally
            ended = tally.handled + tally.duplicates + tally.dead_letters + tally.discarded
            return ended >= settled and report.in_flight == 0 and report.lag == 0

        await eventually(done, state=self.worker.report)


@asynccontextmanager
async def open_shop(kafka: Kafka, prefix: str, redis_url: str, *, partitions: int = 1) -> AsyncIterator[Shop]:
    """Open a shop, and stop its workers at the end."""
    settings = kafka_settings(kafka, prefix)
    await kafka.create_topics({f"{prefix}order_placed": partitions, f"{prefix}order_placed.dlq": 1})
    async with AsyncExitStack() as stack:
        publisher = EventPublisher(settings)
        stack.push_async_callback(publisher.close)
        yield Shop(kafka, settings, redis_url, publisher, stack)


@asynccontextmanager
async def _producer(settings: KafkaSettings) -> AsyncIterator[Any]:
    from aiokafka import AIOKafkaProducer

    producer = AIOKafkaProducer(bootstrap_servers=settings.bootstrap_servers, acks="all")
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


def orders(count: int) -> list[OrderPlaced]:
    """Create `count` numbered orders."""
    return [OrderPlaced(order_id=str(number), aggregate_id=str(number)) for number in range(count)]


def header(record: Any, name: str) -> str:
    """Return a dead-letter header of a record."""
    found: Sequence[bytes] = [value for key, value in record.headers if key == f"idempotency-dlq-{name}"]
    return found[-1].decode() if found else ""
