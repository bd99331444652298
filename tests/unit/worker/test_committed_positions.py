"""Commits of offsets after the last message: transaction markers and aborted messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
from aiokafka.errors import KafkaError, RecordTooLargeError

from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeBroker, FakeConsumer, FakeRecord
from tests.support.fake_worker import RunningWorker, running

TOPIC = Partition("order_placed", 0)
OTHER = Partition("order_placed", 1)
LONG = 20.0
"""Seconds of many polls and commits."""


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = ""


class Shop:
    """Handlers that wait until they may end."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.started: list[str] = []
        self.ended: list[str] = []

    async def charge(self, event: OrderPlaced) -> None:
        self.started.append(event.order_id)
        await self.may_end.wait()
        self.ended.append(event.order_id)

    @property
    def dispatcher(self) -> EventDispatcher:
        router = EventRouter()
        router.on(OrderPlaced, name="charge")(self.charge)
        return EventDispatcher(router)


def order(number: int) -> OrderPlaced:
    return OrderPlaced(order_id=str(number))


def lag(worker: RunningWorker) -> int:
    return worker.worker.report().lag


@virtual_time
async def test_markers_after_the_last_message_are_committed() -> None:
    broker, shop = FakeBroker(), Shop()
    broker.publish(order(0))
    broker.mark("order_placed")
    async with running(shop.dispatcher, broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 2, LONG)
        broker.mark("order_placed", 11)
        await worker.until(lambda: broker.committed.get(TOPIC) == 13, LONG)
        assert lag(worker) == 0
        broker.publish(order(1))
        await worker.until(lambda: broker.committed.get(TOPIC) == 14, LONG)

    assert shop.ended == ["0", "1"]


@virtual_time
async def test_a_partition_with_only_markers_is_committed_and_an_idle_one_is_not_committed_again() -> None:
    broker, shop = FakeBroker(), Shop()
    broker.mark("order_placed", 3)
    broker.mark("order_placed", 2, partition=1)
    broker.committed[OTHER] = 2
    async with running(shop.dispatcher, broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 3, LONG)
        await asyncio.sleep(LONG)
        assert lag(worker) == 0

    assert broker.commits == [{TOPIC: 3}]


@virtual_time
async def test_markers_are_not_committed_before_handlers_of_earlier_messages_have_ended() -> None:
    broker, shop = FakeBroker(), Shop()
    shop.may_end.clear()
    broker.publish(order(0))
    broker.mark("order_placed", 5)
    async with running(shop.dispatcher, broker, drain_timeout_seconds=5.0) as worker:
        await worker.until(lambda: shop.started == ["0"], LONG)
        await asyncio.sleep(LONG)
        assert broker.committed == {}
        shop.may_end.set()
        await worker.until(lambda: broker.committed.get(TOPIC) == 6, LONG)


@virtual_time
async def test_a_partition_assigned_during_a_poll_is_committed_up_to_its_markers() -> None:
    broker, shop = FakeBroker(), Shop()
    broker.publish(order(0))
    async with running(shop.dispatcher, broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1, LONG)
        broker.committed[OTHER] = 2
        broker.mark("order_placed", 3, partition=1)
        # The current poll passes the marker before the start of the partition was read.
        await worker.consumer.give([OTHER])
        broker.arrived.set()
        await worker.until(lambda: broker.committed.get(OTHER) == 3, LONG)
        assert lag(worker) == 0


@virtual_time
async def test_messages_dropped_while_a_worker_drains_are_not_committed() -> None:
    broker, shop = FakeBroker(), Shop()
    shop.may_end.clear()
    broker.publish(order(0))
    async with running(shop.dispatcher, broker, drain_timeout_seconds=60.0) as worker:
        await worker.until(lambda: shop.started == ["0"], LONG)
        worker.worker.stop()
        await asyncio.sleep(1)
        broker.publish(order(1))
        broker.mark("order_placed", 4)
        await asyncio.sleep(LONG)
        shop.may_end.set()

    assert shop.started == ["0"]
    assert broker.committed == {TOPIC: 1}


class SlowConsumer(FakeConsumer):
    """A consumer whose polls move positions some time before they return."""

    async def getmany(self, *partitions: Any, timeout_ms: int, max_records: int) -> Mapping[Any, Sequence[Any]]:
        batches = await super().getmany(*partitions, timeout_ms=timeout_ms, max_records=max_records)
        if batches:
            await asyncio.sleep(LONG)
        return batches


@virtual_time
async def test_a_position_that_moved_during_a_poll_is_not_committed_before_its_messages_are_registered(
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr("tests.support.fake_worker.FakeConsumer", SlowConsumer)
    broker, shop = FakeBroker(), Shop()
    broker.mark("order_placed")
    async with running(shop.dispatcher, broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1, LONG)
        shop.may_end.clear()
        broker.publish(order(0))
        await asyncio.sleep(1)
        assert await worker.consumer.position(TOPIC) == 2
        await asyncio.sleep(LONG / 2)
        assert (shop.started, broker.committed) == ([], {TOPIC: 1})
        await worker.until(lambda: shop.started == ["0"], LONG)
        await asyncio.sleep(LONG)
        assert broker.committed == {TOPIC: 1}
        shop.may_end.set()
        await worker.until(lambda: broker.committed.get(TOPIC) == 2, LONG)


@virtual_time
async def test_a_poll_that_fails_after_it_moved_positions_loses_nothing() -> None:
    broker, shop = FakeBroker(), Shop()
    broker.mark("order_placed", 2)
    broker.mark("order_placed", 2, partition=1)
    async with running(shop.dispatcher, broker) as worker:
        await worker.until(lambda: broker.committed == {TOPIC: 2, OTHER: 2}, LONG)
        # Like in aiokafka, a poll that reaches the damage has already moved the positions of earlier partitions.
        broker.damaged[OTHER] = 2
        for number in range(3):
            broker.publish(order(number))
            broker.mark("order_placed")
            await worker.until(lambda number=number: str(number) in shop.ended, 120)  # type: ignore[misc]
        await worker.until(lambda: broker.committed.get(TOPIC) == 8, LONG)
        assert broker.committed[OTHER] == 2


class SkippingConsumer(FakeConsumer):
    """Skips a batch with a damaged length and raises the error in a later poll, like aiokafka."""

    broken: Partition | None = None

    def break_next(self, partition: Partition) -> None:
        self.broken = partition
        self._positions[partition] += 1

    async def getmany(self, *partitions: Any, timeout_ms: int, max_records: int) -> Mapping[Any, Sequence[Any]]:
        if timeout_ms:
            await asyncio.sleep(0.05)
        return await super().getmany(*partitions, timeout_ms=timeout_ms, max_records=max_records)

    def _fetch(self, only: Sequence[Partition], max_records: int) -> dict[Partition, list[FakeRecord]]:
        if self.broken is None or (only and self.broken not in only):
            return super()._fetch(only, max_records)
        others = [each for each in self._positions if each != self.broken and each in (only or [each])]
        if batches := super()._fetch(others, 1) if others else {}:
            return batches  # the error is raised by a poll that has nothing to return
        self.broken = None
        raise RecordTooLargeError


@virtual_time
async def test_a_position_moved_by_a_damaged_fetch_is_not_committed(monkeypatch: Any) -> None:
    monkeypatch.setattr("tests.support.fake_worker.FakeConsumer", SkippingConsumer)
    broker, shop = FakeBroker(), Shop()
    broker.publish(order(0))
    broker.publish(order(100), partition=1)
    async with running(shop.dispatcher, broker) as worker:
        await worker.until(lambda: broker.committed == {TOPIC: 1, OTHER: 1}, LONG)
        client = worker.consumer
        assert isinstance(client, SkippingConsumer)
        # For five seconds, each poll returns messages of another partition and does not raise the error.
        for number in range(1, 100):
            broker.publish(order(number))
        client.break_next(OTHER)
        broker.publish(order(101), partition=1)
        await worker.until(lambda: broker.committed == {TOPIC: 100, OTHER: 2}, 3 * LONG)

    assert sorted(shop.ended, key=int) == [str(number) for number in range(102)]


class UnknownPositions(FakeConsumer):
    """A consumer whose `position` blocks or raises after the first two calls."""

    asked = 0

    async def position(self, partition: Any) -> int:
        self.asked += 1
        if self.asked > 2:
            if self.asked % 2:
                raise KafkaError("unknown position")
            await asyncio.get_running_loop().create_future()
        return await super().position(partition)


@virtual_time
async def test_an_unknown_position_does_not_block_polling(monkeypatch: Any) -> None:
    monkeypatch.setattr("tests.support.fake_worker.FakeConsumer", UnknownPositions)
    broker, shop = FakeBroker(), Shop()
    broker.mark("order_placed", 0)
    async with running(shop.dispatcher, broker) as worker:
        for number in range(20):
            broker.publish(order(number))
            await worker.until(lambda number=number: len(shop.ended) == number + 1, 1)  # type: ignore[misc]
        await worker.until(lambda: broker.committed.get(TOPIC) == 20, LONG)


@pytest.mark.parametrize("ordering", ["partition", "none"])
@virtual_time
async def test_polls_that_follow_markers_do_not_exceed_the_limit(ordering: str) -> None:
    broker, shop = FakeBroker(), Shop()
    shop.may_end.clear()
    for partition in range(8):
        broker.mark("order_placed", partition=partition)

    async with running(shop.dispatcher, broker, ordering=ordering, max_in_flight=3) as worker:
        await asyncio.sleep(1.197)
        broker.publish(order(0), order(1))
        for partition in range(1, 8):
            broker.mark("order_placed", partition=partition)
        await asyncio.sleep(0.002)  # in the pause after that poll, before positions are read
        for partition in range(1, 8):
            broker.publish(order(2), partition=partition)
        await asyncio.sleep(1)
        assert worker.worker._backpressure.in_flight == 3

        shop.may_end.set()
        await worker.until(lambda: len(shop.ended) == 9, LONG)
