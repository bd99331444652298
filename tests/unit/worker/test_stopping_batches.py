"""A worker stops while a batch handler is running."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from integr8s_idem import EventRouter
from integr8s_idem.errors import PermanentError
from integr8s_idem.failures import discard
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.fake_worker import running
from tests.support.guarded import Guarded, guarded
from tests.support.pipelines import ParcelSent, all_committed, dispatcher_of, sent

Work = Callable[[], Awaitable[None]]
Dispatch = Callable[[Guarded, Work], EventDispatcher]

DRAIN = 1
CLEANUP = 3
"""Seconds."""


def alone(here: Guarded, work: Work) -> EventDispatcher:
    async def handle(_: ParcelSent) -> None:
        await work()

    return dispatcher_of(handle, here)


def in_batches(here: Guarded, work: Work) -> EventDispatcher:
    router = EventRouter()

    @router.on_batch(ParcelSent, name="handle", max_size=2)
    async def handle(_: list[ParcelSent]) -> None:
        await work()

    return IdempotentEventDispatcher(router, here.manager)


@pytest.mark.parametrize("dispatch", [alone, in_batches])
@virtual_time
async def test_no_other_worker_runs_an_event_while_its_handler_cleans_up(dispatch: Dispatch) -> None:
    here, live = guarded(), 0

    async def work() -> None:
        nonlocal live
        live += 1
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(CLEANUP)
            live -= 1

    async with running(dispatch(here, work), sent(2), ordering="none", drain_timeout_seconds=DRAIN) as worker:
        await worker.until(lambda: live > 0)
        worker.worker.stop()
        await asyncio.sleep(DRAIN + CLEANUP / 2)
        assert live > 0
        assert await here.manager.count_active() == 2, "nobody else may run them"
    assert live == 0, "the worker has waited"


@pytest.mark.parametrize("dispatch", [alone, in_batches])
@virtual_time
async def test_a_handler_that_finishes_after_its_cancellation_is_not_called_again(dispatch: Dispatch) -> None:
    here, broker, calls = guarded(), sent(2), 0

    async def work() -> None:
        nonlocal calls
        calls += 1
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(CLEANUP)

    async with running(dispatch(here, work), broker, ordering="none", drain_timeout_seconds=DRAIN) as worker:
        await worker.until(lambda: calls > 0)
    before = calls
    async with running(dispatch(here, work), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))

    assert calls == before


@pytest.mark.parametrize("error", [PermanentError("refused"), KeyError("unknown")], ids=["final", "discarded"])
@virtual_time
async def test_a_final_failure_that_waits_for_the_store_is_recorded_after_the_worker_has_stopped(
    error: Exception,
) -> None:
    here, broker, calls = guarded(), sent(1), 0

    async def handle(_: ParcelSent) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.5)
        raise error

    def dispatcher() -> EventDispatcher:
        return dispatcher_of(handle, here, failures=[discard(KeyError)])

    async with running(dispatcher(), broker, ordering="none", drain_timeout_seconds=DRAIN) as worker:
        await worker.until(lambda: calls == 1)
        here.store.down = {"fail", "complete", "ping"}
        await asyncio.sleep(1)
    asyncio.get_running_loop().call_later(DRAIN, here.store.down.clear)
    await here.manager.close()
    async with running(dispatcher(), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))

    assert calls == 1
