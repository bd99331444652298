"""Backpressure: which partitions rest."""

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
    for place in assignments:
        consumer.seek(place.partition, 0)
    return consumer, {place.partition: place for place in assignments}


def load(pressure: Backpressure, deliveries: int) -> None:
    """Let so many be in flight, of a byte each."""
    one = delivery(assignment(), 0)
    while pressure.in_flight < deliveries:
        pressure.took(one)
    while pressure.in_flight > deliveries:
        pressure.left(one)


@virtual_time
async def test_fetching_stops_at_the_limit_and_goes_on_at_half_of_it() -> None:
    consumer, ours = consumer_of(assignment())
    pressure, paused = Backpressure(100, 10**9), list[bool]()

    for in_flight in (99, 100, 99, 51, 50, 99):
        load(pressure, in_flight)
        pressure.apply(consumer, ours, hold=False)
        paused.append(bool(consumer.paused))

    assert paused == [False, True, True, True, False, False]


@virtual_time
async def test_bytes_count_like_messages() -> None:
    consumer, ours = consumer_of(assignment())
    pressure, paused = Backpressure(100, 1_000), list[bool]()

    for size in (999, 1_000, 501, 500):
        body = delivery(assignment(), 0, value=b"x" * size)
        pressure.took(body)
        pressure.apply(consumer, ours, hold=False)
        pressure.left(body)
        paused.append(bool(consumer.paused))

    assert paused == [False, True, True, False]


@virtual_time
async def test_a_closed_gate_rests_everything_and_an_open_one_wakes_it() -> None:
    consumer, ours = consumer_of(assignment(partition=0), assignment(partition=1))
    pressure = Backpressure(100, 10**9)

    pressure.apply(consumer, ours, hold=True)
    assert consumer.paused == set(ours)

    pressure.apply(consumer, ours, hold=False)
    assert consumer.paused == set()


@pytest.mark.scenario(65)
@virtual_time
async def test_pauses_that_a_rebalance_cleared_are_set_again() -> None:
    consumer, ours = consumer_of(assignment())
    pressure = Backpressure(100, 10**9)
    load(pressure, 100)
    pressure.apply(consumer, ours, hold=False)

    consumer.paused.clear()
    pressure.apply(consumer, ours, hold=False)

    assert consumer.paused == set(ours)


@virtual_time
async def test_one_partition_that_is_stuck_rests_alone() -> None:
    stuck, other = assignment(partition=0), assignment(partition=1)
    consumer, ours = consumer_of(stuck, other)
    for offset in range(MOST_UNCOMMITTED):
        stuck.progress.deliver(offset)
        other.progress.deliver(offset)
        other.progress.finish(offset)

    Backpressure(10**9, 10**9).apply(consumer, ours, hold=False)

    assert consumer.paused == {stuck.partition}


@virtual_time
async def test_a_closing_partition_rests_and_one_that_is_gone_is_left_alone() -> None:
    closing, gone = assignment(partition=0), assignment(partition=1)
    consumer, ours = consumer_of(closing)
    closing.close()

    Backpressure(100, 10**9).apply(consumer, {**ours, gone.partition: gone}, hold=False)

    assert consumer.paused == {closing.partition}
