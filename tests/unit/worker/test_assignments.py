"""One stretch of time in which a partition is ours: what of it is on its way."""

from __future__ import annotations

import asyncio

from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.partition_registry import PartitionRegistry
from tests.support.deliveries import assignment, delivery


@virtual_time
async def test_it_is_idle_once_all_that_began_has_ended_whoever_waits_for_that() -> None:
    here = assignment()
    first, second = delivery(here, 0), delivery(here, 1)
    here.began(first)
    here.began(second)
    waits = [here.idle(), here.idle()]

    here.ended_one(first)
    assert not any(each.done() for each in waits)
    here.ended_one(second)

    assert all(each.done() for each in waits)
    assert here.idle().done()


@virtual_time
async def test_one_of_which_nothing_has_begun_is_idle() -> None:
    here = assignment()

    assert here.idle().done()
    here.ended_one(delivery(here, 0))
    assert here.idle().done()


@virtual_time
async def test_it_is_busy_again_when_something_more_begins() -> None:
    here = assignment()
    for number in range(3):
        one = delivery(here, number)
        here.began(one)
        idle = here.idle()
        assert not idle.done()
        here.ended_one(one)
        assert idle.done()


@virtual_time
async def test_closing_waits_for_what_is_on_its_way_as_long_as_it_may() -> None:
    holdings = PartitionRegistry("billing", drain_seconds=5)
    partition = assignment().partition
    (here,) = holdings.begin([partition])
    one, other = delivery(here, 0), delivery(here, 1)
    here.began(one)
    here.began(other)
    loop = asyncio.get_running_loop()
    loop.call_later(1, here.ended_one, one)

    await holdings.close([here])
    assert loop.time() == 5
    here.ended_one(other)
    await holdings.close([here])

    assert loop.time() == 5


@virtual_time
async def test_handlers_of_partitions_that_are_gone_stay_in_sight_until_they_end() -> None:
    holdings = PartitionRegistry("billing", drain_seconds=5)
    (here,) = holdings.begin([assignment().partition])
    one = delivery(here, 0)
    here.began(one)
    task = asyncio.create_task(asyncio.sleep(10))
    one.tasks.add(task)

    holdings.end(here)
    assert holdings.handlers() == {task}
    one.tasks.clear()
    here.ended_one(one)

    assert holdings.handlers() == set()
    await task


@virtual_time
async def test_all_that_is_ours_can_be_closed_at_once() -> None:
    holdings = PartitionRegistry("billing", drain_seconds=5)
    ours = holdings.begin([assignment(partition=0).partition, assignment(partition=1).partition])

    holdings.close_at_once()

    assert all(each.closed for each in ours)
