"""A FastStream application in its own process that dies at a crash point: `run_worker(TillOrder(...))`.

Its subscriber uses the idempotency middleware, gets its session from Dishka, and responds to each job in another topic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import uvloop
from aiokafka import AIOKafkaConsumer
from dishka import make_async_container
from dishka_faststream import FromDishka, inject, setup_dishka
from faststream import AckPolicy, BaseMiddleware, FastStream
from faststream.kafka import KafkaBroker, KafkaMessage
from sqlalchemy.ext.asyncio import AsyncSession

from integr8s_idem import IdempotencyManager, derived_event_id
from integr8s_idem.integrations.faststream import IdempotencyMiddleware, by_header
from integr8s_idem.testing.crash_points import CrashingStore, CrashPlan, CrashPoint
from tests.crashes.jobs import Job
from tests.crashes.orders import SERVICE
from tests.crashes.tills import Sessions, Till, till_engine
from tests.crashes.tills import TillOrder as Order
from tests.crashes.worker import crash_action, exit_with
from tests.support.homes import open_records

__all__ = ["Order", "run_worker"]


@dataclass(frozen=True)
class Shape:
    """Which part commits and which part publishes, and so the order of both."""

    guard_outside: bool = False
    """Whether the middleware wraps the Dishka scope, instead of running inside it."""
    handler_commits: bool = False
    """Whether the handler commits, instead of its scope."""
    handler_publishes: bool = False
    """Whether the handler publishes, instead of `@publisher` after the scope."""
    batch: bool = False


SHAPES: Final = {
    "scope_commits": Shape(),
    "guard_outside": Shape(guard_outside=True),
    "handler_commits": Shape(handler_commits=True),
    "handler_publishes": Shape(handler_publishes=True),
    "handler_does_both": Shape(handler_commits=True, handler_publishes=True),
    "batch": Shape(batch=True),
}


class Subscriber:
    """The handler of the order's shape."""

    def __init__(self, order: Order, till: Till, broker: KafkaBroker) -> None:
        self._order = order
        self._till = till
        self._plan = till.plan
        self._broker = broker
        self._shape = SHAPES[order.shape]
        handler: Any = self.handle_batch if self._shape.batch else self.handle
        chain = inject(handler)
        if not self._shape.handler_publishes:
            chain = broker.publisher(self.answers, batch=self._shape.batch)(chain)
        self._subscriber()(chain)

    @property
    def answers(self) -> str:
        """The topic for responses."""
        return f"{self._order.prefix}job_done"

    def _subscriber(self) -> Any:
        return self._broker.subscriber(
            f"{self._order.prefix}job",
            group_id=self._order.group,
            ack_policy=AckPolicy.NACK_ON_ERROR,
            auto_offset_reset="earliest",
            session_timeout_ms=int(self._order.session * 1000),
            heartbeat_interval_ms=int(self._order.session * 200),
            rebalance_timeout_ms=10_000,
            batch=self._shape.batch,
        )

    async def handle(self, job: Job, message: KafkaMessage, session: FromDishka[AsyncSession]) -> dict[str, str]:
        self._plan.reached(CrashPoint.BEFORE_HANDLER)
        await self._till.enter(session, job.work)
        receipt: Any = _receipt(job)
        if self._shape.handler_commits:
            await self._plan.around("transaction_commit", session.commit)
        if self._shape.handler_publishes:
            headers = {"event_id": derived_event_id(message.headers["event_id"], 0)}
            await self._broker.publish(receipt, self.answers, headers=headers)
        return _receipt(job)

    async def handle_batch(self, jobs: list[Job], session: FromDishka[AsyncSession]) -> list[dict[str, str]]:
        self._plan.reached(CrashPoint.BEFORE_HANDLER)
        for job in jobs:
            await self._till.enter(session, job.work)
        return [_receipt(job) for job in jobs]


def _receipt(job: Job) -> dict[str, str]:
    """Return the response; FastDepends resolves only built-in types in annotations of functions wrapped by `inject`."""
    return {"work": job.work, "event_id": derived_event_id(job.event_id, 0)}


def _publishing(plan: CrashPlan) -> Any:
    """Return a middleware with crash points before and after each published message."""

    class Publishing(BaseMiddleware[Any, Any]):
        async def publish_scope(self, call_next: Callable[[Any], Awaitable[Any]], cmd: Any) -> Any:
            plan.reached(CrashPoint.BEFORE_PUBLISH)
            result = await call_next(cmd)
            plan.reached(CrashPoint.AFTER_PUBLISH)
            return result

    return Publishing


def _crash_around_commits(plan: CrashPlan) -> None:
    consumers: Any = AIOKafkaConsumer
    commit = consumers.commit

    async def crashing(self: Any, offsets: Any = None) -> None:
        await plan.around("commit", lambda: commit(self, offsets))

    consumers.commit = crashing


@asynccontextmanager
async def _application(order: Order, plan: CrashPlan) -> AsyncIterator[FastStream]:
    engine = till_engine(order.database)
    async with open_records(order.store, order.key_prefix) as store:
        manager = IdempotencyManager(order.idempotency, CrashingStore(store, plan), scope=SERVICE)
        guard = IdempotencyMiddleware(manager, key=by_header("event_id"))
        outside = SHAPES[order.shape].guard_outside
        broker = KafkaBroker(
            order.bootstrap,
            middlewares=[_publishing(plan)] if outside else [guard, _publishing(plan)],
            request_timeout_ms=int(order.request_timeout * 1000),
            metadata_max_age_ms=5000,
            log_level=logging.WARNING,
        )
        container = make_async_container(Sessions(engine, plan))
        setup_dishka(container, broker=broker)
        if outside:
            broker.insert_middleware(guard)
        Subscriber(order, Till(plan, manager), broker)
        yield FastStream(broker, on_startup=[lambda: guard.check(broker)])
        await container.close()
        await manager.close()
    await engine.dispose()


def run_worker(order: Order, parent: int) -> int:
    """Work until SIGTERM or until the process `parent` is gone, and return the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_work(order, parent))


async def _work(order: Order, parent: int) -> int:
    plan = CrashPlan(CrashPoint(order.point) if order.point else None, order.occurrence, crash_action(order))
    _crash_around_commits(plan)
    watching = asyncio.create_task(exit_with(parent))
    async with _application(order, plan) as application:
        await application.run()
    watching.cancel()
    await asyncio.wait({watching})
    return 0
