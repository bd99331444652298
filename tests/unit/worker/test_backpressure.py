"""Backpressure: which partitions are paused."""

from __future__ import annotations

import pytest

from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.assignments import Assignment
from integr8s_idem.worker.backpressure import MOST_UNCOMMITTED, Backpressure
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.deliveries import assignment, delivery
from tests.support.fake_consumer import FakeBroker, FakeConsumer


def consumer_of(*assignments: Assignment) -> tuple[FakeConsumer, dict[Partition, Assignment]]:
    consumer = FakeConsumer(FakeBroker())
    for each in assignments:
        consumer.seek(each.partition, 0)
    return consumer, {each.partition: each for each in assignments}


def load(backpressure: Backpressure, deliveries: int) -> None:
    """Add or remove deliveries until `deliveries` are in flight."""
    one = delivery(assignment(), 0)
    while backpressure.in_flight < deliveries:
        backpressure.add(one)
    while backpressure.in_flight > deliveries:
        backpressure.remove([one])


@virtual_time
async def test_fetching_pauses_at_the_limit_and_resumes_at_half_of_it() -> None:
    consumer, assignments = consumer_of(assignment())
    backpressure, paused = Backpressure(100, 10**9), list[bool]()

    for in_flight in (99, 100, 99, 51, 50, 99):
        load(backpressure, in_flight)
        backpressure.apply(consumer, assignments, hold=False)
        paused.append(bool(consumer.paused))

    assert paused == [False, True, True, True, False, False]


@virtual_time
async def test_the_limit_in_bytes_works_like_that_in_messages() -> None:
    consumer, assignments = consumer_of(assignment())
    backpressure, paused = Backpressure(100, 1_000), list[bool]()

    for size in (999, 1_000, 501, 500):
        body = delivery(assignment(), 0, value=b"x" * size)
        backpressure.add(body)
        backpressure.apply(consumer, assignments, hold=False)
        backpressure.remove([body])
        paused.append(bool(consumer.paused))

    assert paused == [False, True, True, False]


@virtual_time
async def test_hold_pauses_all_partitions_until_it_ends() -> None:
    consumer, assignments = consumer_of(assignment(partition=0), assignment(partition=1))
    backpressure = Backpressure(100, 10**9)

    backpressure.apply(consumer, assignments, hold=True)
    assert consumer.paused == set(assignments)

    backpressure.apply(consumer, assignments, hold=False)
    assert consumer.paused == set()


@pytest.mark.scenario(65)
@virtual_time
async def test_pauses_that_a_rebalance_cleared_are_set_again() -> None:
    consumer, assignments = consumer_of(assignment())
    backpressure = Backpressure(100, 10**9)
    load(backpressure, 100)
    backpressure.apply(consumer, assignments, hold=False)

    consumer.paused.clear()
    backpressure.apply(consumer, assignments, hold=False)

    assert consumer.paused == set(assignments)


@virtual_time
async def test_a_partition_with_too_many_uncommitted_deliveries_is_paused_alone() -> None:
    stuck, other = assignment(partition=0), assignment(partition=1)
    consumer, assignments = consumer_of(stuck, other)
    for offset in range(MOST_UNCOMMITTED):
        stuck.progress.deliver(offset)
        other.progress.deliver(offset)
        other.progress.finish(offset)

    Backpressure(10**9, 10**9).apply(consumer, assignments, hold=False)

    assert consumer.paused == {stuck.partition}


@virtual_time
async def test_a_closing_partition_is_paused_and_a_revoked_one_is_ignored() -> None:
    closing, gone = assignment(partition=0), assignment(partition=1)
    consumer, assignments = consumer_of(closing)
    closing.close()

    Backpressure(100, 10**9).apply(consumer, {**assignments, gone.partition: gone}, hold=False)

    assert consumer.paused == {closing.partition}
