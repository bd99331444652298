"""Runners stay a moment for the next items, and what they have handled does not stay with them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest

from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker import ServiceWorker, runners
from integr8s_idem.worker.consumer import LAST_GRACE
from integr8s_idem.worker.look_ahead import LONGEST_HOLD
from integr8s_idem.worker.runners import MOST_IDLE, TURN
from tests.support.fake_worker import running
from tests.support.guarded import guarded
from tests.support.pipelines import Depot, ParcelSent, all_committed, dispatcher_of, parcels, sent, unfinished


@asynccontextmanager
async def staying() -> AsyncIterator[None]:
    """Let runners stay until the worker stops."""
    with patch.object(runners, "LONGEST_HOLD", 3_600):
        yield


def own_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@virtual_time
async def test_tasks_handle_one_event_after_another() -> None:
    here, depot, broker, used = guarded(), Depot(), sent(100, partitions=4), set[str]()

    async def handle(event: ParcelSent) -> None:
        used.add(own_task().get_name())
        await depot.handle(event)
        await asyncio.sleep(event.number % 3 / 1_000)

    async with running(dispatcher_of(handle, here), broker, ordering="partition") as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert sorted(depot.done) == list(range(100))
    assert len(used) <= 8


@virtual_time
async def test_only_some_runners_stay_without_events() -> None:
    many = MOST_IDLE + 50
    depot, broker = Depot(seconds=0.01), sent(many)

    async with running(dispatcher_of(depot.handle, guarded()), broker, ordering="none", concurrency=many) as worker:
        await worker.until(lambda: len(depot.done) == many)
        assert depot.max_concurrency == many
        assert len(worker.worker._pipeline._runners._idle) == len(worker.worker._pipeline.tasks) == MOST_IDLE
        await asyncio.sleep(2 * LONGEST_HOLD)
        assert not worker.worker._pipeline.tasks


@virtual_time
async def test_a_runner_without_events_does_not_keep_those_that_it_has_handled() -> None:
    broker, router, alive = sent(3), EventRouter(), list[weakref.ref[ParcelSent]]()

    @router.on(ParcelSent, name="handle")
    async def handle(event: ParcelSent) -> None:
        alive.append(weakref.ref(event))
        await asyncio.sleep(1)

    async with staying(), running(dispatcher_of(handle, guarded()), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        await asyncio.sleep(60)  # a timer of the leases keeps the context of one handler
        gc.collect()

        assert [each() for each in alive] == [None] * 3
        assert worker.worker._pipeline.tasks


@virtual_time
async def test_events_are_handled_if_idle_runners_are_cancelled_when_they_become_runnable() -> None:
    here, depot, broker = guarded(), Depot(), sent(5)

    async with staying(), running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        pipeline = worker.worker._pipeline
        reserver, cancelled = pipeline._reserver, list[asyncio.Task[None]]()
        process = reserver._process

        def cancel_and_process(*arguments: Any) -> None:
            cancelled.extend(pipeline.tasks - {asyncio.current_task()})
            for task in cancelled:
                task.cancel()
            process(*arguments)

        with patch.object(reserver, "_process", cancel_and_process):
            broker.publish(*parcels(10)[5:])
            await worker.until(lambda: all_committed(worker))

    assert cancelled
    assert depot.done == list(range(10))


@virtual_time
async def test_a_cancellation_that_a_handler_ignores_is_not_seen_by_the_next_one() -> None:
    broker, pending = sent(2), list[int]()

    async def handle(event: ParcelSent) -> None:
        pending.append(own_task().cancelling())
        if event.number == 0:
            own_task().cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1)

    async with running(dispatcher_of(handle, guarded()), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert pending == [0, 0]


@virtual_time
async def test_a_timer_that_a_handler_leaves_behind_does_not_cancel_a_later_one() -> None:
    broker, depot = sent(1), Depot(seconds=5)

    async def handle(event: ParcelSent) -> None:
        if event.number == 0:
            asyncio.get_running_loop().call_later(10, own_task().cancel)
        await depot.handle(event)

    async with running(dispatcher_of(handle, guarded(max_attempts=1)), broker) as worker:
        await asyncio.sleep(8)
        broker.publish(*parcels(2)[1:])
        await worker.until(lambda: all_committed(worker))

    assert depot.done == [0, 1]


@pytest.mark.parametrize("busy", [0.01, 0.3, LONGEST_HOLD - 0.01])
@virtual_time
async def test_callbacks_of_the_task_of_a_handler_are_soon_called(busy: float) -> None:
    broker, called = sent(0), list[float]()
    loop = asyncio.get_running_loop()

    async def handle(event: ParcelSent) -> None:
        begun = loop.time()
        own_task().add_done_callback(lambda _: called.append(loop.time() - begun))
        await asyncio.sleep(busy)

    async with running(dispatcher_of(handle, guarded()), broker) as worker:
        for parcel in parcels(50):
            broker.publish(parcel)
            await asyncio.sleep(busy + 0.01)
        await worker.until(lambda: len(called) == 50)

    assert max(called) < 3 * LONGEST_HOLD


@pytest.mark.parametrize("seconds", [1, 100])
@virtual_time
async def test_a_runner_ends_whose_handler_has_withdrawn_its_cancellation(seconds: int) -> None:
    broker, depot = sent(1), Depot()

    async def handle(event: ParcelSent) -> None:
        try:
            await asyncio.sleep(1_000)
        except asyncio.CancelledError:
            own_task().uncancel()
            await asyncio.sleep(seconds)
        await depot.handle(event)

    loop = asyncio.get_running_loop()
    async with staying(), running(dispatcher_of(handle, guarded()), broker, drain_timeout_seconds=10) as worker:
        await asyncio.sleep(1)
        began = loop.time()
        worker.worker.stop()
        await worker.task
        assert loop.time() - began < 10 + min(seconds, LAST_GRACE) + 0.1
        await asyncio.sleep(seconds)

        assert not worker.worker._pipeline.tasks


@virtual_time
async def test_lanes_let_other_tasks_run_after_a_number_of_handlers() -> None:
    broker, loop = sent(800, partitions=8), asyncio.get_running_loop()
    handled, run_once = [0], loop._run_once  # type: ignore[attr-defined]

    def iterate() -> None:
        handled.append(0)
        run_once()

    async def handle(_: ParcelSent) -> None:
        handled[-1] += 1

    async with running(dispatcher_of(handle), broker, concurrency=1_000) as worker:
        loop._run_once = iterate  # type: ignore[attr-defined]
        await worker.until(lambda: all_committed(worker))

    assert sum(handled) == 800
    assert max(handled) <= TURN


class PaceThatRevokes:
    """The pace of an event loop that others have occupied for long; while a runner waits, its partition is revoked."""

    def __init__(self, worker: ServiceWorker) -> None:
        self._worker = worker
        self.waits = 0

    def is_turn_over(self) -> bool:
        return not self.waits

    async def wait(self) -> None:
        self.waits += 1
        for assignment in self._worker._partitions.assignments.values():
            assignment.close()
        self._worker._pipeline.release_closed()


@virtual_time
async def test_items_may_be_released_while_a_runner_waits_for_its_turn() -> None:
    broker, depot = sent(0), Depot()

    async with running(dispatcher_of(depot.handle, guarded()), broker) as worker:
        pace = PaceThatRevokes(worker.worker)
        worker.worker._pipeline._runners._pace = pace  # type: ignore[assignment]
        broker.publish(*parcels(5))
        await worker.until(lambda: pace.waits > 0)
        await asyncio.sleep(1)
        assert unfinished(worker.worker) == {}

    assert depot.started == []
