"""Large scale: storms of duplicates, topics consumed again, many live keys, long backlogs.

Broker and store are in memory, except for the many live keys, which are in a real Redis.
"""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import pytest
from redis.asyncio import Redis

from integr8s_idem.config import KafkaSettings, ServiceSettings
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.events import BaseEvent, encode_event
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.records import Reserved
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker import ServiceWorker
from integr8s_idem.worker.kafka_protocols import Partition
from tests.campaigns import storm
from tests.support.fake_consumer import FakeBroker, FakeConsumer, FakeRecord
from tests.support.fake_worker import FakePublisher, RunningWorker, running
from tests.support.guarded import guarded

TOPIC = Partition("order_placed", 0)
MEGABYTE = 1024 * 1024


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"
    padding: str = ""


@pytest.mark.scenario(111)
def test_a_storm_of_triplicates_is_handled_once_each() -> None:
    figures = storm.run(0, storm.CAMPAIGN.in_test)

    assert figures["storms"] == storm.CAMPAIGN.in_test
    assert figures["duplicates"] == 2 * figures["events"]


@pytest.mark.scenario(15)
@virtual_time
async def test_a_topic_consumed_again_runs_nothing_until_the_ttl_ends() -> None:
    broker, here, runs, router = FakeBroker(), guarded(), list[str](), EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        runs.append(event.order_id)

    broker.publish(*(OrderPlaced(order_id=str(number)) for number in range(200)))

    async def consume_all() -> int:
        """Consume the topic from the beginning, as after an offset reset, and return the number of runs."""
        broker.committed.clear()
        before = len(runs)
        async with running(IdempotentEventDispatcher(router, guarded(here.store).manager), broker) as worker:
            await worker.until(lambda: broker.committed.get(TOPIC) == 200)
        return len(runs) - before

    assert await consume_all() == 200
    assert await consume_all() == 0
    await asyncio.sleep(here.manager.config.default_ttl_seconds - 60)
    assert await consume_all() == 0
    await asyncio.sleep(60)
    assert await consume_all() == 200


# Many live keys in a real Redis.


@pytest.fixture
async def manager(redis_client: Redis) -> AsyncIterator[IdempotencyManager]:
    store = RedisIdempotencyRepository(redis_client, timeout=timedelta(seconds=10))
    manager = IdempotencyManager(None, store, scope="billing")
    yield manager
    await manager.close()


async def hold(manager: IdempotencyManager, count: int) -> None:
    """Reserve `count` keys."""
    for start in range(0, count, 10_000):
        keys = [f"order:{number}" for number in range(start, min(start + 10_000, count))]
        assert all(isinstance(verdict, Reserved) for verdict in await manager.reserve_many(keys))


@pytest.mark.scenario(113)
async def test_a_hundred_thousand_keys_are_counted_and_scanned_without_blocking_others(
    manager: IdempotencyManager,
) -> None:
    many, pauses, done = 100_000, list[float](), asyncio.Event()
    await hold(manager, many)

    async def others() -> None:
        while not done.is_set():
            began = time.perf_counter()
            await manager.run(f"other:{len(pauses)}", _nothing)
            pauses.append(time.perf_counter() - began)

    background = asyncio.create_task(others())
    active = await manager.count_active()
    found = {record.key async for record in manager.repository.scan(manager.space.root)}
    done.set()
    await background

    # The concurrent work may be counted too.
    assert 0 <= active - many <= 1
    assert 0 <= len(found) - many <= len(pauses)
    assert len(pauses) > 100
    assert sorted(pauses)[int(len(pauses) * 0.99)] < 0.5


@pytest.mark.scenario(113)
async def test_a_scan_keeps_only_one_page_in_memory(manager: IdempotencyManager) -> None:
    await hold(manager, 5_000)

    tracemalloc.start()
    try:
        seen = [1 async for _ in manager.repository.scan(manager.space.root)]
        assert await manager.count_active() == 5_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(seen) >= 5_000
    assert peak < MEGABYTE


async def _nothing() -> None: ...


# Handlers that are slower than their topic.


class EndlessConsumer(FakeConsumer):
    """The only member of a group, with a partition of ten million messages that are generated when they are fetched."""

    LENGTH = 10_000_000

    def __init__(self, broker: FakeBroker, size: int) -> None:
        super().__init__(broker)
        self._padding = "x" * size

    async def start(self) -> None:
        await self.give({TOPIC})

    async def getmany(self, *partitions: Any, timeout_ms: int, max_records: int) -> Mapping[Any, Sequence[Any]]:
        if TOPIC in self.paused:
            await asyncio.sleep(timeout_ms / 1000)
            return {}
        await asyncio.sleep(0)
        first = self._positions[TOPIC]
        # One fetch is about a megabyte, as limited by max_partition_fetch_bytes.
        end = first + max(1, min(max_records, MEGABYTE // len(self._padding)))
        self._positions[TOPIC] = end
        return {TOPIC: [self._message(offset) for offset in range(first, end)]}

    def _message(self, offset: int) -> FakeRecord:
        event = OrderPlaced(order_id=str(offset), padding=self._padding)
        return FakeRecord(TOPIC.topic, TOPIC.partition, offset, None, encode_event(event))

    def highwater(self, partition: Any) -> int | None:
        return self.LENGTH


async def peak_of(router: EventRouter, size: int, until: Callable[[ServiceWorker], bool], **service: Any) -> int:
    """Return the peak memory in bytes of a worker on the endless topic, until a condition holds."""
    broker = FakeBroker()
    consumer = EndlessConsumer(broker, size)
    worker = ServiceWorker(
        "billing",
        EventDispatcher(router),
        FakePublisher(broker),
        KafkaSettings(),
        ServiceSettings(**service),
        consumer=lambda settings, group: consumer,
    )
    tracemalloc.start()
    try:
        running_worker = RunningWorker(worker, broker, consumer)
        await running_worker.until(lambda: until(worker), 1e9)
        assert worker.report().lag > 9_900_000
        worker.stop()
        await running_worker.task
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.scenario(114)
@virtual_time
async def test_a_slow_handler_keeps_a_bounded_number_of_messages_in_memory() -> None:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def slow(event: OrderPlaced) -> None:
        await asyncio.sleep(1)

    peak = await peak_of(
        router, 1_000, lambda worker: worker.report().tally.handled >= 2_000, ordering="none", max_in_flight=1_000
    )

    assert peak < 16 * MEGABYTE


@pytest.mark.scenario(114)
@virtual_time
async def test_large_messages_in_memory_are_bounded_by_their_size() -> None:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def slow(event: OrderPlaced) -> None:
        await asyncio.sleep(1)

    peak = await peak_of(
        router, 100_000, lambda worker: worker.report().tally.handled >= 150, max_in_flight_bytes=4 * MEGABYTE
    )

    assert peak < 8 * MEGABYTE


@pytest.mark.scenario(114)
@virtual_time
async def test_a_stuck_message_does_not_let_its_partition_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router, most = EventRouter(), 2_000
    monkeypatch.setattr("integr8s_idem.worker.backpressure.MOST_UNCOMMITTED", most)

    @router.on(OrderPlaced)
    async def stuck_at_the_first(event: OrderPlaced) -> None:
        if event.order_id == "0":
            await asyncio.sleep(1e8)

    def is_paused(worker: ServiceWorker) -> bool:
        return worker.report().tally.handled >= most - 1 and worker.report().in_flight == 1

    peak = await peak_of(router, 1_000, is_paused, ordering="none", drain_timeout_seconds=0.1)

    assert peak < 8 * MEGABYTE
