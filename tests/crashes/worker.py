"""A worker in its own process: `run_worker(Order(...))`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from integr8s_idem import EventDispatcher, IdempotencyManager, IdempotentEventDispatcher
from integr8s_idem.testing.crash_points import (
    CrashingPublisher,
    CrashingStore,
    CrashPlan,
    CrashPoint,
    crashing_consumer,
    crashing_invoke,
    kill_myself,
)
from integr8s_idem.worker import EventPublisher, ServiceWorker
from tests.crashes.jobs import JobHandler, invoke_handler
from tests.crashes.orders import SERVICE, Order
from tests.crashes.samples import sampling
from tests.crashes.stepping import open_stepping
from tests.crashes.transacting import RelayContext, open_transactional
from tests.support.effects import Effects
from tests.support.homes import open_records

Opening = Callable[
    [Order, CrashPlan], AbstractAsyncContextManager[tuple[EventDispatcher, EventPublisher, RelayContext]]
]
"""Opens dispatcher, publisher and relay for the worker of an order."""


def run_worker(order: Order, parent: int) -> int:
    """Work until SIGTERM or until the process `parent` is gone, and return the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_work(order, parent))


async def _work(order: Order, parent: int) -> int:
    plan = CrashPlan(CrashPoint(order.point) if order.point else None, order.occurrence, crash_action(order))
    async with _opening(order)(order, plan) as (dispatcher, publisher, relaying):
        worker = ServiceWorker(
            SERVICE,
            dispatcher,
            publisher,
            order.kafka,
            order.service,
            group=order.group,
            consumer=crashing_consumer(plan),
        )

        def stop() -> None:
            plan.drain()
            worker.stop()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        background: list[Coroutine[Any, Any, None]] = [exit_with(parent)]
        if order.samples:
            background.append(sampling(Path(order.samples)))
        tasks = [asyncio.create_task(task) for task in background]
        async with relaying():
            await worker.run()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return 1 if worker.stuck else 0


def _opening(order: Order) -> Opening:
    if order.transactional:
        return open_transactional
    return open_stepping if order.stepping else _open_stand_alone


def crash_action(order: Order) -> Callable[[], None]:
    """Return the function that a crash point calls: kill or stop this process."""

    def stall() -> None:
        (Path(order.folder) / "stalled").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    return stall if order.stalls else kill_myself


@asynccontextmanager
async def _open_stand_alone(
    order: Order, plan: CrashPlan
) -> AsyncIterator[tuple[EventDispatcher, EventPublisher, RelayContext]]:
    async with open_records(order.store, order.key_prefix) as store:
        manager = IdempotencyManager(order.idempotency, CrashingStore(store, plan), scope=SERVICE)
        publisher = CrashingPublisher(order.kafka, plan)
        handler = JobHandler(Effects(Path(order.folder)), plan, reconciles=order.reconciles)
        invoke = crashing_invoke(plan, invoke_handler)
        yield (
            IdempotentEventDispatcher(handler.router, manager, publisher=publisher, invoke=invoke),
            publisher,
            _no_relay,
        )
        await manager.close()
        await publisher.close()


@asynccontextmanager
async def _no_relay() -> AsyncIterator[None]:
    yield


async def exit_with(parent: int) -> None:
    """Exit when the process `parent` is gone, so that no worker outlives its test."""
    while os.getppid() == parent:  # noqa: ASYNC110  # the system sends no notification
        await asyncio.sleep(0.5)
    os._exit(3)
