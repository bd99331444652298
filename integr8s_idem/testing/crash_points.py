"""Named points at which a test crashes a process.

The library itself contains no such points: these classes wrap the Protocols at its boundaries.

    plan = CrashPlan(CrashPoint.AFTER_COMPLETE)          # sends SIGKILL to this process at that point
    store = CrashingStore(RedisIdempotencyRepository(client), plan)
    manager = IdempotencyManager(config, store, scope="billing")
    publisher = CrashingPublisher(kafka_settings, plan)
    dispatcher = IdempotentEventDispatcher(router, manager, publisher=publisher, invoke=crashing_invoke(plan))
    worker = ServiceWorker(
        "billing", dispatcher, publisher, kafka_settings, service_settings, consumer=crashing_consumer(plan)
    )

The points around a side effect are in the handler, so the test names them there:

    plan.reached(CrashPoint.IN_HANDLER_BEFORE_EFFECT)
    await charge(order)
    plan.reached(CrashPoint.IN_HANDLER_AFTER_EFFECT)

The points of transactional handlers and of the relay are in `transactional_crash_points`.

Run this in a separate process, then start another one without a plan, and count the side effects from outside.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, Final, TypeVar, cast

from aiokafka import ConsumerRebalanceListener

from integr8s_idem.config import KafkaSettings
from integr8s_idem.events import BaseEvent, Message
from integr8s_idem.handlers.handler_calls import BatchCall, HandlerCall, RegisteredHandler, call_with_event
from integr8s_idem.handlers.router import Invoke
from integr8s_idem.records import (
    Completion,
    Failure,
    IdempotencyRecord,
    Reserved,
    ReserveRequest,
    StoreHealth,
    Verdict,
)
from integr8s_idem.stores import NO_DELAY, IdempotencyRepository
from integr8s_idem.telemetry import SILENT, Observer
from integr8s_idem.worker import EventPublisher
from integr8s_idem.worker.consumer import make_consumer
from integr8s_idem.worker.kafka_protocols import Consumer
from integr8s_idem.worker.publisher import Placement

__all__ = [
    "CrashPlan",
    "CrashPoint",
    "CrashingPublisher",
    "CrashingStore",
    "crashing_consumer",
    "crashing_invoke",
    "kill_myself",
]

T = TypeVar("T")

IN_FLIGHT_SECONDS: Final = 0.0005
"""How long a call runs before it is interrupted: it has been sent, and may or may not have been answered."""


class CrashPoint(str, Enum):
    """A point at which a process can crash, in the order in which a delivery reaches them.

    At `before_` points nothing has been sent.  At `in_` points the request has been sent, and may or may not be
    executed.  At `after_` points the other side has executed it, but this process has not handled the answer yet.
    """

    ON_ASSIGN = "on_assign"
    """Partitions have been assigned to this process."""
    AFTER_FETCH = "after_fetch"
    """Messages have arrived."""
    BEFORE_RESERVE = "before_reserve"
    IN_RESERVE = "in_reserve"
    AFTER_RESERVE = "after_reserve"
    BEFORE_HANDLER = "before_handler"
    IN_HANDLER_BEFORE_EFFECT = "in_handler_before_effect"
    """Named by the handler itself, like the next one."""
    IN_HANDLER_AFTER_EFFECT = "in_handler_after_effect"
    AFTER_HANDLER = "after_handler"
    """The handler has returned and its events are not sent yet; a transactional handler has committed."""
    BEFORE_OUTCOME = "before_outcome"
    """A transactional handler has returned; its outgoing events and its outcome are not in its transaction yet."""
    IN_OUTCOME = "in_outcome"
    AFTER_OUTCOME = "after_outcome"
    BEFORE_TRANSACTION_COMMIT = "before_transaction_commit"
    """The handler's transaction in the database.  Named by the code that commits, like the next two."""
    IN_TRANSACTION_COMMIT = "in_transaction_commit"
    AFTER_TRANSACTION_COMMIT = "after_transaction_commit"
    BEFORE_RENEW = "before_renew"
    IN_RENEW = "in_renew"
    AFTER_RENEW = "after_renew"
    BEFORE_PUBLISH = "before_publish"
    """All outgoing events of the handler, without dead letters."""
    AFTER_PUBLISH = "after_publish"
    BEFORE_CLAIM = "before_claim"
    """The relay claims buckets of the outbox."""
    IN_CLAIM = "in_claim"
    AFTER_CLAIM = "after_claim"
    BEFORE_SEND = "before_send"
    """A single outgoing event, sent by the relay or the handler's publisher."""
    AFTER_SEND = "after_send"
    """The broker has confirmed it; if it came from the outbox, its row is still there."""
    BEFORE_FORGET = "before_forget"
    """The broker has confirmed all events that the relay has read; their rows are still there."""
    IN_FORGET = "in_forget"
    AFTER_FORGET = "after_forget"
    BEFORE_COMPLETE = "before_complete"
    IN_COMPLETE = "in_complete"
    AFTER_COMPLETE = "after_complete"
    BEFORE_RELEASE = "before_release"
    IN_RELEASE = "in_release"
    AFTER_RELEASE = "after_release"
    BEFORE_FAIL = "before_fail"
    IN_FAIL = "in_fail"
    AFTER_FAIL = "after_fail"
    BEFORE_DEAD_LETTER = "before_dead_letter"
    AFTER_DEAD_LETTER = "after_dead_letter"
    BEFORE_COMMIT = "before_commit"
    """The commit of offsets to the broker."""
    IN_COMMIT = "in_commit"
    AFTER_COMMIT = "after_commit"
    BEFORE_RESPONSE = "before_response"
    """An HTTP response is about to be sent.  Named by the code that sends it, like the next two."""
    IN_RESPONSE = "in_response"
    """A part of the response body has been sent."""
    AFTER_RESPONSE = "after_response"
    BEFORE_REVOKE = "before_revoke"
    """Partitions are taken away; nothing has been done about it."""
    AFTER_REVOKE = "after_revoke"
    """Handlers have ended, offsets are committed; the broker waits for us to say so."""
    IN_DRAIN = "in_drain"
    """Any of the others, once `CrashPlan.drain` was called."""
    BEFORE_LEAVE = "before_leave"
    """All is drained; the group does not know that we go."""
    AFTER_LEAVE = "after_leave"


def kill_myself() -> None:
    """SIGKILL to this process: no handler of it, no `finally`, no buffer gets another chance."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class CrashPlan:
    """The point and occurrence at which this process crashes.  Without a point it never does."""

    point: CrashPoint | None = None
    occurrence: int = 1
    """1 for the first arrival."""
    action: Callable[[], None] = kill_myself
    """Called at the point; if it returns, the process continues."""
    seen: Counter[CrashPoint] = field(default_factory=Counter)
    """How often each point has been reached."""
    _draining: bool = False

    def reached(self, point: CrashPoint) -> None:
        """Report that the process is at `point`."""
        self._note(point)
        if self._draining and point is not CrashPoint.IN_DRAIN:
            self._note(CrashPoint.IN_DRAIN)

    def drain(self) -> None:
        """Report that the worker is draining: every later point also counts as `IN_DRAIN`."""
        self._draining = True

    def _note(self, point: CrashPoint) -> None:
        self.seen[point] += 1
        if point is self.point and self.seen[point] == self.occurrence:
            self.action()

    async def around(self, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call between the points `before_` and `after_` of `verb`; interrupt it if the point is `in_`."""
        middle = CrashPoint(f"in_{verb}")
        self.reached(CrashPoint(f"before_{verb}"))
        answer = await (self._interrupted(middle, call) if self.point is middle else call())
        self.reached(CrashPoint(f"after_{verb}"))
        return answer

    async def _interrupted(self, middle: CrashPoint, call: Callable[[], Awaitable[T]]) -> T:
        task = asyncio.ensure_future(call())
        try:
            await asyncio.wait({task}, timeout=IN_FLIGHT_SECONDS)
            self.reached(middle)
            return await task
        finally:
            task.cancel()


class CrashingStore:
    """A repository with points before, in and after each write operation.  A call may contain many keys."""

    def __init__(self, inner: IdempotencyRepository, plan: CrashPlan) -> None:
        self._inner = inner
        self._plan = plan

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        return await self._plan.around("reserve", lambda: self._inner.reserve(requests))

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        return await self._plan.around("renew", lambda: self._inner.renew(reservations, lease))

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        return await self._plan.around("complete", lambda: self._inner.complete(completions))

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        return await self._plan.around("fail", lambda: self._inner.fail(failures))

    async def release(
        self, reservations: Sequence[Reserved], *, delay: timedelta = NO_DELAY, retention: timedelta = NO_DELAY
    ) -> list[bool]:
        return await self._plan.around(
            "release", lambda: self._inner.release(reservations, delay=delay, retention=retention)
        )

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        return await self._inner.get(keys)

    async def delete(self, keys: Sequence[str]) -> int:
        return await self._inner.delete(keys)

    def scan(self, prefix: str) -> AsyncIterator[IdempotencyRecord]:
        return self._inner.scan(prefix)

    async def count_active(self, prefix: str) -> int:
        return await self._inner.count_active(prefix)

    async def ping(self) -> StoreHealth:
        return await self._inner.ping()


class CrashingPublisher(EventPublisher):
    """An `EventPublisher` with points around the events of handlers and around dead letters."""

    def __init__(self, settings: KafkaSettings, plan: CrashPlan, observer: Observer = SILENT) -> None:
        super().__init__(settings, observer)
        self._plan = plan
        self._dead_letter_suffix = settings.dead_letter_suffix

    async def publish(self, *events: BaseEvent) -> None:
        self._plan.reached(CrashPoint.BEFORE_PUBLISH)
        await super().publish(*events)
        self._plan.reached(CrashPoint.AFTER_PUBLISH)

    async def send_message(self, message: Message) -> Placement | None:
        self._plan.reached(CrashPoint.BEFORE_SEND)
        placement = await super().send_message(message)
        self._plan.reached(CrashPoint.AFTER_SEND)
        return placement

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> Placement | None:
        is_dead_letter = topic.endswith(self._dead_letter_suffix)
        if is_dead_letter:
            self._plan.reached(CrashPoint.BEFORE_DEAD_LETTER)
        placement = await super().send(topic, key, value, headers)
        if is_dead_letter:
            self._plan.reached(CrashPoint.AFTER_DEAD_LETTER)
        return placement


def crashing_invoke(plan: CrashPlan, invoke: Invoke = call_with_event) -> Invoke:
    """Wrap `invoke` with points before and after each handler call, but not around calls of reconcile functions."""

    async def call(handler: RegisteredHandler, what: HandlerCall | BatchCall) -> Any:
        if handler.is_reconcile:
            return await invoke(handler, what)
        plan.reached(CrashPoint.BEFORE_HANDLER)
        result = await invoke(handler, what)
        plan.reached(CrashPoint.AFTER_HANDLER)
        return result

    return call


def crashing_consumer(
    plan: CrashPlan, make: Callable[[KafkaSettings, str], Consumer] = make_consumer
) -> Callable[[KafkaSettings, str], Consumer]:
    """Return the `consumer` argument of a `ServiceWorker`: the consumer of `make`, with points around the broker."""
    return lambda settings, group: cast(Consumer, _CrashingConsumer(make(settings, group), plan))


class _CrashingConsumer:
    def __init__(self, inner: Consumer, plan: CrashPlan) -> None:
        self._inner = inner
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def subscribe(self, topics: Sequence[str], *, listener: Any) -> None:
        self._inner.subscribe(topics, listener=_CrashingListener(listener, self._plan))

    async def getmany(self, *partitions: Any, timeout_ms: int, max_records: int) -> Mapping[Any, Sequence[Any]]:
        batches = await self._inner.getmany(*partitions, timeout_ms=timeout_ms, max_records=max_records)
        if batches:
            self._plan.reached(CrashPoint.AFTER_FETCH)
        return batches

    async def commit(self, offsets: Mapping[Any, int]) -> None:
        await self._plan.around("commit", lambda: self._inner.commit(offsets))

    async def stop(self) -> None:
        self._plan.reached(CrashPoint.BEFORE_LEAVE)
        await self._inner.stop()
        self._plan.reached(CrashPoint.AFTER_LEAVE)


class _CrashingListener(ConsumerRebalanceListener):
    def __init__(self, inner: Any, plan: CrashPlan) -> None:
        self._inner = inner
        self._plan = plan

    async def on_partitions_revoked(self, revoked: Sequence[Any]) -> None:
        if revoked:  # before it first joins the group, aiokafka reports an empty revocation
            self._plan.reached(CrashPoint.BEFORE_REVOKE)
        await self._inner.on_partitions_revoked(revoked)
        if revoked:
            self._plan.reached(CrashPoint.AFTER_REVOKE)

    async def on_partitions_assigned(self, assigned: Sequence[Any]) -> None:
        await self._inner.on_partitions_assigned(assigned)
        if assigned:
            self._plan.reached(CrashPoint.ON_ASSIGN)
