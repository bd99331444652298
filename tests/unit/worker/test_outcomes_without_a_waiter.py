"""A handler succeeds, but the worker cannot wait until its outcome is recorded."""

from __future__ import annotations

import asyncio

import pytest

from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.lanes import Ordering
from tests.support.fake_worker import running
from tests.support.guarded import LEASE, Guarded, guarded
from tests.support.pipelines import TOPIC, ParcelSent, all_committed, dispatcher_of, key_of, sent

DRAIN = 5
HANDLING = 8
"""Seconds: longer than a revocation waits for handlers."""
OUTAGE = 5
"""Seconds, which include the end of the handler; less than what is left of the lease then."""


async def fail_for(here: Guarded, seconds: float) -> None:
    with here.store.outage():
        await asyncio.sleep(seconds)


@pytest.mark.parametrize("ordering", ["none", "partition", "key"])
@virtual_time
async def test_an_outcome_is_recorded_when_the_store_is_back(ordering: Ordering) -> None:
    here, handled, ended = guarded(), [], asyncio.Event()

    async def handle(event: ParcelSent) -> None:
        handled.append(event.event_id)
        await asyncio.sleep(HANDLING)
        ended.set()

    async with running(dispatcher_of(handle, here), sent(1), ordering=ordering, drain_timeout_seconds=DRAIN) as worker:
        await worker.until(lambda: len(handled) == 1)
        await worker.consumer.take([TOPIC])
        assert not ended.is_set(), "the revocation waits for the handler"
        with here.store.outage():
            await ended.wait()
            await asyncio.sleep(OUTAGE)
        await asyncio.sleep(OUTAGE)
        [record] = await here.store.get([key_of(here, 0)])
        assert record is not None
        assert record.status == "completed"
        await worker.consumer.give([TOPIC])
        await worker.until(lambda: all_committed(worker))
    assert len(handled) == 1


@pytest.mark.parametrize(("outage", "is_recorded"), [(OUTAGE, True), (3 * LEASE, False)], ids=["short", "long"])
@virtual_time
async def test_a_stopping_service_waits_for_the_store_until_the_lease_ends_at_most(
    caplog: pytest.LogCaptureFixture, outage: float, is_recorded: bool
) -> None:
    here, started, ended = guarded(), asyncio.Event(), asyncio.Event()

    async def handle(_: ParcelSent) -> None:
        started.set()
        await asyncio.sleep(HANDLING)
        ended.set()

    async with running(dispatcher_of(handle, here), sent(1), ordering="none", drain_timeout_seconds=DRAIN) as worker:
        await started.wait()
        await worker.consumer.take([TOPIC])
        failing = asyncio.create_task(fail_for(here, outage))
        await ended.wait()
    before = asyncio.get_running_loop().time()
    await here.manager.close()
    waited = asyncio.get_running_loop().time() - before

    await failing
    [record] = await here.store.get([key_of(here, 0)])
    assert (record is not None and record.status == "completed") == is_recorded
    assert ("its outcome is not recorded" in caplog.text) != is_recorded
    assert 0 < waited <= LEASE


@virtual_time
async def test_outcomes_are_recorded_even_if_other_code_cancels_the_task_that_records_them() -> None:
    here, handled = guarded(), list[str]()

    async def handle(event: ParcelSent) -> None:
        handled.append(event.event_id)
        await asyncio.sleep(len(handled) / 10)

    here.store.held["complete"] = asyncio.Event()
    async with running(dispatcher_of(handle, here), sent(4), ordering="none", drain_timeout_seconds=DRAIN) as worker:
        await worker.until(lambda: len(handled) == 4)
        await asyncio.sleep(1)
        recorders = [task for task in asyncio.all_tasks() if "_record_all" in repr(task.get_coro())]
        for task in recorders:
            task.cancel()
        here.store.held["complete"].set()
        await asyncio.sleep(1)
        records = await here.store.get([key_of(here, number) for number in range(4)])
    assert len(recorders) == 1
    assert [record and record.status for record in records] == ["completed"] * 4
    assert len(handled) == 4


@virtual_time
async def test_an_outcome_that_is_recorded_alone_is_recorded_even_if_other_code_cancels_that_task() -> None:
    here, handled = guarded(), list[str]()

    async def handle(event: ParcelSent) -> None:
        handled.append(event.event_id)

    async with running(dispatcher_of(handle, here), sent(1), ordering="none") as worker:
        here.store.down = {"complete"}
        await worker.until(lambda: here.store.calls["complete"] > 1)
        recorders = [task for task in asyncio.all_tasks() if "Conclusions.attempt" in repr(task.get_coro())]
        for task in recorders:
            task.cancel()
        await asyncio.wait(recorders)
        here.store.down = set()
        await worker.until(lambda: all_committed(worker))
    [record] = await here.store.get([key_of(here, 0)])
    assert record is not None
    assert record.status == "completed"
    assert len(handled) == 1


@pytest.mark.parametrize("ordering", ["none", "partition", "key"])
@virtual_time
async def test_an_outcome_that_waits_for_the_store_when_the_service_stops_is_recorded(ordering: Ordering) -> None:
    here, started = guarded(), asyncio.Event()

    async def handle(_: ParcelSent) -> None:
        started.set()
        await asyncio.sleep(1)

    async with running(dispatcher_of(handle, here), sent(1), ordering=ordering, drain_timeout_seconds=DRAIN):
        await started.wait()
        failing = asyncio.create_task(fail_for(here, DRAIN + OUTAGE))
        await asyncio.sleep(2)
    assert not failing.done(), "the worker gives the outcome up to a task in the background"
    await here.manager.close()

    await failing
    [record] = await here.store.get([key_of(here, 0)])
    assert record is not None
    assert record.status == "completed"
