"""The pipeline when workers or tasks are cancelled, stores misbehave, or the library has a bug."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

from integr8s_idem.config import OnKeyReused
from integr8s_idem.handlers.dispatcher import EventDispatcher, EventRouter
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.records import Completion, IdempotencyStatus, ReserveRequest, Verdict
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker import ServiceWorker
from integr8s_idem.worker.delivery_processor import DeliveryProcessor
from integr8s_idem.worker.reserver import Reserver
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import RunningWorker, running
from tests.support.guarded import guarded
from tests.support.pipelines import (
    TOPIC,
    Depot,
    ParcelSent,
    all_committed,
    completed_parcels,
    dispatcher_of,
    key_of,
    leases_left,
    parcels,
    reserved_by_another,
    sent,
    turns,
    unfinished,
)


class Panic(BaseException):
    """As the panics of Rust extensions."""


async def cancel(worker: RunningWorker) -> None:
    worker.task.cancel()
    await asyncio.wait({worker.task}, timeout=3_600)


def own_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def failure_of(dispatcher: EventDispatcher, broker: FakeBroker, **service: Any) -> tuple[ServiceWorker, str]:
    """Run a worker until it fails, and return it with the error's text."""
    try:
        async with running(dispatcher, broker, **service) as worker:
            await asyncio.wait({worker.task}, timeout=3_600)
    except (RuntimeError, ValueError, Panic) as error:
        return worker.worker, str(error)
    raise AssertionError("the worker did not fail")


@pytest.mark.parametrize("ordering", ["partition", "key", "none"])
@pytest.mark.parametrize("seconds", [0.0, 0.1])
@virtual_time
async def test_a_worker_cancelled_at_any_step_releases_everything_and_loses_no_outcome(
    ordering: str, seconds: float
) -> None:
    for step in range(100):
        here, depot = guarded(), Depot(seconds=seconds)
        broker = sent(30, keys=3)
        async with running(dispatcher_of(depot.handle, here), broker, ordering=ordering, concurrency=5) as worker:
            await turns(step)
            await cancel(worker)
            started = list(depot.started)
            await asyncio.sleep(10)

            assert depot.started == started, "a handler started after the worker had ended"
            assert unfinished(worker.worker) == {}
            assert await leases_left(here) == []
            assert await completed_parcels(here) == set(depot.done)
            assert broker.committed.get(TOPIC, 0) <= len(depot.done)


@virtual_time
async def test_a_worker_cancelled_while_the_store_is_slow_loses_no_outcome() -> None:
    for step in range(25):
        here, depot, broker = guarded(), Depot(), sent(30, keys=10)
        here.store.held["complete"] = asyncio.Event()
        async with running(dispatcher_of(depot.handle, here), broker, ordering="key", concurrency=5) as worker:
            while not here.store.calls["complete"]:
                await turns(1)
            await turns(step)
            await cancel(worker)
            here.store.held["complete"].set()
            await asyncio.sleep(10)

            assert unfinished(worker.worker) == {}
            assert await leases_left(here) == []
            assert await completed_parcels(here) == set(depot.done)


@virtual_time
async def test_a_worker_continues_after_tasks_were_cancelled_before_their_first_step() -> None:
    here, depot, broker = guarded(), Depot(), sent(20, keys=5)
    async with running(dispatcher_of(depot.handle, here), broker, ordering="key", concurrency=5) as worker:
        pipeline = worker.worker._pipeline
        for _ in range(60):
            # Replacing a client cancels all tasks as well.
            for task in pipeline.tasks:
                task.cancel()
            await asyncio.sleep(0)
        broker.publish(*parcels(30)[20:])
        await worker.until(lambda: set(range(20, 30)) <= set(depot.done))
        await worker.until(lambda: unfinished(worker.worker) == {})

    assert await leases_left(here) == []
    assert await completed_parcels(here) == set(depot.done)


@virtual_time
async def test_a_worker_whose_retry_ignores_cancellation_is_stuck() -> None:
    depot, broker = Depot(errors={0: [OSError("not yet")]}), sent(1)
    may_end = asyncio.Event()

    async def stubborn(event: ParcelSent) -> None:
        await depot.handle(event)
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    async with running(dispatcher_of(stubborn, guarded()), broker) as worker:
        await worker.until(lambda: depot.done == [0])
        await cancel(worker)

        stuck = worker.worker.stuck
        may_end.set()
        await asyncio.sleep(1)

        assert stuck
        assert unfinished(worker.worker) == {}


@pytest.mark.parametrize("verb", ["reserve", "complete"])
@virtual_time
async def test_a_bug_in_the_store_stops_the_service_and_loses_nothing(verb: str) -> None:
    here, depot, broker = guarded(), Depot(), sent(10, keys=5)
    dispatcher = dispatcher_of(depot.handle, here)

    with mock.patch.object(here.store, verb, side_effect=RuntimeError("a bug")):
        worker, why = await failure_of(dispatcher, broker, ordering="key")

    assert why == "a bug"
    assert unfinished(worker) == {}
    assert broker.committed.get(TOPIC, 0) == 0
    async with running(dispatcher, broker, ordering="key") as another:
        await another.until(lambda: all_committed(another))
    assert set(depot.done) == set(range(10))


@virtual_time
async def test_a_store_that_returns_too_few_verdicts_stops_the_service_and_loses_nothing() -> None:
    here, depot, broker = guarded(), Depot(), sent(10, keys=5)
    original = here.store.reserve

    async def too_few(requests: Sequence[ReserveRequest]) -> list[Verdict]:
        return (await original(requests))[:-1]

    with mock.patch.object(here.store, "reserve", too_few):
        worker, why = await failure_of(dispatcher_of(depot.handle, here), broker, ordering="key")

    assert "zip" in why
    assert unfinished(worker) == {}
    assert broker.committed == {}


@virtual_time
async def test_a_store_that_confirms_too_few_outcomes_stops_the_service_and_ends_the_runs() -> None:
    here, depot, broker = guarded(), Depot(), sent(10)
    original = here.store.complete

    async def too_few(completions: Sequence[Completion]) -> list[bool]:
        return (await original(completions))[:-1]

    with mock.patch.object(here.store, "complete", too_few):
        worker, why = await failure_of(dispatcher_of(depot.handle, here), broker, ordering="none")

    assert "zip" in why
    assert unfinished(worker) == {}
    assert broker.committed == {}
    assert here.manager.executor.runs.keys() == []


@pytest.mark.parametrize("ordering", ["partition", "none"])
@virtual_time
async def test_a_handler_that_cancels_its_own_task_is_retried_in_its_place(ordering: str) -> None:
    here, depot, broker = guarded(max_attempts=2), Depot(), sent(5)

    async def handle(event: ParcelSent) -> None:
        await asyncio.sleep(0)
        if event.number == 1 and 1 not in depot.started:
            depot.started.append(1)
            own_task().cancel()
            await asyncio.sleep(0)
        await depot.handle(event)

    async with running(dispatcher_of(handle, here), broker, ordering=ordering) as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert await leases_left(here) == []
    assert sorted(depot.done) == list(range(5))
    assert ordering == "none" or depot.done == list(range(5))


@pytest.mark.parametrize(("is_guarded", "runs"), [(True, 3), (False, 3), ("block", 1)])
@virtual_time
async def test_a_handler_that_always_cancels_its_own_task_is_dead_lettered(is_guarded: bool | str, runs: int) -> None:
    on_failure = "block" if is_guarded == "block" else "retry"
    here, depot, broker = guarded(max_attempts=3, on_failure=on_failure), Depot(), sent(3)

    async def handle(event: ParcelSent) -> None:
        await asyncio.sleep(0)
        if event.number == 1:
            depot.started.append(1)
            own_task().cancel()
            await asyncio.sleep(0)
        await depot.handle(event)

    router = EventRouter()
    router.on(ParcelSent, name="handle")(handle)
    plain = EventDispatcher(router, max_attempts=3)
    async with running(dispatcher_of(handle, here) if is_guarded else plain, broker) as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    [dead_letter] = broker.values(f"{TOPIC.topic}.dlq")
    headers = dict(dead_letter.headers)
    assert headers["idempotency-dlq-error-class"] == b"HandlerCancelledError"
    assert headers["idempotency-dlq-reason"] == b"handler_failed"
    assert b"cancelled its own task" in headers["idempotency-dlq-error-message"]
    assert depot.started == [0, *[1] * runs, 2]
    if is_guarded:
        record = await here.store.get([key_of(here, 1)])
        assert record[0] is not None
        assert record[0].status is IdempotencyStatus.FAILED
        assert await leases_left(here) == []
        assert here.observer.counts[Signal.HANDLER_FAILED] == runs + 1, "the last one without a run"


@virtual_time
async def test_a_suspect_that_cancels_its_own_task_is_retried() -> None:
    here, depot, broker = guarded(), Depot(), sent(1)
    for _ in range(2):
        await reserved_by_another(here, 0, timedelta(seconds=1))
        await asyncio.sleep(2)

    async def handle(event: ParcelSent) -> None:
        await asyncio.sleep(0)
        if not depot.started:
            depot.started.append(0)
            own_task().cancel()
            await asyncio.sleep(0)
        await depot.handle(event)

    async with running(dispatcher_of(handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert depot.done == [0]
    assert await leases_left(here) == []


@virtual_time
async def test_a_cancellation_that_a_handler_leaves_behind_does_not_reach_the_next_one() -> None:
    here, depot, broker = guarded(max_attempts=1), Depot(), sent(5)
    depot.held[2] = asyncio.Event()

    async def handle(event: ParcelSent) -> None:
        await depot.handle(event)
        if event.number == 1:
            own_task().cancel()
            asyncio.get_running_loop().call_later(1, depot.held[2].set)

    async with running(dispatcher_of(handle, here), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))

    assert depot.started == list(range(5))
    assert sorted(depot.done) == list(range(5))
    assert here.observer.counts[Signal.HANDLER_FAILED] == 0


@virtual_time
async def test_a_bug_in_decoding_a_delivery_stops_the_service_and_loses_nothing() -> None:
    here, depot, broker = guarded(), Depot(), sent(10, keys=5)
    dispatcher, original = dispatcher_of(depot.handle, here), DeliveryProcessor.decode

    def decode(self: DeliveryProcessor, delivery: Any) -> Any:
        if delivery.record.offset == 3:
            raise RuntimeError("a bug")
        return original(self, delivery)

    with mock.patch.object(DeliveryProcessor, "decode", decode):
        worker, why = await failure_of(dispatcher, broker, ordering="none")

    assert why == "a bug"
    assert unfinished(worker) == {}
    assert await leases_left(here) == []
    assert broker.committed.get(TOPIC, 0) <= 3
    async with running(dispatcher, broker) as another:
        await another.until(lambda: all_committed(another))
    assert sorted(depot.done) == list(range(10))


@virtual_time
async def test_a_bug_in_a_task_of_the_pipeline_stops_the_service() -> None:
    broker = sent(3)

    with mock.patch.object(Reserver, "start", side_effect=RuntimeError("a bug")):
        _, why = await failure_of(dispatcher_of(Depot().handle, guarded()), broker, drain_timeout_seconds=1)

    assert why == "a bug"
    assert broker.committed == {}


@virtual_time
async def test_a_bug_in_the_attempt_of_a_suspect_stops_the_service_and_its_event_is_redelivered() -> None:
    here, depot, broker = guarded(), Depot(), sent(3)
    for _ in range(2):
        await reserved_by_another(here, 1, timedelta(seconds=1))
        await asyncio.sleep(2)

    with mock.patch.object(GuardedExecution, "run_isolated", side_effect=Panic("broken")):
        worker, why = await failure_of(dispatcher_of(depot.handle, here), broker)

    assert why == "broken"
    assert unfinished(worker) == {}
    assert await leases_left(here) == []
    assert depot.done == [0]


@virtual_time
async def test_runs_of_a_reused_key_use_slots() -> None:
    here, depot, broker = guarded(on_key_reused=OnKeyReused.RUN), Depot(seconds=1), FakeBroker()
    # One id with different contents: all but the first reuse the key for other work.
    broker.publish(*(ParcelSent(number=each, event_id="one") for each in range(12)))
    async with running(dispatcher_of(depot.handle, here), broker, ordering="none", concurrency=2) as worker:
        await worker.until(lambda: all_committed(worker))

    assert sorted(depot.done) == list(range(12))
    assert depot.max_concurrency == 2


OWNER: ContextVar[str] = ContextVar("owner")


@pytest.mark.parametrize("ordering", ["partition", "key", "none"])
@virtual_time
async def test_context_variables_set_by_a_handler_are_not_visible_to_others(ordering: str) -> None:
    depot, seen, set_before = Depot(errors={4: [OSError("once more")]}), list[tuple[str, int]](), OWNER.set("service")

    async def handle(event: ParcelSent) -> None:
        seen.append((OWNER.get(), event.number))
        OWNER.set(str(event.number))
        if event.number % 2:
            await asyncio.sleep(0)
        await depot.handle(event)
        assert OWNER.get() == str(event.number)

    broker = sent(12, keys=3)
    async with running(dispatcher_of(handle, guarded()), broker, ordering=ordering) as worker:
        await worker.until(lambda: all_committed(worker))
    OWNER.reset(set_before)

    assert sorted(seen, key=lambda each: each[1]) == [("service", each) for each in (*range(5), *range(4, 12))]


@virtual_time
async def test_a_recording_continues_after_its_service_was_cancelled_and_ends_the_run() -> None:
    here, depot, broker = guarded(), Depot(), sent(1)
    here.store.held["complete"] = asyncio.Event()
    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: here.store.calls["complete"] == 1)
        await cancel(worker)
        here.store.held["complete"].set()
        await here.manager.close()

        assert here.manager.executor.runs.keys() == []
    assert await completed_parcels(here) == {0}


@virtual_time
async def test_an_outcome_that_is_not_recorded_after_its_service_was_cancelled_is_left_to_the_manager() -> None:
    here, depot, broker = guarded(), Depot(), sent(1)
    here.store.held["complete"] = asyncio.Event()
    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: here.store.calls["complete"] == 1)
        here.store.lose_answers["complete"] = 1
        await cancel(worker)
        here.store.held["complete"].set()
        await here.manager.close()

        assert here.store.calls["complete"] == 2
        assert worker.worker._pipeline.tasks == set()
    assert await completed_parcels(here) == {0}
