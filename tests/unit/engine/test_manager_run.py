"""`IdempotencyManager.run` runs work once per key and returns the same result to every caller."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem.config import OnFailure, OnInProgress, OnKeyReused
from integr8s_idem.engine.executor import _time_left
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.work import Work
from integr8s_idem.errors import (
    ApplicationError,
    IdempotencyConflictError,
    InProgressError,
    InvalidKeyError,
    KeyReusedError,
    PermanentError,
    PreviouslyFailedError,
)
from integr8s_idem.keys import Key
from integr8s_idem.records import IdempotencyStatus, InProgress, KeyReused
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import LEASE, Job, guarded
from tests.support.versions import OrderPlaced, OrderPlacedLater

ONE, TWO = b"1" * 16, b"2" * 16


@pytest.mark.scenario(1)
@virtual_time
async def test_a_second_call_gets_the_result_of_the_first_without_running() -> None:
    here, job = guarded(), Job()

    first = await here.manager.run("order:1", job)
    second = await here.manager.run("order:1", job)

    assert (first, second) == ("receipt-1", "receipt-1")
    assert job.runs == 1
    assert here.observer.counts[Signal.DUPLICATE_BLOCKED] == 1


@pytest.mark.scenario(2)
@virtual_time
async def test_one_of_fifty_workers_gets_the_key_and_all_get_its_result() -> None:
    store, job = guarded().store, Job(seconds=5)
    workers = [guarded(store).manager for _ in range(50)]

    results = await asyncio.gather(*(worker.run("order:1", job) for worker in workers))

    assert job.runs == 1
    assert results == ["receipt-1"] * 50


@pytest.mark.scenario(2)
@virtual_time
async def test_one_of_fifty_calls_in_a_process_runs_and_the_others_are_woken() -> None:
    here, job = guarded(), Job(seconds=5.5)

    results = await asyncio.gather(*(here.manager.run("order:1", job) for _ in range(50)))

    assert job.runs == 1
    assert results == ["receipt-1"] * 50
    assert asyncio.get_running_loop().time() == pytest.approx(5.5)


@virtual_time
async def test_the_work_is_done_again_once_its_ttl_has_passed() -> None:
    here, job = guarded(), Job()
    await here.manager.run("order:1", job, ttl=timedelta(hours=1))

    await asyncio.sleep(3_599)
    await here.manager.run("order:1", job)
    assert job.runs == 1
    await asyncio.sleep(2)
    await here.manager.run("order:1", job)

    assert job.runs == 2


@pytest.mark.scenario(6)
@virtual_time
async def test_two_scopes_never_share_a_record() -> None:
    billing = guarded(scope="billing")
    audit, job = guarded(billing.store, scope="audit"), Job()

    await billing.manager.run("order:1", job)
    await audit.manager.run("order:1", job)

    assert job.runs == 2


@pytest.mark.scenario(5)
@virtual_time
async def test_a_key_reused_with_another_payload_is_rejected() -> None:
    here, job = guarded(), Job()
    await here.manager.run("order:1", job, fingerprint=ONE)

    with pytest.raises(KeyReusedError, match=r"order:1 .* was not done"):
        await here.manager.run("order:1", job, fingerprint=TWO)

    assert job.runs == 1
    assert here.observer.counts[Signal.KEY_REUSED] == 1


@pytest.mark.parametrize("first", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("changed", range(16))
@virtual_time
async def test_each_of_the_16_bytes_from_a_caller_is_compared(first: int, changed: int) -> None:
    here, job = guarded(), Job()
    payload = bytearray([first, *range(15)])
    await here.manager.run("order:1", job, fingerprint=bytes(payload))
    payload[changed] ^= 1

    with pytest.raises(KeyReusedError):
        await here.manager.run("order:1", job, fingerprint=bytes(payload))
    reused = await here.manager.acquire_batch(["order:1"], fingerprint=lambda _: bytes(payload))

    assert isinstance(await here.manager.reserve("order:1", fingerprint=bytes(payload)), KeyReused)
    assert isinstance(reused["order:1"], KeyReused)


@virtual_time
async def test_an_event_as_the_payload_is_compared_by_its_fields() -> None:
    here, job = guarded(), Job()
    await here.manager.run("order:1", job, fingerprint=OrderPlaced(event_id="1"))

    await here.manager.run("order:1", job, fingerprint=OrderPlaced(event_id="2"))
    await here.manager.run("order:1", job, fingerprint=OrderPlacedLater(event_id="3"))
    with pytest.raises(KeyReusedError):
        await here.manager.run("order:1", job, fingerprint=OrderPlaced(event_id="1", order_id="2"))

    assert job.runs == 1


@virtual_time
async def test_under_the_run_policy_another_payload_runs_unguarded() -> None:
    here, job = guarded(on_key_reused=OnKeyReused.RUN), Job()
    await here.manager.run("order:1", job, fingerprint=ONE)

    await here.manager.run("order:1", job, fingerprint=TWO)
    await here.manager.run("order:1", job, fingerprint=TWO)

    assert job.runs == 3
    assert here.observer.counts[Signal.UNGUARDED] == 2


@virtual_time
async def test_an_error_is_raised_unchanged_and_the_next_call_retries() -> None:
    here, error = guarded(), KeyError("no such card")
    job = Job(errors=[error])

    with pytest.raises(KeyError) as caught:
        await here.manager.run("order:1", job)

    assert caught.value is error
    assert await here.manager.run("order:1", job) == "receipt-1"
    assert (await here.record()).attempt == 2


@virtual_time
async def test_after_the_last_attempt_the_key_is_failed_and_blocks() -> None:
    here, job = guarded(max_attempts=3), Job(errors=[ValueError(f"no {n}") for n in range(3)])

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            await here.manager.run("order:1", job)

    with pytest.raises(PreviouslyFailedError, match="attempt 3: ValueError: no 2"):
        await here.manager.run("order:1", job)
    assert job.runs == 3
    assert (await here.record()).status is IdempotencyStatus.FAILED


@virtual_time
async def test_a_permanent_error_gives_up_immediately() -> None:
    here, job = guarded(), Job(errors=[PermanentError("no such user")])

    with pytest.raises(PermanentError):
        await here.manager.run("order:1", job)

    with pytest.raises(PreviouslyFailedError, match="no such user"):
        await here.manager.run("order:1", job)


@virtual_time
async def test_with_on_failure_block_one_failure_blocks_until_the_ttl_ends() -> None:
    here, job = guarded(on_failure=OnFailure.BLOCK), Job(errors=[ValueError("no")])
    with pytest.raises(ValueError, match="no"):
        await here.manager.run("order:1", job)

    with pytest.raises(PreviouslyFailedError):
        await here.manager.run("order:1", job)

    await asyncio.sleep(3_601)
    assert await here.manager.run("order:1", job) == "receipt-1"


@virtual_time
async def test_a_duplicate_may_raise_instead_of_waiting() -> None:
    here, job = guarded(on_in_progress=OnInProgress.RAISE, owner="pod-7"), Job(seconds=5)
    first = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()

    with pytest.raises(InProgressError, match=r"by pod-7 \(attempt 1\); its lease ends in 30 s"):
        await here.manager.run("order:1", job)

    assert await first == "receipt-1"


@virtual_time
async def test_a_duplicate_may_skip_and_is_counted() -> None:
    here, job = guarded(), Job(seconds=5)
    first = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()

    assert await here.manager.run("order:1", job, on_in_progress=OnInProgress.SKIP) is None

    assert await first == "receipt-1"
    assert here.observer.counts[Signal.DUPLICATE_BLOCKED] == 1


@pytest.mark.parametrize("seconds", [0.0, 0.3, 7.0])
@virtual_time
async def test_a_wait_is_bounded_and_ends_in_an_error(seconds: float) -> None:
    here, job = guarded(), Job(seconds=1_000)
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(here.manager.run("order:1", job))
    await job.started.wait()
    began = loop.time()

    with pytest.raises(InProgressError):
        await here.manager.run("order:1", job, wait_timeout=timedelta(seconds=seconds))

    assert loop.time() - began == pytest.approx(seconds, abs=0.01)
    assert await first == "receipt-1"


def test_a_wait_that_is_too_short_for_the_clock_has_ended() -> None:
    found = InProgress(key="order:1", attempt=1, retry_after=timedelta(seconds=1))

    with pytest.raises(IdempotencyConflictError):
        _time_left(Work(Key.of("order:1")), found, timedelta(seconds=43), 43 - 1e-14)


@virtual_time
async def test_a_wait_of_hours_for_another_process_ends_with_its_result() -> None:
    there, job = guarded(), Job(seconds=4 * 3_600)
    here = guarded(there.store)
    first = asyncio.create_task(there.manager.run("order:1", job))
    await job.started.wait()

    result = await here.manager.run("order:1", job, wait_timeout=timedelta(hours=5))

    assert result == await first
    assert job.runs == 1
    assert asyncio.get_running_loop().time() < 4 * 3_600 + 2


@pytest.mark.scenario(4)
@virtual_time
async def test_waiting_calls_take_over_when_the_first_one_fails() -> None:
    here, job = guarded(), Job(seconds=1, errors=[ValueError("no")])

    results = await asyncio.gather(*(here.manager.run("order:1", job) for _ in range(5)), return_exceptions=True)

    assert [type(result) for result in results].count(ValueError) == 1
    assert results.count("receipt-1") == 4
    assert job.runs == 2


async def in_new_task(work: Coroutine[Any, Any, object]) -> object:
    return await asyncio.create_task(work)


async def in_current_task(work: Coroutine[Any, Any, object]) -> object:
    return await work


@pytest.mark.scenario(16)
@pytest.mark.parametrize("run_inner", [in_current_task, in_new_task])
@pytest.mark.parametrize("policy", [OnInProgress.WAIT, OnInProgress.RAISE])
@virtual_time
async def test_a_run_that_requests_its_own_key_raises_an_error(run_inner: Any, policy: OnInProgress) -> None:
    here = guarded(on_in_progress=policy)

    async def inner() -> None:
        await here.manager.run("order:2", recursive)

    async def recursive() -> None:
        await run_inner(here.manager.run("order:1", inner))

    with pytest.raises(ApplicationError, match=r"order:1 was requested within its own run \(attempt 1\)"):
        await here.manager.run("order:1", inner)

    assert asyncio.get_running_loop().time() == 0
    assert await here.manager.count_active() == 0


@virtual_time
async def test_a_task_of_a_failed_run_may_wait_for_the_next_run() -> None:
    here, later = guarded(), list[asyncio.Task[str]]()

    async def afterwards() -> str:
        await asyncio.sleep(10)
        return await here.manager.run("order:1", Job())

    async def work() -> None:
        later.append(asyncio.create_task(afterwards()))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await here.manager.run("order:1", work)
    elsewhere = asyncio.create_task(guarded(here.store).manager.run("order:1", Job(result="elsewhere", seconds=20)))

    assert await later[0] == await elsewhere == "elsewhere"


@virtual_time
async def test_runs_side_by_side_in_one_task_group_wait_for_each_other() -> None:
    here, job = guarded(), Job(seconds=5)

    async def outer() -> list[object]:
        return list(await asyncio.gather(*(here.manager.run("order:2", job) for _ in range(3))))

    assert await here.manager.run("order:1", outer) == ["receipt-1"] * 3
    assert job.runs == 1


@pytest.mark.parametrize("key", ["", None, 7, b"order:1"])
@virtual_time
async def test_invalid_keys_are_rejected(key: object) -> None:
    with pytest.raises(InvalidKeyError, match="a key must be a non-empty string"):
        await guarded().manager.run(key, Job())  # type: ignore[arg-type]


def test_the_error_of_a_manager_without_a_repository_names_the_options() -> None:
    with pytest.raises(ApplicationError, match="MemoryIdempotencyRepository"):
        IdempotencyManager(scope="billing")


class Panic(BaseException):
    """As the panics of Rust extensions."""


@pytest.mark.parametrize("seconds", [0, 3 * LEASE], ids=["at once", "after renewals"])
@virtual_time
async def test_after_an_error_that_is_not_an_exception_the_key_is_reserved_until_the_lease_ends(seconds: float) -> None:
    here, error = guarded(), Panic("broken")
    job = Job(errors=[error], seconds=seconds)

    with pytest.raises(Panic) as caught:
        await here.manager.run("order:1", job)
    job.seconds = 0

    assert caught.value is error
    with pytest.raises(InProgressError):
        await here.manager.run("order:1", job, on_in_progress=OnInProgress.RAISE)
    await asyncio.sleep(LEASE + 1)
    assert await here.manager.run("order:1", job) == "receipt-1"
    assert (await here.record()).attempt == 2
