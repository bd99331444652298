"""Batches of the executor: no reservation is left behind, and no outcome is lost."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem.engine.run import Returned, RunOptions
from integr8s_idem.engine.work import Attempt, Executed, HandlerFailed, Isolation, Work
from integr8s_idem.errors import LeaseLostError, StoreUnavailableError
from integr8s_idem.keys import Key
from integr8s_idem.records import Completed, IdempotencyStatus, InProgress, Previous, Reserved
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import LEASE, Guarded, Job, guarded
from tests.support.pipelines import leases_left, turns


def works(number: int) -> list[Work]:
    return [Work(Key.of(f"order:{each}"), event_type="order") for each in range(number)]


async def never_down(error: Exception) -> None:
    raise AssertionError("the store answers") from error


PATIENT = RunOptions(never_down)


async def reserved(here: Guarded, together: list[Work]) -> list[Reserved]:
    verdicts = await here.manager.executor.reserve_together(together)
    return [verdict for verdict in verdicts if isinstance(verdict, Reserved)]


async def performed(here: Guarded, work: Work, reservation: Reserved, value: object = "done") -> Returned[Any]:
    async def function(attempt: Attempt) -> object:
        return value

    executor = here.manager.executor
    returned = await executor.reserved(work, reservation, executor.now(), PATIENT).call(function)
    assert isinstance(returned, Returned)
    return returned


async def all_performed(here: Guarded, number: int) -> list[Returned[Any]]:
    together = works(number)
    found = await reserved(here, together)
    return [await performed(here, work, each) for work, each in zip(together, found, strict=True)]


@virtual_time
async def test_a_batch_is_reserved_in_one_call_and_every_verdict_counted() -> None:
    here = guarded()
    await here.manager.run("order:1", Job())
    here.store.calls.clear()

    verdicts = await here.manager.executor.reserve_together([*works(3), *works(1)])

    assert [type(verdict) for verdict in verdicts] == [Reserved, Completed, Reserved, InProgress]
    assert here.store.calls == {"reserve": 1}
    assert here.observer.counts[Signal.CACHE_MISS] == 3
    assert here.observer.counts[Signal.CACHE_HIT] == 2


@virtual_time
async def test_empty_batches_do_not_call_the_store() -> None:
    here = guarded()
    store_client = here.manager._store_client

    assert await store_client.reserve_together([]) == []
    assert await store_client.complete_together([]) == []
    assert await store_client.release_together([]) == []
    assert here.store.calls == {}


@pytest.mark.parametrize("steps", range(8))
@virtual_time
async def test_a_caller_cancelled_at_any_step_releases_its_reservations(steps: int) -> None:
    here = guarded()
    asking = asyncio.create_task(here.manager.executor.reserve_together(works(5)))
    await turns(steps)
    asking.cancel()
    await asyncio.wait({asking})

    if asking.cancelled():
        assert await leases_left(here) == []
        again = await reserved(here, works(5))
        assert {each.previous for each in again} <= {Previous.NONE, Previous.RELEASED}
        assert len(again) == 5


@virtual_time
async def test_reservations_are_released_if_the_caller_is_gone_before_the_answer() -> None:
    here = guarded()
    here.store.held["reserve"] = asyncio.Event()
    asking = asyncio.create_task(here.manager.executor.reserve_together(works(5)))
    await turns(3)
    asking.cancel()
    await asyncio.wait({asking})
    here.store.held["reserve"].set()

    assert await leases_left(here) == []


@pytest.mark.parametrize("verb", ["reserve", "complete", "release"])
@virtual_time
async def test_an_error_after_the_caller_was_cancelled_is_ignored(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    here = guarded()
    done = await all_performed(here, 2)
    here.store.held[verb], here.store.down = asyncio.Event(), {verb}
    calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "reserve": lambda: here.manager.executor.reserve_together(works(2)),
        "complete": lambda: here.manager.executor.complete_together(done),
        "release": lambda: here.manager._store_client.release_together([each.completion.reservation for each in done]),  # type: ignore[union-attr]
    }
    asking = asyncio.create_task(calls[verb]())
    await turns(3)
    asking.cancel()
    await asyncio.wait({asking})
    here.store.held[verb].set()
    await here.manager.close()
    gc.collect()

    assert asking.cancelled()
    assert not [record for record in caplog.records if "never retrieved" in record.message]


@virtual_time
async def test_outcomes_whose_writer_is_cancelled_while_the_store_does_not_answer_are_written_later() -> None:
    here = guarded()
    done = await all_performed(here, 4)
    here.store.held["complete"], here.store.down = asyncio.Event(), {"complete"}
    writing = asyncio.create_task(here.manager.executor.complete_together(done))
    await turns(3)
    writing.cancel()
    await asyncio.wait({writing})
    here.store.held["complete"].set()
    await asyncio.sleep(5)
    here.store.down = set()
    await here.manager.close()

    records = await here.store.get([each.completion.reservation.key for each in done if each.completion is not None])
    assert [record and record.status for record in records] == ["completed"] * 4


@pytest.mark.parametrize("steps", range(6))
@virtual_time
async def test_outcomes_are_written_even_if_the_writer_is_cancelled(steps: int) -> None:
    here = guarded()
    done = await all_performed(here, 4)
    writing = asyncio.create_task(here.manager.executor.complete_together(done))
    await turns(steps + 1)
    writing.cancel()
    await asyncio.wait({writing})
    await here.manager.close()

    assert [(await here.record(f"order:{each}")).status for each in range(4)] == [IdempotencyStatus.COMPLETED] * 4
    assert await leases_left(here) == []


@virtual_time
async def test_reservations_are_released_together_even_if_the_caller_is_cancelled() -> None:
    here = guarded()
    found = await reserved(here, works(4))
    releasing = asyncio.create_task(here.manager._store_client.release_together(found))
    await turns(1)
    releasing.cancel()
    await asyncio.wait({releasing})

    assert await leases_left(here) == []
    assert here.store.calls["release"] == 1


@virtual_time
async def test_a_run_ends_when_its_outcome_is_written() -> None:
    here = guarded()
    (done,) = await all_performed(here, 1)
    ended = done.run.ended()
    assert (done.run.is_over, ended.done()) == (False, False)

    assert await here.manager.executor.complete_together([done]) == [True]

    assert (done.run.is_over, ended.done()) == (True, True)
    assert here.manager.executor.runs.keys() == []


@virtual_time
async def test_a_waiting_caller_in_this_process_is_woken_when_a_run_ends() -> None:
    here = guarded()
    (done,) = await all_performed(here, 1)
    again: asyncio.Task[Any] = asyncio.create_task(here.manager.run("order:0", Job()))
    await asyncio.sleep(0.01)

    await here.manager.executor.complete_together([done])
    before = asyncio.get_running_loop().time()

    assert await again == "done"
    assert asyncio.get_running_loop().time() == before


@virtual_time
async def test_a_lost_reservation_in_a_batch_does_not_affect_the_others() -> None:
    here = guarded()
    done = await all_performed(here, 3)
    key = done[1].run.attempt.key
    await here.store.delete([key])
    executor = here.manager.executor

    assert await executor.complete_together(done) == [True, False, True]
    assert [each.run.is_over for each in done] == [True, False, True]
    assert await done[1].run.complete(done[1]) == Executed("done", 1)

    assert all(each.run.is_over for each in done)
    assert here.observer.counts[Signal.RECORD_VANISHED] == 1


@virtual_time
async def test_a_reservation_taken_by_another_worker_is_lost() -> None:
    here = guarded()
    (done,) = await all_performed(here, 1)
    await here.store.delete([done.run.attempt.key])
    await here.manager.reserve("order:0")
    executor = here.manager.executor

    assert await executor.complete_together([done]) == [False]
    with pytest.raises(LeaseLostError):
        await done.run.complete(done)

    assert done.run.is_over
    assert executor.runs.keys() == []


@virtual_time
async def test_outcomes_without_an_answer_are_completed_one_by_one() -> None:
    here = guarded()
    done = await all_performed(here, 3)
    here.store.lose_answers["complete"] = 1
    executor = here.manager.executor

    with pytest.raises(StoreUnavailableError):
        await executor.complete_together(done)
    ends = [await each.run.complete(each) for each in done]

    assert ends == [Executed("done", 1)] * 3
    assert await leases_left(here) == []


@virtual_time
async def test_closing_the_manager_waits_for_pending_outcomes() -> None:
    here = guarded()
    done = await all_performed(here, 3)

    for each in done:
        each.run.complete_later(each)

    assert all(each.run.is_over for each in done)
    assert await leases_left(here) == []
    assert (await here.record("order:2")).status is IdempotencyStatus.COMPLETED


@virtual_time
async def test_a_failed_or_cancelled_run_ends_and_releases_its_key() -> None:
    here = guarded()
    executor, (first, second) = here.manager.executor, works(2)
    one, two = await reserved(here, [first, second])

    async def fails(attempt: Attempt) -> None:
        raise OSError("later")

    async def waits(attempt: Attempt) -> None:
        await asyncio.sleep(100)

    failed = await executor.reserved(first, one, 0.0, PATIENT).call(fails)
    waiting = asyncio.create_task(executor.reserved(second, two, 0.0, PATIENT).call(waits))
    await asyncio.sleep(LEASE * 2)  # the lease is renewed in the meantime
    waiting.cancel()
    await asyncio.wait({waiting})

    assert isinstance(failed, HandlerFailed)
    assert not failed.given_up
    assert waiting.cancelled()
    assert await leases_left(here) == []
    assert executor.runs.current() is None


@virtual_time
async def test_works_of_a_batch_are_requested_like_single_works() -> None:
    client = guarded().manager.executor.client
    together = works(4)
    together[1].token = b"kept token 16 by"
    together[2].ttl = timedelta(days=3)
    together[3].isolation = Isolation.ALONE

    requests = client.requests(together)

    assert [client.request(work) for work in together] == requests  # with the tokens that the batch has chosen
    assert len({request.token for request in requests}) == 4
    assert requests[1].token == b"kept token 16 by"
