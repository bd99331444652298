"""Events that may have crashed workers run alone, and only crashes during such runs count against them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem.engine.run import Run
from integr8s_idem.engine.work import Executed, Outcome
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.records import IdempotencyRecord, IdempotencyStatus
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import virtual_now, virtual_time
from integr8s_idem.worker.isolation_gate import IsolationGate
from integr8s_idem.worker.poison_events import PoisonEventRunner
from tests.support.counting import SentOutcomes
from tests.support.fake_worker import running
from tests.support.guarded import LEASE, Guarded, guarded
from tests.support.pipelines import (
    TOPIC,
    Depot,
    ParcelSent,
    all_committed,
    dispatcher_of,
    leases_left,
    reserved_by_another,
    sent,
    unfinished,
)
from tests.support.stalling import StallingStore


def key_of(here: Guarded, parcel: int) -> str:
    return f"{here.manager.space.root}handle:parcel_sent:id:parcel-{parcel}"


async def leave_crashes(here: Guarded, *parcels: int, times: int, alone: bool = False) -> None:
    await here.leave_crashes(*[key_of(here, each) for each in parcels], times=times, alone=alone)


async def record_of(here: Guarded, parcel: int) -> IdempotencyRecord:
    (record,) = await here.store.get([key_of(here, parcel)])
    assert record is not None
    return record


def noting_concurrency(depot: Depot) -> tuple[dict[int, int], Callable[[ParcelSent], Awaitable[None]]]:
    """Return how many other handlers were running when each parcel's began, and a handler that notes it."""
    concurrent: dict[int, int] = {}

    async def handle(event: ParcelSent) -> None:
        concurrent[event.number] = depot.running_now
        await depot.handle(event)

    return concurrent, handle


@virtual_time
async def test_a_suspect_that_does_not_crash_the_worker_runs_alone_and_is_handled() -> None:
    here, depot, broker = guarded(max_attempts=2), Depot(seconds=3), sent(6)
    await leave_crashes(here, 2, 4, times=9)
    concurrent, handle = noting_concurrency(depot)

    async with running(dispatcher_of(handle, here), broker, ordering="none", isolation_share=1) as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert sorted(depot.done) == list(range(6))
    assert (concurrent[2], concurrent[4]) == (0, 0)
    assert depot.max_concurrency > 1, "the others run concurrently"
    assert broker.logs.keys() == {next(iter(broker.logs))}, "nothing was dead-lettered"
    assert here.observer.counts[Signal.ISOLATED] == 2


@virtual_time
async def test_outcomes_that_wait_for_others_are_sent_before_a_suspect_starts() -> None:
    """Otherwise, work that has ended would lapse if the suspect crashes the process."""
    store = SentOutcomes()
    here, ended, sent_before = guarded(store), list[int](), list[int]()
    router, broker = EventRouter(), sent(60)
    await leave_crashes(here, 8, times=9)

    @router.on(ParcelSent, name="handle")
    async def handle(event: ParcelSent) -> None:
        if event.number == 8:
            sent_before.extend((len(ended), len(store.sent_at)))
        # The first one ends 2.5 ms before the others that begin with it: so its outcome waits for them.
        await asyncio.sleep(0.005 if event.number == 0 else 0.0075)
        ended.append(event.number)

    dispatcher = IdempotentEventDispatcher(router, here.manager)
    async with running(dispatcher, broker, ordering="none", concurrency=8, isolation_share=1) as worker:
        await worker.until(lambda: all_committed(worker))

    assert len(ended) == 60
    assert sent_before == [8, 8]


@virtual_time
async def test_after_one_crash_nothing_runs_alone() -> None:
    here, depot, broker = guarded(), Depot(seconds=3), sent(6)
    await leave_crashes(here, *range(6), times=1)

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))

    assert depot.max_concurrency == 6
    assert here.observer.counts[Signal.ISOLATED] == 0


@virtual_time
async def test_a_suspect_whose_last_attempt_failed_runs_alone_too() -> None:
    """Otherwise, an event that crashes and fails in turn would never crash its worker while it runs alone."""
    here, depot, broker = guarded(), Depot(seconds=3), sent(6)
    await leave_crashes(here, 2, times=2)
    [failed] = await reserved_by_another(here, 2, timedelta(seconds=LEASE))
    assert await here.store.release([failed]) == [True]
    concurrent, handle = noting_concurrency(depot)

    async with running(dispatcher_of(handle, here), broker, ordering="none", isolation_share=1) as worker:
        await worker.until(lambda: all_committed(worker))

    assert concurrent[2] == 0
    assert depot.max_concurrency > 1, "the others run concurrently"
    assert here.observer.counts[Signal.ISOLATED] == 1


@virtual_time
async def test_the_record_of_a_suspect_is_marked_alone_until_its_turn_ends() -> None:
    here, depot, broker = guarded(), Depot(seconds=50), sent(2)
    await leave_crashes(here, 0, times=2)

    async with running(
        dispatcher_of(depot.handle, here), broker, ordering="none", isolation_seconds=20, concurrency=2
    ) as worker:
        await worker.until(lambda: 0 in depot.started)
        first = await record_of(here, 0)
        others = list(depot.started)
        await asyncio.sleep(25)
        later = await record_of(here, 0)
        assert 1 in depot.started
        await worker.until(lambda: all_committed(worker))

    assert (first.attempt, first.lapsed, first.lapsed_alone, first.alone) == (3, 2, 0, True)
    assert (later.attempt, later.fence, later.alone) == (3, first.fence, False)
    assert others in ([0], [1, 0])
    assert sorted(depot.done) == [0, 1]


@pytest.mark.parametrize(("settings", "attempts"), [({"isolation_share": 0}, 2), ({}, 1)])
@virtual_time
async def test_without_isolation_each_crash_counts(settings: dict[str, Any], attempts: int) -> None:
    here, depot, broker = guarded(max_attempts=attempts), Depot(), sent(3)
    await leave_crashes(here, 1, times=attempts)

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none", **settings) as worker:
        await worker.until(lambda: all_committed(worker))

    assert sorted(depot.done) == [0, 2]
    assert (await record_of(here, 1)).status is IdempotencyStatus.FAILED


@virtual_time
async def test_crashes_of_concurrent_runs_do_not_count_as_failed_attempts() -> None:
    here, depot, broker = guarded(max_attempts=3), Depot(errors={0: [OSError("no"), OSError("no")]}), sent(1)
    await leave_crashes(here, 0, times=7)

    async with running(dispatcher_of(depot.handle, here), broker, retry_initial_seconds=0.1) as worker:
        await worker.until(lambda: all_committed(worker))

    assert depot.started == [0, 0, 0]
    assert depot.done == [0]


@virtual_time
async def test_an_event_that_never_runs_alone_fails_after_ten_times_as_many_crashes() -> None:
    here, depot, broker = guarded(max_attempts=2), Depot(), sent(1)
    await leave_crashes(here, 0, times=20)

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert depot.started == []
    assert (await record_of(here, 0)).status is IdempotencyStatus.FAILED
    [dead_letter] = broker.values("parcel_sent.dlq")
    assert dict(dead_letter.headers)["idempotency-dlq-attempts"] == b"21", "20 runs, and the one that failed it"


@virtual_time
async def test_a_draining_worker_releases_suspects_that_wait_for_their_turn() -> None:
    here, depot, broker = guarded(), Depot(seconds=10), sent(5)
    await leave_crashes(here, *range(5), times=2)

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none", drain_timeout_seconds=60) as worker:
        await worker.until(lambda: bool(depot.started))
        worker.worker.stop()
        await worker.until(lambda: worker.task.done() or worker.worker.report().in_flight == 0)

    (only,) = depot.done
    assert depot.started == [only]
    assert await leases_left(here) == []
    waiting = [await record_of(here, each) for each in range(5) if each != only]
    assert [(each.lapsed, each.lease_until, each.alone) for each in waiting] == [(2, None, False)] * 4


@virtual_time
async def test_leases_of_waiting_suspects_are_renewed() -> None:
    here, depot, broker = guarded(), Depot(seconds=LEASE), sent(4)
    await leave_crashes(here, *range(4), times=2)

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))

    assert sorted(depot.done) == list(range(4))
    assert depot.max_concurrency == 1
    assert here.observer.counts[Signal.TAKEOVER] == 4, "each was taken over once, from the dead process"


@virtual_time
async def test_events_reserved_before_an_isolated_run_are_released_when_their_partition_is_revoked() -> None:
    here, depot, broker = guarded(), Depot(seconds=25), sent(6)
    await leave_crashes(here, 0, times=2)

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none", drain_timeout_seconds=60) as worker:
        await worker.until(lambda: 0 in depot.started)
        held = [each.delivery for each in worker.worker._pipeline._runners.runnable]
        for delivery in held:
            delivery.assignment.close()
        worker.worker._pipeline.release_closed()
        await asyncio.sleep(1)
        left = [record.key async for record in here.store.scan("") if await here.store.count_active(record.key)]
        assert not held or len(left) == 1, "only the event that runs alone is held"


@virtual_time
async def test_a_suspect_that_cannot_be_marked_is_released_when_its_partition_is_revoked() -> None:
    store = StallingStore(MemoryIdempotencyRepository(clock=virtual_now))
    here, depot, broker = guarded(store), Depot(), sent(1)
    await leave_crashes(here, 0, times=2)

    async def fail() -> None:
        store.down.add("reserve")  # the suspect is reserved; the request that marks it as running alone fails

    store.stall = fail
    async with running(dispatcher_of(depot.handle, here), broker, None) as worker:
        await worker.until(lambda: here.observer.counts[Signal.STORE_ERROR] > 0)
        await worker.consumer.take([TOPIC])

        assert await leases_left(here) == []
        assert (await record_of(here, 0)).lapsed == 2

        store.down.clear()
        await worker.consumer.give([TOPIC])
        await worker.until(lambda: all_committed(worker))
    assert depot.done == [0]


@virtual_time
async def test_a_suspect_that_is_cancelled_before_its_attempt_releases_its_lease() -> None:
    here = guarded()
    await leave_crashes(here, 0, times=2)
    handler = dispatcher_of(Depot().handle, here)
    execution = handler.executions(ParcelSent(number=0, event_id="parcel-0"))[0]
    assert isinstance(execution, GuardedExecution)
    execution.isolate()
    suspect = await execution.attempt_or_suspect(wait_for_store=never_down)
    assert isinstance(suspect, Run)
    isolation = IsolationGate()
    isolation._overdue = 1  # another suspect is still running
    runner = PoisonEventRunner(isolation, 0.5, 30, here.observer)

    async def cancelled(_: object) -> Outcome[object]:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await runner.run(execution, suspect, asyncio.get_running_loop().create_future(), never_down, cancelled)

    assert await leases_left(here) == []


@virtual_time
async def test_the_log_states_why_a_suspect_does_not_run_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = guarded()
    await leave_crashes(here, 0, times=2)
    [execution] = dispatcher_of(Depot().handle, here).executions(ParcelSent(number=0, event_id="parcel-0"))
    assert isinstance(execution, GuardedExecution)
    execution.isolate()
    suspect = await execution.attempt_or_suspect(wait_for_store=never_down)
    assert isinstance(suspect, Run)
    isolation = IsolationGate()
    isolation.enter()  # another event is still being handled

    async def with_others(_: object) -> Outcome[object]:
        return Executed(None, 1)

    runner = PoisonEventRunner(isolation, 0.5, 30, here.observer)
    await runner.run(execution, suspect, asyncio.get_running_loop().create_future(), never_down, with_others)

    [logged] = [each.getMessage() for each in caplog.records if "attempts have lapsed" in each.getMessage()]
    assert logged.endswith(
        "2 attempts have lapsed; it runs concurrently with others, because a handler has been running for more than "
        "30 s, or its outcome is waiting for the store"
    )


async def never_down(error: Exception) -> None:
    raise AssertionError("the store is available") from error
