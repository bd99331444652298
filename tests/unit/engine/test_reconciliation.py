"""`manager.run(…, reconcile=…)`: when the function is asked, and what callers get."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.config.durations import Duration
from integr8s_idem.errors import ApplicationError, OutcomeUnknownError, PreviouslyFailedError
from integr8s_idem.reconciliation import Answer, Done, NotDone, Unknown
from integr8s_idem.records import IdempotencyStatus, Reserved
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import LEASE, Guarded, Job, guarded, plain_manager


class Question:
    """A reconcile function with planned answers, of which the last one is repeated."""

    def __init__(self, *answers: Answer | BaseException) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def __call__(self) -> Answer:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


async def crash(here: Guarded, key: str = "order:1") -> None:
    """Reserve a key and crash."""
    assert isinstance(await here.manager.reserve(key), Reserved)
    await asyncio.sleep(LEASE)


@virtual_time
async def test_the_first_attempt_does_not_ask() -> None:
    here, job, find = guarded(), Job(), Question(Done("found"))

    assert await here.manager.run("order:1", job, reconcile=find) == "receipt-1"
    assert await here.manager.run("order:1", job, reconcile=find) == "receipt-1"
    assert (job.runs, find.asked) == (1, 0)


@virtual_time
async def test_an_effect_before_a_crash_is_found_and_duplicates_get_its_result() -> None:
    here, job, find = guarded(), Job(), Question(Done("found"))
    await crash(here)

    assert await here.manager.run("order:1", job, reconcile=find) == "found"
    assert await here.manager.run("order:1", job) == "found"
    assert (job.runs, find.asked) == (0, 1)
    assert (await here.record()).attempt == 2


@virtual_time
@pytest.mark.parametrize("error", [TimeoutError(), ConnectionError(), asyncio.CancelledError()], ids=repr)
async def test_the_call_after_one_that_failed_asks(error: BaseException) -> None:
    here, job, find = guarded(), Job(errors=[error]), Question(Done("found"))
    with pytest.raises(type(error)):
        await here.manager.run("order:1", job, reconcile=find)

    assert await here.manager.run("order:1", job, reconcile=find) == "found"
    assert (job.runs, find.asked) == (1, 1)


@virtual_time
async def test_the_call_after_one_that_was_cancelled_asks() -> None:
    here, job, find = guarded(), Job(seconds=5), Question(Done("found"))
    running = asyncio.create_task(here.manager.run("order:1", job, reconcile=find))
    await job.started.wait()
    running.cancel()
    await asyncio.wait({running})
    await asyncio.sleep(0.1)

    assert await here.manager.run("order:1", job, reconcile=find) == "found"
    assert job.runs == 1


@virtual_time
async def test_a_concurrent_duplicate_waits_for_the_answer() -> None:
    here, job = guarded(), Job()
    await crash(here)

    async def find() -> Answer:
        await asyncio.sleep(LEASE * 3)  # the lease is renewed meanwhile
        return Done("found")

    calls = [here.manager.run("order:1", job, reconcile=find, wait_timeout=LEASE * 9) for _ in range(5)]

    assert await asyncio.gather(*calls) == ["found"] * 5
    assert job.runs == 0


@virtual_time
async def test_the_function_runs_in_the_same_attempt_after_not_done() -> None:
    here, job, find = guarded(), Job(), Question(NotDone())
    await crash(here)

    assert await here.manager.run("order:1", job, reconcile=find) == "receipt-1"
    assert (job.runs, find.asked) == (1, 1)
    assert (await here.record()).attempt == 2


@virtual_time
async def test_an_unknown_outcome_is_raised_and_the_key_is_free() -> None:
    here, job, find = guarded(), Job(), Question(Unknown(60, "pending"), Done("found"))
    await crash(here)

    with pytest.raises(OutcomeUnknownError, match="asked for again after 60 s: pending") as caught:
        await here.manager.run("order:1", job, reconcile=find)

    assert caught.value.delay == timedelta(minutes=1)
    assert await here.manager.run("order:1", job, reconcile=find) == "found"
    assert job.runs == 0


@virtual_time
@pytest.mark.parametrize("on_failure", ["retry", "block"])
async def test_an_outcome_that_remains_unknown_is_given_up_after_the_last_attempt(on_failure: str) -> None:
    here, job, find = guarded(max_attempts=3, on_failure=on_failure), Job(), Question(Unknown(1))
    await crash(here)

    for _ in range(2):
        with pytest.raises(OutcomeUnknownError):
            await here.manager.run("order:1", job, reconcile=find)

    assert (await here.record()).status is IdempotencyStatus.FAILED
    with pytest.raises(PreviouslyFailedError, match="OutcomeUnknownError"):
        await here.manager.run("order:1", job, reconcile=find)
    assert (job.runs, find.asked) == (0, 2)


@virtual_time
async def test_an_error_of_the_reconcile_function_is_raised_and_counts_as_an_attempt() -> None:
    here, job, find = guarded(max_attempts=2), Job(), Question(OSError("the bank is down"))
    await crash(here)

    with pytest.raises(OSError, match="the bank is down"):
        await here.manager.run("order:1", job, reconcile=find)

    assert (await here.record()).status is IdempotencyStatus.FAILED
    assert job.runs == 0


@virtual_time
async def test_a_reconcile_function_that_is_cancelled_releases_the_key() -> None:
    here, job, asked = guarded(), Job(), asyncio.Event()
    await crash(here)

    async def find() -> Answer:
        asked.set()
        await asyncio.sleep(3600)
        return NotDone()

    running = asyncio.create_task(here.manager.run("order:1", job, reconcile=find))
    await asked.wait()
    running.cancel()
    await asyncio.wait({running})
    await asyncio.sleep(0.1)

    assert running.cancelled()
    assert await here.manager.run("order:1", job, reconcile=Question(NotDone())) == "receipt-1"
    assert (await here.record()).attempt == 3


async def test_the_function_does_not_start_on_a_lease_that_has_ended_during_the_question() -> None:
    manager, job, asked = plain_manager(processing_timeout_seconds=1), Job(errors=[ConnectionError()]), list[str]()

    async def find() -> Answer:
        asked.append("asked")
        if len(asked) == 1:
            time.sleep(1.2)  # noqa: ASYNC251  # as a blocking client: the lease is not renewed meanwhile
        return NotDone()

    with pytest.raises(ConnectionError):
        await manager.run("order:1", job, reconcile=find)

    assert await manager.run("order:1", job, reconcile=find) == "receipt-1"
    assert len(asked) == 2
    assert job.runs == 2


@virtual_time
async def test_answers_are_counted() -> None:
    here, job = guarded(max_attempts=9), Job()
    await crash(here)
    for answer in (OSError(), Unknown(1), NotDone()):
        with contextlib.suppress(OSError, OutcomeUnknownError):
            await here.manager.run("order:1", job, reconcile=Question(answer))

    assert here.observer.counts[Signal.RECONCILED] == 3


@virtual_time
async def test_what_is_not_an_answer_is_an_error() -> None:
    here, job = guarded(), Job()
    await crash(here)

    async def find() -> Any:
        return "found"

    with pytest.raises(ApplicationError, match=r"returned str: return Done\(result\), NotDone\(\) or Unknown"):
        await here.manager.run("order:1", job, reconcile=find)
    assert job.runs == 0


@virtual_time
async def test_a_reconcile_function_that_is_not_async_is_an_error_that_says_so() -> None:
    here, job = guarded(), Job()
    await crash(here)

    def find() -> Any:
        return NotDone()

    with pytest.raises(ApplicationError, match=r"find is not an async function: it returned NotDone, .* async def"):
        await here.manager.run("order:1", job, reconcile=find)
    assert job.runs == 0


@virtual_time
async def test_the_result_of_calling_the_reconcile_function_is_refused() -> None:
    here, find = guarded(), Question(NotDone())

    with pytest.raises(ApplicationError, match="pass the function itself"):
        await here.manager.run("order:1", Job(), reconcile=find())  # type: ignore[arg-type]


@pytest.mark.parametrize("delay", [-1, "60", None, True])
def test_the_delay_of_an_unknown_outcome_must_be_a_duration(delay: Any) -> None:
    with pytest.raises(ApplicationError, match="retry_after"):
        Unknown(retry_after=delay)


@pytest.mark.parametrize("delay", [0, 1.5, timedelta(minutes=1)])
def test_answers_are_values(delay: Duration) -> None:
    assert Unknown(delay, "why") == Unknown(delay, reason="why") != Unknown(delay)
    assert Done({"a": 1}) == Done({"a": 1}) != Done()
    assert NotDone() == NotDone()


class JoiningStore(MemoryIdempotencyRepository):
    """A store that claims to work within the caller's transaction."""

    def joined(self, held: Any) -> Any:
        return held


async def test_a_run_in_a_transaction_of_the_caller_takes_no_reconcile_function() -> None:
    manager, job = IdempotencyManager(repository=JoiningStore(), scope="billing"), Job()

    async with manager.in_transaction(object()):
        with pytest.raises(ApplicationError, match="it runs in your transaction"):
            await manager.run("order:1", job, reconcile=Question(NotDone()))
    assert job.runs == 0
