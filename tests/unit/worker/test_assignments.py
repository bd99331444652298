"""Running deliveries of an assignment, and the registry of assigned partitions."""

from __future__ import annotations

import asyncio

import pytest

from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.partition_registry import PartitionRegistry
from tests.support.deliveries import assignment, delivery


@virtual_time
async def test_an_assignment_is_idle_when_all_its_deliveries_have_ended() -> None:
    current = assignment()
    first, second = delivery(current, 0), delivery(current, 1)
    current.running.add(first)
    current.running.add(second)
    waits = [current.idle(), current.idle()]

    current.remove_running(first)
    assert not any(each.done() for each in waits)
    current.remove_running(second)

    assert all(each.done() for each in waits)
    assert current.idle().done()


@virtual_time
async def test_an_assignment_without_deliveries_is_idle() -> None:
    current = assignment()

    assert current.idle().done()
    current.remove_running(delivery(current, 0))
    assert current.idle().done()


@virtual_time
async def test_an_assignment_is_busy_again_when_another_delivery_starts() -> None:
    current = assignment()
    for number in range(3):
        one = delivery(current, number)
        current.running.add(one)
        idle = current.idle()
        assert not idle.done()
        current.remove_running(one)
        assert idle.done()


@virtual_time
async def test_a_worker_without_partitions_warns(caplog: pytest.LogCaptureFixture) -> None:
    registry = PartitionRegistry("billing", drain_seconds=5)

    registry.begin([])
    registry.begin([assignment().partition])
    registry.begin([])

    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("billing: this worker has no partitions and handles nothing")


@virtual_time
async def test_closing_waits_for_running_deliveries_up_to_the_drain_timeout() -> None:
    registry = PartitionRegistry("billing", drain_seconds=5)
    partition = assignment().partition
    (current,) = registry.begin([partition])
    one, other = delivery(current, 0), delivery(current, 1)
    current.running.add(one)
    current.running.add(other)
    loop = asyncio.get_running_loop()
    loop.call_later(1, current.remove_running, one)

    await registry.close([current])
    assert loop.time() == 5
    current.remove_running(other)
    await registry.close([current])

    assert loop.time() == 5


@virtual_time
async def test_handlers_of_revoked_partitions_are_reported_until_they_end() -> None:
    registry = PartitionRegistry("billing", drain_seconds=5)
    (current,) = registry.begin([assignment().partition])
    one = delivery(current, 0)
    current.running.add(one)
    task = asyncio.create_task(asyncio.sleep(10))
    one.add_task(task)

    registry.end(current)
    assert registry.handlers() == {task}
    one.remove_task(task)
    current.remove_running(one)

    assert registry.handlers() == set()
    await task


@virtual_time
async def test_close_all_closes_every_assignment() -> None:
    registry = PartitionRegistry("billing", drain_seconds=5)
    assignments = registry.begin([assignment(partition=0).partition, assignment(partition=1).partition])

    registry.close_all()

    assert all(each.closed for each in assignments)
