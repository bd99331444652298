"""Partitions whose deliveries wait for each other are fetched evenly, so that many are handled concurrently."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from integr8s_idem.records import Completion
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.assignments import Assignment
from integr8s_idem.worker.backpressure import Backpressure
from integr8s_idem.worker.kafka_protocols import Partition
from integr8s_idem.worker.lanes import Ordering
from tests.support.counting import CountingStore
from tests.support.deliveries import assignment
from tests.support.fake_consumer import FakeBroker, FakeConsumer
from tests.support.fake_worker import running
from tests.support.guarded import guarded
from tests.support.pipelines import (
    TOPIC,
    Depot,
    ParcelSent,
    all_committed,
    dispatcher_of,
    parcels,
    sent,
    turns,
    unfinished,
)


def with_unfinished(*numbers: int) -> dict[Partition, Assignment]:
    """Return an assignment for each number, with as many unfinished deliveries."""
    found = {}
    for partition, number in enumerate(numbers):
        each = assignment(partition=partition)
        for offset in range(number):
            each.progress.deliver(offset)
        found[each.partition] = each
    return found


@virtual_time
@pytest.mark.parametrize(
    ("unfinished", "groups"),
    [
        ((0, 0, 0, 0), [((0, 1, 2, 3), 25), ((0, 1, 2, 3), 25)]),
        ((25, 0, 12, 3), [((1, 3), 22), ((1, 2, 3), 13)]),
        ((25, 24, 13, 90), [((1, 2), 1)]),
        ((25, 25, 40, 99), []),
    ],
)
async def test_partitions_below_half_their_share_come_first(
    unfinished: Sequence[int], groups: list[tuple[tuple[int, ...], int]]
) -> None:
    assignments = with_unfinished(*unfinished)

    found = Backpressure(100, 10**9).neediest(assignments)

    assert [(tuple(each.partition for each in group), most) for group, most in found] == groups


@virtual_time
async def test_more_partitions_than_deliveries_have_a_share_of_one() -> None:
    assignments = with_unfinished(0, 1, 0)

    [(partitions, most)] = Backpressure(2, 10**9).neediest(assignments)

    assert ([each.partition for each in partitions], most) == ([0, 2], 1)


@virtual_time
async def test_each_partition_of_an_ordered_service_has_its_share_in_flight() -> None:
    depot, broker = Depot(seconds=3600), sent(4_000, partitions=4)

    async with running(dispatcher_of(depot.handle), broker, max_in_flight=40, ordering="partition") as worker:
        await worker.until(lambda: worker.worker._backpressure.in_flight == 40)
        held = Counter(each.progress.unfinished for each in worker.worker._partitions.assignments.values())

    assert held == {10: 4}


@virtual_time
async def test_a_partition_gets_the_room_that_is_not_kept_for_others_if_the_others_have_no_messages() -> None:
    depot, broker = Depot(seconds=3600), sent(4_000, partitions=1)
    for partition in range(1, 8):
        broker.logs[Partition(TOPIC.topic, partition)] = []

    async with running(dispatcher_of(depot.handle), broker, max_in_flight=40, ordering="partition") as worker:
        await worker.until(lambda: worker.worker._backpressure.full)

        # Of a quarter of the 40, one eighth for each of the other seven.
        assert worker.worker._partitions.assignments[TOPIC].progress.unfinished == 40 - 7


@virtual_time
@pytest.mark.parametrize("stuck", [1, 3])
@pytest.mark.parametrize("ordering", ["partition", "key"])
async def test_partitions_are_handled_although_others_are_stuck(ordering: Ordering, stuck: int) -> None:
    gates = {number: asyncio.Event() for number in range(stuck)}
    depot, broker = Depot(held=gates), FakeBroker()
    for each in parcels(400):
        broker.publish(each, partition=each.number % stuck)
    quiet = [Partition(TOPIC.topic, partition) for partition in range(stuck, 4)]
    for partition in quiet:
        broker.logs[partition] = []

    async with running(dispatcher_of(depot.handle, guarded()), broker, max_in_flight=40, ordering=ordering) as worker:
        await worker.until(lambda: worker.worker._backpressure.full)
        for each in parcels(1_000)[400:]:
            broker.publish(each, partition=stuck + each.number % len(quiet))
        await worker.until(lambda: len(depot.done) == 600, seconds=60)
        assert worker.worker._backpressure.in_flight <= 40
        assert sorted(depot.done) == list(range(400, 1_000))

        for gate in gates.values():
            gate.set()
        await worker.until(lambda: all_committed(worker), seconds=60)
        assert unfinished(worker.worker) == {}


@virtual_time
async def test_at_the_limit_only_partitions_below_what_is_kept_for_them_are_fetched() -> None:
    assignments, consumer = with_unfinished(60, 28, 4, 0), FakeConsumer(FakeBroker())
    for each in assignments:
        consumer.seek(each, 0)
    backpressure = Backpressure(100, 10**9, is_ordered=True)
    backpressure.in_flight = 92

    backpressure.apply(consumer, assignments, hold=False)

    assert [each.partition for each in assignments if each not in consumer.paused] == [2, 3]
    found = [([each.partition for each in group], most) for group, most in backpressure.neediest(assignments)]
    assert found == [([3], 6), ([2, 3], 2)]


@virtual_time
async def test_at_the_limit_a_busy_partition_does_not_hold_up_the_others() -> None:
    gate = asyncio.Event()
    depot, broker = Depot(seconds=0.0001, held={0: gate}), FakeBroker()
    broker.publish(*parcels(200))
    for partition in (1, 2):
        broker.logs[Partition(TOPIC.topic, partition)] = []

    async with running(dispatcher_of(depot.handle), broker, max_in_flight=120) as worker:
        await worker.until(lambda: worker.worker._backpressure.full)
        broker.publish(*parcels(2_200)[200:], partition=1)
        broker.publish(*parcels(2_202)[2_200:], partition=2)
        await worker.until(lambda: {2_200, 2_201} <= set(depot.done), seconds=0.2)
        assert len(depot.done) < 2_000

        gate.set()
        await worker.until(lambda: all_committed(worker), seconds=60)
        assert unfinished(worker.worker) == {}


@virtual_time
@pytest.mark.parametrize("ordering", ["partition", "key", "none"])
async def test_a_single_partition_is_fetched_as_soon_as_there_is_room(ordering: Ordering) -> None:
    depot, broker, loop = Depot(seconds=0.001), sent(1_000), asyncio.get_running_loop()

    options: dict[str, Any] = {"ordering": ordering, "max_in_flight": 100, "concurrency": 1}
    async with running(dispatcher_of(depot.handle), broker, **options) as worker:
        await worker.until(lambda: len(depot.done) == 1_000)

    assert loop.time() < 1_000 * 0.001 + 0.2


@virtual_time
async def test_deliveries_that_wait_for_handlers_of_a_revoked_partition_count_against_the_limit() -> None:
    gates = {number: asyncio.Event() for number in (0, 300)}
    depot, broker, in_flight = Depot(held=gates), sent(300), list[int]()
    other = Partition(TOPIC.topic, 1)
    broker.logs[other] = []

    options: dict[str, Any] = {"max_in_flight": 160, "drain_timeout_seconds": 1}
    async with running(dispatcher_of(depot.handle, guarded()), broker, **options) as worker:
        await worker.until(lambda: worker.worker._backpressure.full)
        await worker.consumer.take([TOPIC, other])
        broker.publish(*parcels(600)[301:], partition=1)
        broker.publish(parcels(301)[300], partition=1)
        await worker.consumer.give([TOPIC, other])
        for _ in range(1_000):
            in_flight.append(worker.worker._backpressure.in_flight)
            await asyncio.sleep(0.01)
        assert set(range(301, 600)) <= set(depot.done)

        for gate in gates.values():
            gate.set()
        await worker.until(lambda: all_committed(worker), seconds=60)
        assert unfinished(worker.worker) == {}
    assert max(in_flight) <= 160


class RecordingStore(CountingStore):
    """Also records the sizes of `complete` requests, each of which takes a few iterations of the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.completed: list[int] = []

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        self.completed.append(len(completions))
        await turns(5)
        return await super().complete(completions)


@virtual_time
async def test_outcomes_of_lanes_that_are_out_of_step_join_the_same_requests() -> None:
    store, handled, broker = RecordingStore(), list[Any](), sent(800, partitions=8)

    async def handle(event: ParcelSent) -> None:
        if event.number < 4:
            await turns(3)  # the first events of half of the partitions
        handled.append(event.number)

    async with running(dispatcher_of(handle, guarded(store)), broker, ordering="partition") as worker:
        await worker.until(lambda: all_committed(worker))

    assert sorted(handled) == list(range(800))
    assert sum(store.completed) == 800
    assert len(store.completed) <= 150


def counted_polls(consumer: FakeConsumer) -> Callable[[], int]:
    """Let polls take 0.2 ms, and count those that return messages; return a function that returns the number."""
    sizes, getmany = list[int](), consumer.getmany

    async def counting(*partitions: Any, **options: Any) -> Mapping[Any, Sequence[Any]]:
        await asyncio.sleep(0.0002)
        found = await getmany(*partitions, **options)
        sizes.append(sum(map(len, found.values())))
        return found

    consumer.getmany = counting  # type: ignore[method-assign]
    return lambda: len([size for size in sizes if size])


@virtual_time
async def test_a_partition_without_messages_does_not_cause_a_poll_for_each_message_of_the_others() -> None:
    depot, broker = Depot(seconds=0.0001), sent(3_000, partitions=3)
    broker.logs[Partition(TOPIC.topic, 3)] = []

    async with running(dispatcher_of(depot.handle), broker, max_in_flight=400, ordering="partition") as worker:
        polls = counted_polls(worker.consumer)
        await worker.until(lambda: len(depot.done) == 3_000, seconds=60)

    assert depot.max_concurrency == 3
    assert polls() < 3_000 / 20
