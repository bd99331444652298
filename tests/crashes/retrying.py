"""A worker with retry topics in a process that dies at a step of a delayed retry: `run_worker(RetryOrder(...))`."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

import uvloop

from integr8s_idem import IdempotencyManager, IdempotentEventDispatcher
from integr8s_idem.testing.crash_points import crashing_invoke
from integr8s_idem.worker import ServiceWorker
from tests.crashes.jobs import invoke_handler
from tests.crashes.orders import SERVICE
from tests.crashes.retry_bugs import BUGS
from tests.crashes.retry_jobs import RetryHandler
from tests.crashes.retry_jobs import RetryOrder as Order
from tests.crashes.retry_steps import RetryingPublisher, RetryingStore, StepPlan, retrying_consumer
from tests.crashes.worker import exit_with
from tests.support.effects import Effects
from tests.support.homes import open_records

__all__ = ["Order", "run_worker"]


def run_worker(order: Order, parent: int) -> int:
    """Work until SIGTERM or until the process `parent` is gone, and return the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(levelname)s %(message)s")
    if order.bug:
        BUGS[order.bug]()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_work(order, parent))


async def _work(order: Order, parent: int) -> int:
    plan = StepPlan(order.point, order.occurrence)
    async with open_records(order.store, order.key_prefix) as store:
        manager = IdempotencyManager(order.idempotency, RetryingStore(store, plan), scope=SERVICE)
        publisher = RetryingPublisher(order.kafka, plan)
        handler = RetryHandler(Effects(Path(order.folder)), plan)
        invoke = crashing_invoke(plan.crashes, invoke_handler)
        worker = ServiceWorker(
            SERVICE,
            IdempotentEventDispatcher(handler.router, manager, publisher=publisher, invoke=invoke),
            publisher,
            order.kafka,
            order.service,
            group=order.group,
            replay=order.replay,
            consumer=retrying_consumer(plan),
        )

        def stop() -> None:
            plan.crashes.drain()
            worker.stop()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        watching = asyncio.create_task(exit_with(parent))
        await worker.run()
        watching.cancel()
        await asyncio.wait({watching})
        await manager.close()
        await publisher.close()
    return 1 if worker.stuck else 0
