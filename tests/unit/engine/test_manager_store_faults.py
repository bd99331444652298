"""Store faults at every operation: outages, lost answers, rejected requests and lost records."""

from __future__ import annotations

import asyncio

import pytest

from integr8s_idem.config import OnStoreError
from integr8s_idem.engine.work import Executed, HandlerFailed, Work
from integr8s_idem.errors import (
    PermanentError,
    ResultNotStoredError,
    StoreConfigurationError,
    StoreError,
    StoreUnavailableError,
    TransactionAbortedError,
)
from integr8s_idem.keys import Key
from integr8s_idem.records import Completed, IdempotencyStatus
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import LEASE, Guarded, Job, guarded


def work(key: str = "order:1") -> Work:
    return Work(Key.of(key))


async def soon(error: StoreError) -> None:
    """Wait before the next attempt to reach the store."""
    await asyncio.sleep(0.5)


async def later(seconds: float, here: Guarded, *verbs: str) -> None:
    """Make the store available again after `seconds`."""
    await asyncio.sleep(seconds)
    here.store.down -= set(verbs)


@virtual_time
async def test_nothing_runs_without_a_verdict() -> None:
    here, job = guarded(), Job()
    here.store.down.add("reserve")

    with pytest.raises(StoreUnavailableError):
        await here.manager.run("order:1", job)

    assert job.runs == 0
    assert here.observer.counts[Signal.STORE_ERROR] == 1


@virtual_time
async def test_fail_open_runs_the_work_unguarded_and_counts_it() -> None:
    here, job = guarded(on_store_error=OnStoreError.OPEN), Job()
    here.store.down.add("reserve")

    assert await here.manager.run("order:1", job) == "receipt-1"
    assert await here.manager.run("order:1", job) == "receipt-1"

    assert job.runs == 2
    assert here.observer.counts[Signal.UNGUARDED] == 2


@virtual_time
async def test_fail_open_gives_up_a_failing_handler_after_its_attempts() -> None:
    here, job = guarded(on_store_error=OnStoreError.OPEN, max_attempts=3), Job(errors=[ValueError("no")] * 3)
    here.store.down.add("reserve")
    same = work()

    outcomes = [await here.manager.execute(same, job.with_attempt) for _ in range(3)]

    assert [outcome.given_up for outcome in outcomes if isinstance(outcome, HandlerFailed)] == [False, False, True]
    assert [attempt.number for attempt in job.attempts] == [1, 2, 3]
    assert here.observer.counts[Signal.HANDLER_FAILED] == 3


@virtual_time
async def test_fail_open_does_not_wait_for_the_store_after_the_work() -> None:
    here, job = guarded(on_store_error=OnStoreError.OPEN), Job()
    here.store.down.add("complete")

    outcome = await here.manager.execute(work(), job.with_attempt, wait_for_store=soon)

    assert outcome == Executed("receipt-1", 1)
    assert asyncio.get_running_loop().time() < 1
    assert here.observer.counts[Signal.STORE_ERROR] == 1


@virtual_time
async def test_a_rejected_request_does_not_fail_open() -> None:
    here, job = guarded(on_store_error=OnStoreError.OPEN), Job()
    here.store.down.add("reserve")
    here.store.refusal = StoreConfigurationError("reserve", "NOAUTH")

    with pytest.raises(StoreConfigurationError):
        await here.manager.run("order:1", job)

    assert job.runs == 0


@pytest.mark.scenario(10)
@virtual_time
async def test_a_reserve_whose_answer_was_lost_finds_its_own_reservation() -> None:
    here, job = guarded(), Job()
    here.store.lose_answers["reserve"] = 1
    same = work()
    with pytest.raises(StoreUnavailableError):
        await here.manager.execute(same, job.with_attempt)

    outcome = await here.manager.execute(same, job.with_attempt)

    assert outcome == Executed("receipt-1", 1)
    first, second = here.store.requests
    assert first.token == second.token


@virtual_time
async def test_every_reservation_has_its_own_token() -> None:
    here, job = guarded(), Job(errors=[ValueError("no")])
    same = work()

    await here.manager.execute(same, job.with_attempt)
    await here.manager.execute(same, job.with_attempt)

    assert len({request.token for request in here.store.requests}) == 2


@pytest.mark.scenario(11)
@virtual_time
async def test_a_completion_whose_answer_was_lost_is_repeated_safely() -> None:
    here, job = guarded(), Job()
    here.store.lose_answers["complete"] = 1

    assert await here.manager.run("order:1", job) == "receipt-1"

    assert (await here.record()).status is IdempotencyStatus.COMPLETED
    assert here.observer.counts[Signal.RESERVATION_LOST] == 0
    assert job.runs == 1


@virtual_time
async def test_a_brief_outage_does_not_turn_success_into_failure() -> None:
    here, job = guarded(), Job()
    here.store.down.add("complete")

    value, _ = await asyncio.gather(here.manager.run("order:1", job), later(10, here, "complete"))

    assert value == "receipt-1"
    assert (await here.record()).status is IdempotencyStatus.COMPLETED


@virtual_time
async def test_a_brief_outage_after_many_leases_does_not_turn_success_into_failure() -> None:
    here, job = guarded(), Job(seconds=LEASE * 20)
    running = asyncio.create_task(here.manager.run("order:1", job))
    await asyncio.sleep(LEASE * 20 - 1)
    here.store.down.add("complete")

    await later(5, here, "complete")

    assert await running == "receipt-1"
    assert job.runs == 1


@virtual_time
async def test_without_wait_for_store_the_retries_end_with_the_lease() -> None:
    here, job = guarded(), Job()
    here.store.down.add("complete")

    with pytest.raises(ResultNotStoredError, match="order:1 is done"):
        await here.manager.run("order:1", job)

    assert LEASE - 2 < asyncio.get_running_loop().time() <= LEASE
    assert job.runs == 1


@virtual_time
async def test_with_wait_for_store_the_outcome_is_written_after_the_outage() -> None:
    here, job = guarded(), Job()
    here.store.down.add("complete")

    outcome, _ = await asyncio.gather(
        here.manager.execute(work(), job.with_attempt, wait_for_store=soon), later(LEASE * 50, here, "complete")
    )

    assert outcome == Executed("receipt-1", 1)
    assert (await here.record()).status is IdempotencyStatus.COMPLETED


@virtual_time
async def test_a_rejected_completion_raises_an_error_that_the_work_is_done() -> None:
    here, job = guarded(), Job()
    here.store.down.add("complete")
    here.store.refusal = StoreConfigurationError("complete", "NOPERM")

    with pytest.raises(ResultNotStoredError, match="NOPERM"):
        await here.manager.run("order:1", job)

    assert asyncio.get_running_loop().time() < 1


@virtual_time
async def test_with_wait_for_store_rejections_are_retried_like_outages() -> None:
    here, job = guarded(), Job()
    here.store.down.add("complete")
    here.store.refusal = StoreConfigurationError("complete", "NOPERM")

    outcome, _ = await asyncio.gather(
        here.manager.execute(work(), job.with_attempt, wait_for_store=soon), later(LEASE * 3, here, "complete")
    )

    assert outcome == Executed("receipt-1", 1)
    assert job.runs == 1


@virtual_time
async def test_a_failure_that_cannot_be_recorded_raises_the_handlers_error() -> None:
    here, job = guarded(), Job(errors=[PermanentError("no such user")])
    here.store.down.add("fail")

    with pytest.raises(PermanentError, match="no such user"):
        await here.manager.run("order:1", job)


@virtual_time
async def test_with_wait_for_store_a_failure_is_recorded_after_the_outage() -> None:
    here, job = guarded(), Job(errors=[PermanentError("no such user")])
    here.store.down.add("fail")

    outcome, _ = await asyncio.gather(
        here.manager.execute(work(), job.with_attempt, wait_for_store=soon), later(LEASE * 5, here, "fail")
    )

    assert isinstance(outcome, HandlerFailed)
    assert outcome.given_up
    assert (await here.record()).status is IdempotencyStatus.FAILED


@virtual_time
async def test_a_failed_release_lets_the_lease_expire() -> None:
    here, job = guarded(), Job(errors=[ValueError("no")])
    here.store.down.add("release")
    with pytest.raises(ValueError, match="no"):
        await here.manager.run("order:1", job)
    assert await here.manager.count_active() == 1

    await asyncio.sleep(LEASE + 1)

    assert await here.manager.run("order:1", job) == "receipt-1"
    assert here.observer.counts[Signal.TAKEOVER] == 1


@virtual_time
async def test_a_few_failed_renewals_are_harmless() -> None:
    here, job = guarded(), Job(seconds=LEASE * 4)
    here.store.down.add("renew")

    value, _ = await asyncio.gather(here.manager.run("order:1", job), later(LEASE * 0.8, here, "renew"))

    assert value == "receipt-1"
    assert job.runs == 1


@pytest.mark.scenario(45)
@virtual_time
async def test_a_record_lost_during_the_run_is_written_again_and_counted() -> None:
    here, job = guarded(), Job(seconds=5)
    running = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()

    await here.manager.delete("order:1")

    assert await running == "receipt-1"
    assert here.observer.counts[Signal.RECORD_VANISHED] == 1
    assert await here.manager.run("order:1", job) == "receipt-1"
    assert job.runs == 1


@virtual_time
async def test_a_lost_record_is_written_again_even_if_an_answer_is_lost() -> None:
    here, job = guarded(), Job(seconds=5)
    running = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()
    await here.manager.delete("order:1")
    here.store.lose_answers["reserve"] = 1

    assert await running == "receipt-1"

    assert (await here.record()).status is IdempotencyStatus.COMPLETED
    assert here.observer.counts[Signal.RESERVATION_LOST] == 0


@virtual_time
async def test_a_failure_whose_record_was_lost_is_recorded() -> None:
    here, job = guarded(), Job(seconds=5, errors=[PermanentError("no such user")])
    running = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()
    await here.manager.delete("order:1")

    with pytest.raises(PermanentError):
        await running

    assert (await here.record()).status is IdempotencyStatus.FAILED


@virtual_time
async def test_a_duplicate_of_work_whose_completion_is_pending_waits_for_it() -> None:
    here, job = guarded(), Job()
    here.store.down.add("complete")
    first = asyncio.create_task(here.manager.execute(work(), job.with_attempt, wait_for_store=soon))
    await job.started.wait()
    second = asyncio.create_task(here.manager.run("order:1", job))

    await later(20, here, "complete")

    assert isinstance(await first, Executed)
    assert await second == "receipt-1"
    assert isinstance(await here.manager.reserve("order:1"), Completed)
    assert job.runs == 1


@virtual_time
async def test_a_key_is_released_after_an_outage() -> None:
    here = guarded()
    work, job = Work(Key.of("order:1")), Job(errors=[OSError("no")])

    async def wait_for_store(_: StoreError) -> None:
        await asyncio.sleep(1)
        here.store.down.clear()

    here.store.down = {"release"}
    await here.manager.execute(work, job.with_attempt, wait_for_store=wait_for_store)
    again = await here.manager.execute(work, job.with_attempt)

    assert again == Executed("receipt-1", 2)
    assert asyncio.get_running_loop().time() == pytest.approx(1)


@virtual_time
async def test_runs_rolled_back_by_the_database_are_not_failures() -> None:
    here = guarded(max_attempts=2)
    aborted = [TransactionAbortedError("order:1", "a deadlock") for _ in range(4)]
    work, job = Work(Key.of("order:1")), Job(errors=[*aborted, OSError("one"), OSError("two")])

    outcomes = [await here.manager.execute(work, job.with_attempt) for _ in range(6)]

    assert [outcome.given_up for outcome in outcomes if isinstance(outcome, HandlerFailed)] == [False] * 5 + [True]


@virtual_time
async def test_the_attempts_of_others_still_count_here_if_their_record_is_lost() -> None:
    other = guarded(max_attempts=9)
    here, job = guarded(other.store, max_attempts=9), Job(errors=[OSError("no")] * 4)
    for _ in range(2):
        await other.manager.execute(work(), job.with_attempt)
    mine = work()
    await here.manager.execute(mine, job.with_attempt)

    assert await here.manager.delete("order:1")
    await here.manager.execute(mine, job.with_attempt)

    assert [attempt.number for attempt in job.attempts] == [1, 2, 3, 4]


@virtual_time
async def test_attempts_before_a_copy_count_once_if_its_record_is_lost_after_another_attempt() -> None:
    other = guarded(max_attempts=9)
    here, job = guarded(other.store, max_attempts=9), Job(errors=[OSError("no")] * 4)
    for _ in range(2):
        await other.manager.execute(work(), job.with_attempt)
    copied = work()
    copied.copied_attempt = 2
    await here.manager.execute(copied, job.with_attempt)

    assert await here.manager.delete("order:1")
    await here.manager.execute(copied, job.with_attempt)

    assert [attempt.number for attempt in job.attempts] == [1, 2, 3, 4]
