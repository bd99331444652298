"""Lanes: deliveries of one lane run in order, lanes run concurrently."""

from __future__ import annotations

from typing import Literal

import pytest

from integr8s_idem.worker.assignments import Delivery
from integr8s_idem.worker.lanes import Lanes
from tests.support.deliveries import assignment, delivery


def turns(lanes: Lanes, deliveries: list[Delivery]) -> list[list[int]]:
    """Return the offsets that run concurrently, if each turn ends before the next starts."""
    now = lanes.enter(deliveries)
    found = []
    while now:
        found.append([each.record.offset for each in now])
        now = lanes.leave(now)
    return found


@pytest.mark.parametrize(
    ("ordering", "together"),
    [
        ("partition", [[0], [1], [2], [3], [4], [5]]),
        ("key", [[0, 1], [2, 3], [4, 5]]),
        ("none", [[0, 1, 2, 3, 4, 5]]),
    ],
)
async def test_the_ordering_decides_which_deliveries_run_concurrently(
    ordering: Literal["partition", "key", "none"], together: list[list[int]]
) -> None:
    here, lanes = assignment(), Lanes(ordering)

    found = turns(lanes, [delivery(here, number, key=b"odd" if number % 2 else b"even") for number in range(6)])

    assert found == together
    assert len(lanes) == 0


async def test_messages_without_a_key_keep_the_order_of_their_partition() -> None:
    here, lanes = assignment(), Lanes("key")

    assert turns(lanes, [delivery(here, number) for number in range(3)]) == [[0], [1], [2]]


async def test_partitions_do_not_wait_for_each_other() -> None:
    one, other, lanes = assignment(partition=0), assignment(partition=1), Lanes("partition")

    assert turns(lanes, [delivery(one, 0), delivery(other, 10)]) == [[0, 10]]


async def test_a_reassigned_partition_does_not_wait_for_its_earlier_assignment() -> None:
    before, after, lanes = assignment(), assignment(), Lanes("partition")

    assert turns(lanes, [delivery(before, 0), delivery(after, 0)]) == [[0, 0]]


async def test_an_idle_lane_is_removed_and_can_start_again() -> None:
    here, lanes = assignment(), Lanes("key")

    for number in range(2):
        assert turns(lanes, [delivery(here, number, key=b"a")]) == [[number]]
        assert len(lanes) == 0
