"""Lanes: in order within, beside each other otherwise."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Literal

import pytest

from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.assignments import Delivery
from integr8s_idem.worker.lanes import Lanes
from tests.support.deliveries import assignment, delivery


class Settling:
    """Takes a second for each delivery, and notes when it began and ended."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.ended: list[int] = []
        self.most = 0

    async def __call__(self, delivery: Delivery) -> None:
        self.began.append(delivery.record.offset)
        self.most = max(self.most, len(self.began) - len(self.ended))
        await asyncio.sleep(1)
        self.ended.append(delivery.record.offset)


def never(delivery: Delivery) -> None:
    raise AssertionError(f"{delivery} was dropped")


@pytest.mark.parametrize(("ordering", "seconds", "beside"), [("partition", 6, 1), ("key", 3, 2), ("none", 1, 6)])
@virtual_time
async def test_an_ordering_says_what_runs_beside_each_other(
    ordering: Literal["partition", "key", "none"], seconds: float, beside: int
) -> None:
    settling, here = Settling(), assignment()
    lanes = Lanes(ordering, settling, never)

    for offset in range(6):
        lanes.put(delivery(here, offset, key=b"even" if offset % 2 == 0 else b"odd"))
    await asyncio.wait(here.tasks)

    assert asyncio.get_running_loop().time() == seconds
    assert settling.most == beside
    by_key: dict[int, list[int]] = defaultdict(list)
    for offset in settling.ended:
        by_key[offset % 2].append(offset)
    if ordering != "none":
        assert by_key == {0: [0, 2, 4], 1: [1, 3, 5]}


@virtual_time
async def test_messages_without_a_key_keep_the_order_of_their_partition() -> None:
    settling, here = Settling(), assignment()
    lanes = Lanes("key", settling, never)

    for offset in range(3):
        lanes.put(delivery(here, offset))
    await asyncio.wait(here.tasks)

    assert (settling.ended, settling.most) == ([0, 1, 2], 1)


@virtual_time
async def test_partitions_do_not_wait_for_each_other() -> None:
    settling, one, other = Settling(), assignment(partition=0), assignment(partition=1)
    lanes = Lanes("partition", settling, never)

    for place in (one, other):
        lanes.put(delivery(place, 0))
    await asyncio.wait(one.tasks | other.tasks)

    assert settling.most == 2


@virtual_time
async def test_a_partition_that_comes_back_does_not_wait_for_its_earlier_assignment() -> None:
    settling, before, after = Settling(), assignment(), assignment()
    lanes = Lanes("partition", settling, never)

    lanes.put(delivery(before, 0))
    lanes.put(delivery(after, 0))
    await asyncio.wait(before.tasks | after.tasks)

    assert settling.most == 2


@virtual_time
async def test_an_idle_lane_leaves_nothing_behind_and_starts_again() -> None:
    settling, here = Settling(), assignment()
    lanes = Lanes("key", settling, never)

    for offset in range(2):
        lanes.put(delivery(here, offset, key=b"a"))
        await asyncio.sleep(2)

    assert settling.ended == [0, 1]
    assert not lanes._lanes
    assert not here.tasks


@pytest.mark.parametrize("steps", [0, 1], ids=["not begun", "under way"])
@virtual_time
async def test_a_cancelled_lane_tells_what_it_drops(steps: int) -> None:
    settling, here, dropped = Settling(), assignment(), list[int]()
    lanes = Lanes("partition", settling, lambda delivery: dropped.append(delivery.record.offset))
    for offset in range(3):
        lanes.put(delivery(here, offset))
    for _ in range(steps):
        await asyncio.sleep(0)

    for task in here.tasks:
        task.cancel()
    await asyncio.sleep(0.01)

    assert dropped == [0, 1, 2][steps:]
    assert not lanes._lanes
