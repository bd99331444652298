"""Runners stay for the next items, and what they have handled does not stay with them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress
from typing import Any
from unittest.mock import patch

from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.runners import MOST_IDLE
from tests.support.fake_worker import running
from tests.support.guarded import guarded
from tests.support.pipelines import Depot, ParcelSent, all_committed, dispatcher_of, parcels, sent, unfinished


@virtual_time
async def test_tasks_handle_one_event_after_another() -> None:
    here, depot, broker, used = guarded(), Depot(), sent(100, partitions=4), set[str]()

    async def handle(event: ParcelSent) -> None:
        task = asyncio.current_task()
        assert task is not None
        used.add(task.get_name())
        await depot.handle(event)
        await asyncio.sleep(event.number % 3)

    async with running(dispatcher_of(handle, here), broker, ordering="partition") as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert sorted(depot.done) == list(range(100))
    assert len(used) <= 5


@virtual_time
async def test_only_some_runners_stay_without_events() -> None:
    many = MOST_IDLE + 50
    depot, broker = Depot(seconds=1), sent(many)

    async with running(dispatcher_of(depot.handle, guarded()), broker, ordering="none", concurrency=many) as worker:
        await worker.until(lambda: all_committed(worker))
        assert depot.max_concurrency == many
        assert len(worker.worker._pipeline.tasks) <= MOST_IDLE


@virtual_time
async def test_a_runner_without_events_does_not_keep_those_that_it_has_handled() -> None:
    broker, router, alive = sent(3), EventRouter(), list[weakref.ref[ParcelSent]]()

    @router.on(ParcelSent, name="handle")
    async def handle(event: ParcelSent) -> None:
        alive.append(weakref.ref(event))
        await asyncio.sleep(1)

    async with running(dispatcher_of(handle, guarded()), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        await asyncio.sleep(60)  # a timer of the leases keeps the context of one handler
        gc.collect()

        assert [each() for each in alive] == [None] * 3
        assert worker.worker._pipeline.tasks


@virtual_time
async def test_events_are_handled_if_idle_runners_are_cancelled_when_they_become_runnable() -> None:
    here, depot, broker = guarded(), Depot(), sent(5)

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
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
        task = asyncio.current_task()
        assert task is not None
        pending.append(task.cancelling())
        if event.number == 0:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1)

    async with running(dispatcher_of(handle, guarded()), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert pending == [0, 0]
