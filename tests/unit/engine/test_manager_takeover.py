"""Takeover of keys from crashed and stalled workers."""

from __future__ import annotations

import asyncio
import random

import pytest

from integr8s_idem.engine.failure_policy import FailurePolicy
from integr8s_idem.engine.work import Attempt, Executed, HandlerFailed, Work
from integr8s_idem.errors import CrashedTooOftenError, LeaseLostError, PreviouslyFailedError
from integr8s_idem.failures import retry
from integr8s_idem.keys import Key
from integr8s_idem.records import IdempotencyStatus, InProgress, Previous, Reserved
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import LEASE, Guarded, Job, guarded, virtual_store


async def crash(here: Guarded, key: str = "order:1") -> None:
    """Reserve a key and crash."""
    assert isinstance(await here.manager.reserve(key), Reserved)
    await asyncio.sleep(LEASE)


@virtual_time
async def test_work_of_a_dead_worker_is_taken_over_within_a_lease_and_a_second() -> None:
    dead = guarded()
    here, job = guarded(dead.store), Job()
    await dead.manager.reserve("order:1")

    await here.manager.run("order:1", job, wait_timeout=here.manager.config.lease * 2)

    assert LEASE <= asyncio.get_running_loop().time() <= LEASE + 1
    assert (await here.record()).attempt == 2
    assert here.observer.counts[Signal.TAKEOVER] == 1


@pytest.mark.scenario(8)
@virtual_time
async def test_one_of_eight_workers_takes_over_a_dead_workers_key() -> None:
    dead, job = guarded(), Job(seconds=1)
    await crash(dead)
    workers = [guarded(dead.store) for _ in range(8)]

    results = await asyncio.gather(*(worker.manager.run("order:1", job) for worker in workers))

    assert job.runs == 1
    assert results == ["receipt-1"] * 8
    assert sum(worker.observer.counts[Signal.TAKEOVER] for worker in workers) == 1


@virtual_time
async def test_crashes_count_as_attempts_until_the_limit() -> None:
    here, job = guarded(max_attempts=3), Job()
    for _ in range(3):
        await crash(here)

    with pytest.raises(CrashedTooOftenError, match="3 runs ended without an outcome"):
        await here.manager.run("order:1", job)

    assert job.runs == 0
    with pytest.raises(PreviouslyFailedError, match="CrashedTooOftenError"):
        await here.manager.run("order:1", job)


@virtual_time
async def test_a_lease_lost_before_the_start_is_not_a_failure_of_the_handler() -> None:
    here, job = guarded(max_attempts=3), Job()
    for _ in range(3):
        await crash(here)
    here.store.down.add("fail")
    giving_up = asyncio.create_task(here.manager.run("order:1", job))
    await asyncio.sleep(0.01)
    await here.store.inner.delete([(await here.record()).key])
    await guarded(here.store).manager.reserve("order:1")
    here.store.down.clear()

    with pytest.raises(LeaseLostError) as lost:
        await giving_up

    assert job.runs == 0
    assert "ended before the work was finished" in str(lost.value)
    assert "handler ran" not in str(lost.value)
    assert "No result was stored" in str(lost.value)


@virtual_time
async def test_the_last_attempt_after_crashes_still_runs() -> None:
    here, job = guarded(max_attempts=3), Job()
    for _ in range(2):
        await crash(here)

    assert await here.manager.run("order:1", job) == "receipt-1"

    assert (await here.record()).attempt == 3


@virtual_time
async def test_the_function_sees_number_fence_and_deadline_of_its_attempt() -> None:
    here, job = guarded(), Job()
    await crash(here)
    began = asyncio.get_running_loop().time()

    await here.manager.execute(Work(Key.of("order:1")), job.with_attempt)

    (attempt,) = job.attempts
    assert (attempt.number, attempt.label) == (2, "order:1")
    assert attempt.deadline == began + LEASE
    assert attempt.fence == (await here.record()).fence


async def attempted(here: Guarded, error: Exception | None = None) -> object:
    """Make an attempt in a process of its own, with a rule that allows 8 attempts."""

    async def charge(attempt: Attempt) -> str:
        if error is not None:
            raise error
        return "receipt-1"

    work = Work(Key.of("order:1"), failures=FailurePolicy([retry(ConnectionError, attempts=8)]))
    return await here.manager.execute(work, charge)


@virtual_time
async def test_attempts_that_a_rule_allows_do_not_count_toward_the_crash_limit() -> None:
    here = guarded(max_attempts=3)
    for _ in range(5):
        await attempted(here, ConnectionError("the bank is down"))
    await crash(here)

    assert await attempted(here) == Executed("receipt-1", 7)


@virtual_time
async def test_crashes_between_attempts_that_a_rule_allows_count_until_the_limit() -> None:
    here = guarded(max_attempts=3)
    for _ in range(2):
        await attempted(here, ConnectionError("the bank is down"))
    for _ in range(3):
        await crash(here)

    failed = await attempted(here)

    assert isinstance(failed, HandlerFailed)
    assert "3 runs ended without an outcome" in str(failed.error)


@virtual_time
async def test_a_crash_in_the_last_attempt_that_a_rule_allows_is_final() -> None:
    here = guarded(max_attempts=3)
    for _ in range(7):
        await attempted(here, ConnectionError("the bank is down"))
    await crash(here)

    failed = await attempted(here)

    assert isinstance(failed, HandlerFailed)
    assert isinstance(failed.error, CrashedTooOftenError)


@pytest.mark.scenario(9)
@virtual_time
async def test_a_zombie_does_not_overwrite_the_outcome_of_its_successor() -> None:
    zombie = guarded()
    here, job = guarded(zombie.store), Job(result="the successor's")
    verdict = await zombie.manager.reserve("order:1")
    assert isinstance(verdict, Reserved)
    await asyncio.sleep(LEASE)
    await here.manager.run("order:1", job)

    assert not await zombie.manager.complete(verdict, "the zombie's")
    assert not await zombie.manager.fail(verdict, "the zombie's")
    assert await zombie.manager.release(verdict) == [False]
    assert await zombie.manager.renew(verdict) == [False]

    assert await here.manager.run("order:1", job) == "the successor's"


async def stall(here: Guarded, job: Job) -> asyncio.Task[object]:
    """Start a run whose process neither renews its lease nor cancels it, as after SIGSTOP."""
    here.manager._leases.take = lambda lease: lease.reschedule(None)  # type: ignore[method-assign]
    running = asyncio.create_task(here.manager.execute(Work(Key.of("order:1")), job.with_attempt))
    await job.started.wait()
    return running


@virtual_time
async def test_a_stalled_run_that_was_taken_over_loses_its_lease_at_completion() -> None:
    stalled = guarded()
    here = guarded(stalled.store, owner="billing-7")
    running = await stall(stalled, Job(seconds=LEASE + 5))
    await asyncio.sleep(LEASE)

    second = asyncio.create_task(here.manager.run("order:1", Job(result="second", seconds=20)))

    with pytest.raises(
        LeaseLostError, match=r"lease of 30 s ended before the work was finished, and billing-7 took over"
    ):
        await running
    assert await second == "second"
    assert stalled.observer.counts[Signal.RESERVATION_LOST] == 1


@virtual_time
async def test_a_stalled_run_completes_without_a_takeover() -> None:
    here = guarded()

    running = await stall(here, Job(seconds=LEASE * 3))

    assert await running == Executed("receipt-1", 1)
    assert (await here.record()).status is IdempotencyStatus.COMPLETED


@pytest.mark.scenario(36)
@virtual_time
async def test_a_failure_of_a_stalled_run_does_not_release_its_successors_key() -> None:
    stalled = guarded()
    here = guarded(stalled.store)
    running = await stall(stalled, Job(seconds=LEASE + 5, errors=[ValueError("no")]))
    await asyncio.sleep(LEASE)
    second = asyncio.create_task(here.manager.run("order:1", Job(seconds=20)))

    assert isinstance(await running, HandlerFailed)

    assert isinstance(await here.manager.reserve("order:1"), InProgress)
    assert stalled.observer.counts[Signal.RESERVATION_LOST] == 1
    assert await second == "receipt-1"


@virtual_time
async def test_a_stalled_run_completes_after_its_successor_released_the_key() -> None:
    stalled = guarded()
    here = guarded(stalled.store)
    running = await stall(stalled, Job(seconds=LEASE + 5))
    await asyncio.sleep(LEASE)
    with pytest.raises(ValueError, match="no"):
        await here.manager.run("order:1", Job(errors=[ValueError("no")]))

    assert await running == Executed("receipt-1", 1)

    assert (await here.record()).status is IdempotencyStatus.COMPLETED
    assert stalled.observer.counts[Signal.RESERVATION_LOST] == 1


@virtual_time
async def test_a_released_key_is_free_immediately_and_its_attempt_counts() -> None:
    here = guarded()
    first = await here.manager.reserve("order:1")
    assert isinstance(first, Reserved)

    await here.manager.release(first)
    second = await here.manager.reserve("order:1")

    assert isinstance(second, Reserved)
    assert (second.attempt, second.previous) == (2, Previous.RELEASED)
    assert second.fence > first.fence


@pytest.mark.parametrize("seed", range(20))
@virtual_time
async def test_crashes_failures_and_cancellations_end_in_one_success_without_overlap(seed: int) -> None:
    chance, store = random.Random(seed), virtual_store()
    inside = successes = 0

    async def work() -> str:
        nonlocal inside, successes
        inside += 1
        assert inside == 1
        try:
            await asyncio.sleep(chance.uniform(0, 3 * LEASE))
            if chance.random() < 0.3:
                raise ValueError("no")
            successes += 1
            return "done"
        finally:
            inside -= 1

    async def worker() -> None:
        here = guarded(store, max_attempts=10_000)
        while True:
            run = asyncio.create_task(here.manager.run("order:1", work, wait_timeout=here.manager.config.lease * 100))
            await asyncio.wait({run}, timeout=chance.uniform(1, 200))
            if run.done() and run.exception() is None:
                return
            run.cancel()
            await asyncio.wait({run})

    await asyncio.gather(*(worker() for _ in range(4)))

    assert successes == 1
