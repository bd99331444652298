"""Consumer lag with Kafka transactions: markers and aborted messages do not count as pending work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import confluent_kafka
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition

from integr8s_idem import EventRouter
from integr8s_idem.events import encode_event
from integr8s_idem.telemetry import Gauge
from tests.integration.test_worker_redelivery import charging
from tests.support.conditions import eventually
from tests.support.counting import CountingObserver
from tests.support.kafka import Kafka
from tests.support.workers import OrderPlaced, Shop, WorkerInTest, open_shop

pytestmark = pytest.mark.kafka

WITHIN = 30.0
"""Timeout in seconds."""


class TransactionalProducer:
    """librdkafka's producer, used from the test's event loop."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "transactional.id": name, "transaction.timeout.ms": 60_000}
        )

    async def start(self) -> None:
        await asyncio.to_thread(self._producer.init_transactions, 30)

    async def begin(self, topic: str, numbers: range, partition: int = 0) -> None:
        """Open a transaction and send these orders to the broker."""
        self._producer.begin_transaction()
        for number in numbers:
            order = OrderPlaced(order_id=str(number))
            self._producer.produce(topic, encode_event(order), partition=partition)
        assert await asyncio.to_thread(self._producer.flush, 30) == 0

    async def commit(self) -> None:
        await asyncio.to_thread(self._producer.commit_transaction, 30)

    async def abort(self) -> None:
        await asyncio.to_thread(self._producer.abort_transaction, 30)


@pytest.fixture
async def shop(kafka: Kafka, topic_prefix: str, redis_url: str) -> AsyncIterator[Shop]:
    async with open_shop(kafka, topic_prefix, redis_url, partitions=2) as shop:
        yield shop


@pytest.fixture
async def producer(kafka: Kafka, topic_prefix: str) -> TransactionalProducer:
    made = TransactionalProducer(kafka.bootstrap, topic_prefix)
    await made.start()
    return made


class Lag:
    """The lag reported by a worker's metric and by Kafka."""

    def __init__(self, shop: Shop, running: WorkerInTest) -> None:
        self._shop = shop
        self._running = running
        self._observer = running.worker.observer = CountingObserver()

    @property
    def metric(self) -> float | None:
        return self._observer.gauges.get(Gauge.CONSUMER_LAG)

    async def by_kafka(self, partition: int = 0) -> tuple[int | None, int]:
        """Return the group's committed offset or `None`, and the end of the partition including markers."""
        return await asyncio.to_thread(self._by_kafka, partition)

    def _by_kafka(self, partition: int) -> tuple[int | None, int]:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._shop.kafka.bootstrap,
                "group.id": self._shop.settings.topic_prefix + self._shop.group,
                "isolation.level": "read_uncommitted",
            }
        )
        at = confluent_kafka.TopicPartition(self._shop.topic, partition)
        try:
            [found] = consumer.committed([at], timeout=10)
            _, end = consumer.get_watermark_offsets(at, timeout=10)
        finally:
            consumer.close()
        return (found.offset if found.offset >= 0 else None), end

    async def is_zero(self, end: int, partition: int = 0, within: float = WITHIN) -> None:
        """Return once metric and broker agree that nothing is left before `end`."""
        give_up_at = time.monotonic() + within
        while (offsets := await self.by_kafka(partition)) != (end, end):  # the broker sends no notification
            if time.monotonic() > give_up_at:
                break
            await asyncio.sleep(0.1)
        assert offsets == (end, end), self._running.worker.report()
        await eventually(lambda: self.metric == 0, within=10, state=lambda: self.metric)
        assert self._running.worker.report().lag == 0


async def test_lag_is_zero_after_the_marker_of_a_committed_transaction(
    shop: Shop, producer: TransactionalProducer
) -> None:
    worker = await shop.worker(charging(shop))
    lag = Lag(shop, worker)

    await producer.begin(shop.topic, range(10))
    await producer.commit()

    await lag.is_zero(11)
    assert sorted(shop.charged) == [str(number) for number in range(10)]


async def test_lag_is_zero_after_ten_handled_and_ten_aborted_messages(
    shop: Shop, producer: TransactionalProducer
) -> None:
    worker = await shop.worker(charging(shop))
    lag = Lag(shop, worker)

    await producer.begin(shop.topic, range(10))
    await producer.commit()
    await producer.begin(shop.topic, range(10, 20))
    await producer.abort()

    await lag.is_zero(22)
    assert sorted(shop.charged) == [str(number) for number in range(10)]


async def test_lag_is_zero_in_a_partition_with_only_aborted_messages(
    shop: Shop, producer: TransactionalProducer
) -> None:
    await producer.begin(shop.topic, range(5), partition=1)
    await producer.abort()

    worker = await shop.worker(charging(shop))

    await Lag(shop, worker).is_zero(6, partition=1)
    assert not shop.charged


async def test_a_new_worker_commits_a_marker_left_by_the_previous_one(
    shop: Shop, producer: TransactionalProducer
) -> None:
    await producer.begin(shop.topic, range(3))
    await producer.commit()
    at, group = TopicPartition(shop.topic, 0), shop.settings.topic_prefix + shop.group
    consumer: Any = AIOKafkaConsumer(bootstrap_servers=shop.kafka.bootstrap, group_id=group, enable_auto_commit=False)
    async with consumer:
        consumer.assign([at])
        await consumer.commit({at: 3})

    worker = await shop.worker(charging(shop))

    await Lag(shop, worker).is_zero(4)
    assert not shop.charged


async def test_the_offset_does_not_pass_a_running_handler_when_later_messages_are_aborted(
    shop: Shop, producer: TransactionalProducer
) -> None:
    may_end, router = asyncio.Event(), EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        await may_end.wait()
        shop.charged.append(event.order_id)

    worker = await shop.worker(router)
    lag = Lag(shop, worker)
    await producer.begin(shop.topic, range(1))
    await producer.commit()
    await producer.begin(shop.topic, range(1, 10))
    await producer.abort()
    await eventually(lambda: worker.worker.report().in_flight)
    await eventually(lambda: lag.metric, state=lambda: lag.metric)

    await asyncio.sleep(1.0)  # ten commit intervals, five polls
    committed, end = await lag.by_kafka()
    assert (committed or 0, end) == (0, 12)
    may_end.set()

    await lag.is_zero(12)
    assert shop.charged == ["0"]


async def test_the_offset_does_not_pass_an_open_transaction(shop: Shop, producer: TransactionalProducer) -> None:
    worker = await shop.worker(charging(shop))
    lag = Lag(shop, worker)
    await shop.deliver(OrderPlaced(order_id="before"))
    await producer.begin(shop.topic, range(3))
    await shop.deliver(OrderPlaced(order_id="after"))

    await eventually(lambda: shop.charged)
    await asyncio.sleep(1.0)
    assert await lag.by_kafka() == (1, 5)
    assert shop.charged == ["before"]
    await producer.commit()

    await lag.is_zero(6)
    assert shop.charged == ["before", "0", "1", "2", "after"]


async def test_no_event_is_lost_when_workers_restart_between_transactions(
    shop: Shop, producer: TransactionalProducer
) -> None:
    numbers: Iterator[int] = iter(range(0, 1_000, 5))
    published: list[str] = []

    async def transact(end: Callable[[], Any]) -> None:
        begin = next(numbers)
        await producer.begin(shop.topic, range(begin, begin + 5))
        await end()
        if end == producer.commit:
            published.extend(str(number) for number in range(begin, begin + 5))

    for _ in range(4):
        worker = await shop.worker(charging(shop))
        for _ in range(3):
            await transact(producer.commit)
            await transact(producer.abort)
        await worker.stop()
    worker = await shop.worker(charging(shop))

    await Lag(shop, worker).is_zero(4 * 3 * 12)
    assert sorted(shop.charged) == sorted(published)
