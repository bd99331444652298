"""One worker in a process of its own, by an order: `run_worker(Order(...))`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import uvloop

from integr8s_idem import IdempotencyConfig, IdempotencyManager, IdempotentEventDispatcher
from integr8s_idem.config import KafkaSettings, RedisStoreSettings, ServiceSettings
from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_client
from integr8s_idem.testing.crash_points import (
    CrashingPublisher,
    CrashingStore,
    CrashPlan,
    CrashPoint,
    crashing_consumer,
    crashing_invoke,
)
from integr8s_idem.worker import ServiceWorker
from tests.crashes.jobs import Boss, with_the_call
from tests.crashes.samples import sampling
from tests.support.effects import Effects

SERVICE: Final = "boss"
MOST_ATTEMPTS: Final = 50
"""More than any trial has lives: no job is given up because processes were killed."""


@dataclass(frozen=True)
class Order:
    """What a worker is to do; travels as JSON."""

    bootstrap: str
    redis_url: str
    prefix: str
    """Of its topics and its group, and its keys in the store."""
    folder: str
    """For effects and logs."""
    point: str = ""
    """Where it dies; empty: nowhere."""
    occurrence: int = 1
    ordering: Literal["partition", "key", "none"] = "partition"
    lease: float = 1.5
    session: float = 1.5
    store_timeout: float = 0.5
    max_attempts: int = MOST_ATTEMPTS
    samples: str = ""
    """File for what it weighs; empty: not weighed."""

    @property
    def key_prefix(self) -> str:
        """Of its records in the store."""
        return self.prefix.rstrip(".")

    @property
    def group(self) -> str:
        return self.prefix + SERVICE

    @property
    def kafka(self) -> KafkaSettings:
        return KafkaSettings(
            bootstrap_servers=self.bootstrap,
            topic_prefix=self.prefix,
            session_timeout_seconds=self.session,
            heartbeat_interval_seconds=self.session / 5,
            rebalance_timeout_seconds=10,
            request_timeout_seconds=5,
            metadata_max_age_seconds=5,
        )

    @property
    def service(self) -> ServiceSettings:
        return ServiceSettings(
            ordering=self.ordering,
            retry_initial_seconds=0.05,
            retry_max_seconds=0.2,
            commit_interval_seconds=0.1,
            drain_timeout_seconds=5,
        )

    @property
    def idempotency(self) -> IdempotencyConfig:
        return IdempotencyConfig(
            key_prefix=self.key_prefix, processing_timeout_seconds=self.lease, max_attempts=self.max_attempts
        )


def run_worker(order: Order, parent: int) -> int:
    """Work until told to stop by SIGTERM, or until `parent` is gone; the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_work(order, parent))


async def _work(order: Order, parent: int) -> int:
    plan = CrashPlan(CrashPoint(order.point) if order.point else None, order.occurrence)
    client = redis_client(RedisStoreSettings(url=order.redis_url, timeout_seconds=order.store_timeout))
    store = RedisIdempotencyRepository(client, timeout=timedelta(seconds=order.store_timeout))
    manager = IdempotencyManager(order.idempotency, CrashingStore(store, plan), scope=SERVICE)
    publisher = CrashingPublisher(order.kafka, plan)
    boss = Boss(Effects(Path(order.folder)), plan)
    invoke = crashing_invoke(plan, with_the_call)
    dispatcher = IdempotentEventDispatcher(boss.router, manager, publisher=publisher, invoke=invoke)
    worker = ServiceWorker(
        SERVICE, dispatcher, publisher, order.kafka, order.service, group=order.group, consumer=crashing_consumer(plan)
    )

    def stop() -> None:
        plan.drain()
        worker.stop()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    beside: list[Coroutine[Any, Any, None]] = [_leave_with(parent)]
    if order.samples:
        beside.append(sampling(Path(order.samples)))
    tasks = [asyncio.create_task(task) for task in beside]
    await worker.run()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await manager.close()
    await publisher.close()
    await client.aclose()
    return 1 if worker.stuck else 0


async def _leave_with(parent: int) -> None:
    """A worker whose test is gone must not stay behind."""
    while os.getppid() == parent:  # noqa: ASYNC110  # nobody tells us
        await asyncio.sleep(0.5)
    os._exit(3)
