"""Cancellation leaves no reservation behind and does not change outcomes."""

from __future__ import annotations

import asyncio

import pytest

from integr8s_idem.engine.failure_policy import FailurePolicy
from integr8s_idem.engine.work import Executed, HandlerFailed, Work
from integr8s_idem.errors import LeaseLostError, PermanentError, StoreConfigurationError, StoreUnavailableError
from integr8s_idem.failures import discard
from integr8s_idem.keys import Key
from integr8s_idem.records import IdempotencyStatus, InProgress
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import run_virtual, virtual_now, virtual_time
from tests.support.guarded import LEASE, Guarded, Job, guarded
from tests.support.stalling import ManualClock, StallingStore


async def leave(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def stored(here: Guarded) -> None:
    """Return as soon as the store holds a reservation, before its answer is read."""
    while not await here.store.inner.count_active("idempotency:"):
        await turns(1)


@virtual_time
async def test_a_cancelled_run_releases_its_key() -> None:
    here, job = guarded(), Job(seconds=10)
    running = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()

    await leave(running)

    assert await here.is_free()
    assert await here.manager.run("order:1", job) == "receipt-1"
    assert (await here.record()).attempt == 2


@virtual_time
async def test_closing_releases_reservations_without_a_caller() -> None:
    here, job = guarded(), Job()
    await here.manager.run(
        "order:0", job
    )  # a single request: the next caller makes its call itself and repeats it if cancelled
    here.store.held["reserve"] = asyncio.Event()
    running = asyncio.create_task(here.manager.run("order:1", job))
    await turns(5)
    await leave(running)

    closing = asyncio.create_task(here.manager.close())
    await turns(5)
    assert not closing.done()
    here.store.held.pop("reserve").set()
    await closing

    assert await here.store.count_active(here.manager.space.full(Key.of("order:1"))) == 0
    assert here.store.calls["release"] == 1


@pytest.mark.parametrize("steps", range(12))
@virtual_time
async def test_a_cancellation_at_any_step_of_a_run_leaves_no_lease_behind(steps: int) -> None:
    here, job = guarded(), Job()
    running = asyncio.create_task(here.manager.run("order:1", job))
    await turns(steps)
    running.cancel()
    await asyncio.wait({running})

    assert await here.is_free()
    assert await here.manager.run("order:1", job) == "receipt-1"


@virtual_time
async def test_a_cancellation_before_a_late_key_is_reserved_again_releases_it() -> None:
    prevented = 0
    for steps in range(12):
        clock, job = ManualClock(), Job()
        store = StallingStore(MemoryIdempotencyRepository(clock=virtual_now))
        store.stall = clock.stall
        here = guarded(store, clock=clock)
        running = asyncio.create_task(here.manager.run("order:1", job))
        await turns(steps)
        running.cancel()
        await asyncio.wait({running})

        assert await here.is_free()
        prevented += here.observer.counts[Signal.STALE_START_PREVENTED] > 0 and job.runs == 0
        assert await here.manager.run("order:1", job) == "receipt-1"
    assert prevented, "in some step, the start was prevented and the key not reserved again"


@pytest.mark.parametrize("policy", ["closed", "open"])
@virtual_time
async def test_a_late_key_that_cannot_be_reserved_again_is_released(policy: str) -> None:
    clock, job = ManualClock(), Job()
    store = StallingStore(MemoryIdempotencyRepository(clock=virtual_now))
    here = guarded(store, clock=clock, on_store_error=policy)

    async def stall() -> None:
        clock.leap()
        store.fail_next("reserve")

    store.stall = stall
    if policy == "closed":
        with pytest.raises(StoreUnavailableError):
            await here.manager.run("order:1", job)
    else:
        assert await here.manager.run("order:1", job) == "receipt-1"

    assert await here.is_free()
    assert job.runs == (policy == "open")


@virtual_time
async def test_a_cancellation_at_the_moment_of_the_answer_releases_the_key() -> None:
    here, job = guarded(), Job()
    here.store.held["reserve"] = asyncio.Event()
    running = asyncio.create_task(here.manager.run("order:1", job))
    await turns(3)
    here.store.held["reserve"].set()
    await stored(here)

    running.cancel()
    await asyncio.wait({running})

    assert running.cancelled()
    assert job.runs == 0
    assert await here.is_free()


@virtual_time
async def test_a_reservation_without_a_waiting_caller_is_released() -> None:
    here, job = guarded(), Job()
    here.store.held["reserve"] = asyncio.Event()
    running = asyncio.create_task(here.manager.run("order:1", job))
    await turns(3)

    await leave(running)
    here.store.held.pop("reserve").set()
    await turns(10)

    assert job.runs == 0
    assert await here.is_free()


@virtual_time
async def test_a_cancelled_reserve_call_releases_the_key() -> None:
    here = guarded()
    asking = asyncio.create_task(here.manager.reserve("order:1"))
    await stored(here)

    asking.cancel()
    await asyncio.wait({asking})

    if asking.cancelled():
        assert await here.is_free()


@virtual_time
async def test_a_cancellation_while_the_outcome_is_written_does_not_undo_it() -> None:
    here, job = guarded(), Job()
    here.store.held["complete"] = asyncio.Event()
    running = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()
    await turns(10)

    await leave(running)
    here.store.held.pop("complete").set()
    await here.manager.close()

    assert (await here.record()).status is IdempotencyStatus.COMPLETED
    assert await here.manager.run("order:1", job) == "receipt-1"
    assert job.runs == 1


@virtual_time
async def test_a_cancellation_while_the_outcome_is_written_again_does_not_undo_it() -> None:
    """The store has lost the record, so the key was reserved once more, for the same work."""
    here, job = guarded(), Job()
    here.store.held["complete"] = refused = asyncio.Event()
    running = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()
    await turns(10)
    await here.manager.delete("order:1")
    here.store.held["complete"] = asyncio.Event()
    refused.set()
    await turns(20)
    fence = (await here.record()).fence

    await leave(running)
    here.store.held.pop("complete").set()
    await here.manager.close()

    record = await here.record()
    assert (record.status, record.attempt, record.fence) == (IdempotencyStatus.COMPLETED, 1, fence)
    assert await here.manager.run("order:1", job) == "receipt-1"
    assert job.runs == 1


@virtual_time
async def test_work_retried_after_a_cancellation_keeps_its_reservation() -> None:
    here, job = guarded(), Job(seconds=10)
    work = Work(Key.of("order:1"))
    here.store.held["reserve"] = asyncio.Event()
    first = asyncio.create_task(here.manager.execute(work, job.with_attempt))
    await turns(3)
    await leave(first)
    here.store.held.pop("reserve").set()

    async def again() -> object:
        outcome = await here.manager.execute(work, job.with_attempt)
        while isinstance(outcome, InProgress):
            await asyncio.sleep(0.1)
            outcome = await here.manager.execute(work, job.with_attempt)
        return outcome

    second = asyncio.create_task(again())
    await asyncio.sleep(5)

    assert job.runs == 1
    assert await here.manager.count_active() == 1
    assert isinstance(await second, Executed)


@virtual_time
async def test_a_handler_that_swallows_its_cancellation_and_returns_is_completed() -> None:
    here = guarded()

    async def stubborn() -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            return "done all the same"
        raise AssertionError

    running = asyncio.create_task(here.manager.run("order:1", stubborn))
    await asyncio.sleep(1)
    running.cancel()

    assert await running == "done all the same"
    assert (await here.record()).status is IdempotencyStatus.COMPLETED


@virtual_time
async def test_a_handler_that_turns_its_cancellation_into_an_error_has_failed() -> None:
    here = guarded()

    async def rude() -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            raise ValueError("interrupted") from None
        return ""

    async def work(_: object) -> str:
        return await rude()

    running = asyncio.create_task(here.manager.execute(Work(Key.of("order:1")), work))
    await asyncio.sleep(1)
    running.cancel()

    outcome = await running
    assert isinstance(outcome, HandlerFailed)
    assert str(outcome.error) == "interrupted"
    assert await here.is_free()


@virtual_time
async def test_a_timeout_of_the_caller_is_a_cancellation() -> None:
    here, job = guarded(), Job(seconds=10)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await here.manager.run("order:1", job)

    assert await here.is_free()
    assert here.observer.counts[Signal.RESERVATION_LOST] == 0


@virtual_time
async def test_a_handlers_own_timeout_error_is_its_failure() -> None:
    here = guarded()

    async def slow() -> None:
        async with asyncio.timeout(5):
            await asyncio.sleep(10)

    with pytest.raises(TimeoutError):
        await here.manager.run("order:1", slow)

    assert await here.is_free()
    assert here.observer.counts[Signal.HANDLER_FAILED] == 1


@virtual_time
async def test_cancelled_waiters_do_not_disturb_the_run_they_wait_for() -> None:
    here, job = guarded(), Job(seconds=5)
    running = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()
    waiting = [asyncio.create_task(here.manager.run("order:1", job)) for _ in range(3)]
    await asyncio.sleep(1)

    for task in waiting[:2]:
        await leave(task)

    assert await running == await waiting[2] == "receipt-1"
    assert job.runs == 1


@virtual_time
async def test_a_nested_run_is_cancelled_with_the_outer_one_and_both_keys_are_free() -> None:
    here, job = guarded(), Job(seconds=10)

    async def outer() -> object:
        return await here.manager.run("inner", job)

    running = asyncio.create_task(here.manager.run("outer", outer))
    await job.started.wait()

    await leave(running)

    assert await here.is_free("outer")
    assert await here.is_free("inner")


@virtual_time
async def test_a_lost_lease_of_a_nested_run_is_an_ordinary_failure_of_the_outer_one() -> None:
    here, job = guarded(), Job(seconds=LEASE * 2)
    inner = guarded(here.store, scope="steps", processing_timeout_seconds=3)

    async def outer(_: object) -> object:
        running = asyncio.create_task(inner.manager.run("inner", job))
        await job.started.wait()
        await inner.manager.delete("inner")
        await guarded(here.store, scope="steps", owner="billing-7").manager.reserve("inner")
        return await running

    outcome = await here.manager.execute(Work(Key.of("outer")), outer)

    assert isinstance(outcome, HandlerFailed)
    assert isinstance(outcome.error, LeaseLostError)
    assert not outcome.given_up
    assert here.observer.counts[Signal.RESERVATION_LOST] == 0


@virtual_time
async def test_two_leases_that_expire_together_are_lost_by_the_outer_run() -> None:
    here, job = guarded(), Job(seconds=LEASE * 2)

    async def outer() -> object:
        return await here.manager.run("inner", job)

    here.store.down.add("renew")

    with pytest.raises(LeaseLostError, match="outer"):
        await here.manager.run("outer", outer)

    assert job.finished == 0


@virtual_time
async def test_the_outcome_of_a_caller_that_is_cancelled_while_the_store_fails_is_recorded() -> None:
    here, job = guarded(), Job()
    here.store.down = {"complete"}
    running = asyncio.create_task(here.manager.run("order:1", job))
    await asyncio.sleep(1)
    await leave(running)
    here.store.down = set()

    assert await here.manager.run("order:1", job) == "receipt-1"
    assert job.runs == 1


@pytest.mark.parametrize(
    ("error", "verb", "status"),
    [
        (PermanentError("no such account"), "fail", IdempotencyStatus.FAILED),
        (KeyError("unknown"), "complete", IdempotencyStatus.COMPLETED),
    ],
    ids=["final", "discarded"],
)
@virtual_time
async def test_the_final_failure_of_a_caller_that_is_cancelled_while_the_store_fails_is_recorded(
    error: Exception, verb: str, status: IdempotencyStatus
) -> None:
    here, job = guarded(), Job(errors=[error])
    work = Work(Key.of("order:1"), failures=FailurePolicy((discard(KeyError),)))
    here.store.down = {verb}
    running = asyncio.create_task(here.manager.execute(work, job.with_attempt))
    await asyncio.sleep(1)
    await leave(running)
    here.store.down = set()

    await here.manager.close()

    assert (await here.record()).status is status
    assert job.runs == 1


@virtual_time
async def test_the_outcome_of_a_cancelled_caller_is_recorded_even_if_the_store_refuses_it_for_a_while() -> None:
    here, job = guarded(), Job()
    here.store.down = {"complete"}
    running = asyncio.create_task(here.manager.run("order:1", job))
    await asyncio.sleep(1)
    here.store.refusal = StoreConfigurationError("complete", "the password has changed")
    await leave(running)
    await asyncio.sleep(10)
    here.store.down = set()

    assert await here.manager.run("order:1", job) == "receipt-1"
    assert job.runs == 1


def test_a_program_that_ends_before_an_outcome_is_recorded_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def program() -> None:
        here = guarded()
        here.store.down = {"complete"}
        running = asyncio.create_task(here.manager.run("order:1", Job()))
        await asyncio.sleep(1)
        await leave(running)
        await asyncio.sleep(1)

    run_virtual(program())

    assert "order:1 has ended, but its outcome is not recorded, so it may run again: the event loop ends" in caplog.text


@virtual_time
async def test_closing_waits_although_a_scope_is_requested_meanwhile() -> None:
    here, job = guarded(), Job()
    here.store.down = {"complete"}
    for key, manager in (("a", here.manager.in_scope("shop")), ("b", here.manager)):
        running = asyncio.create_task(manager.run(key, job))
        await asyncio.sleep(1)
        await leave(running)
    closing = asyncio.create_task(here.manager.close())
    await asyncio.sleep(1)

    here.manager.in_scope("depot")
    here.store.down = set()
    await closing

    assert (await here.record("b")).status is IdempotencyStatus.COMPLETED
