"""The steps of a delayed retry at which a worker can be killed, in addition to the named crash points."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar, cast

from integr8s_idem.config import KafkaSettings
from integr8s_idem.records import Previous, Reserved, ReserveRequest, Scheduled, Verdict
from integr8s_idem.stores import NO_DELAY, IdempotencyRepository
from integr8s_idem.testing.crash_points import (
    CrashingPublisher,
    CrashingStore,
    CrashPlan,
    CrashPoint,
    crashing_consumer,
    kill_myself,
)
from integr8s_idem.worker.dead_letters import RETRY_PREFIX
from integr8s_idem.worker.kafka_protocols import Consumer
from integr8s_idem.worker.publisher import Placement

T = TypeVar("T")

IN_FLIGHT_SECONDS: Final = 0.001
"""How long a call runs before its process is killed: it has been sent, and may or may not have been executed."""

CALLS: Final = ("schedule", "copy", "onward_copy", "event_commit", "copy_commit")
"""The record is scheduled; a failure is copied; a delivery that meets a scheduled record is copied; the offsets of
events, and those of copies, are committed."""
STEPS: Final = (
    *(f"{when}_{call}" for call in CALLS for when in ("before", "in", "after")),
    "before_failure",
    "after_copy_fetch",
    "after_scheduled_verdict",
    "after_due_verdict",
)
CRASH_POINTS: Final = frozenset(point.value for point in CrashPoint)


class StepPlan:
    """The step or crash point at which this process dies, and its occurrence.  Without one it never does."""

    def __init__(self, step: str, occurrence: int) -> None:
        self.crashes = CrashPlan(CrashPoint(step) if step in CRASH_POINTS else None, occurrence)
        """The plan for named crash points."""
        self._step = step
        self._occurrence = occurrence
        self._seen: Counter[str] = Counter()
        self._failures: set[tuple[str, int]] = set()

    def reached(self, step: str) -> None:
        """Report that the process is at `step`."""
        self._seen[step] += 1
        if step == self._step and self._seen[step] == self._occurrence:
            kill_myself()

    async def around(self, call: str, make: Callable[[], Awaitable[T]]) -> T:
        """Make a call between its steps; if the process dies in it, it is sent first."""
        self.reached(f"before_{call}")
        task = asyncio.ensure_future(make())
        if self._step == f"in_{call}":
            await asyncio.wait({task}, timeout=IN_FLIGHT_SECONDS)
            self.reached(self._step)
        answer = await task
        self.reached(f"after_{call}")
        return answer

    def note_failure(self, work: str, attempt: int) -> None:
        """Note that an attempt has failed, so that its first copy is known as such."""
        self._failures.add((work, attempt))

    def is_first_copy(self, work: str, attempt: int) -> bool:
        """Whether this is the first copy of an attempt that has failed in this process."""
        known = (work, attempt) in self._failures
        self._failures.discard((work, attempt))
        return known


class RetryingStore(CrashingStore):
    """A repository with the steps of delayed retries."""

    def __init__(self, inner: IdempotencyRepository, plan: StepPlan) -> None:
        super().__init__(inner, plan.crashes)
        self._steps = plan

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        verdicts = await super().reserve(requests)
        if any(isinstance(verdict, Scheduled) for verdict in verdicts):
            self._steps.reached("after_scheduled_verdict")
        if any(isinstance(verdict, Reserved) and verdict.previous is Previous.RELEASED for verdict in verdicts):
            self._steps.reached("after_due_verdict")
        return verdicts

    async def release(
        self, reservations: Sequence[Reserved], *, delay: timedelta = NO_DELAY, retention: timedelta = NO_DELAY
    ) -> list[bool]:
        release = super().release
        if not delay:
            return await release(reservations)
        return await self._steps.around("schedule", lambda: release(reservations, delay=delay, retention=retention))


class RetryingPublisher(CrashingPublisher):
    """A publisher with steps around copies."""

    def __init__(self, settings: KafkaSettings, plan: StepPlan) -> None:
        super().__init__(settings, plan.crashes)
        self._steps = plan

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> Placement | None:
        send = super().send
        if not is_retry_topic(topic):
            return await send(topic, key, value, headers)
        attempt = int(dict(headers)[f"{RETRY_PREFIX}attempt"])
        call = "copy" if self._steps.is_first_copy(json.loads(value or b"")["work"], attempt) else "onward_copy"
        return await self._steps.around(call, lambda: send(topic, key, value, headers))


def retrying_consumer(plan: StepPlan) -> Callable[[KafkaSettings, str], Consumer]:
    """Return the `consumer` argument of a `ServiceWorker`."""
    make = crashing_consumer(plan.crashes)
    return lambda settings, group: cast(Consumer, _RetryingConsumer(make(settings, group), plan))


class _RetryingConsumer:
    def __init__(self, inner: Consumer, plan: StepPlan) -> None:
        self._inner = inner
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def getmany(self, *partitions: Any, timeout_ms: int, max_records: int) -> Mapping[Any, Sequence[Any]]:
        batches = await self._inner.getmany(*partitions, timeout_ms=timeout_ms, max_records=max_records)
        if any(is_retry_topic(partition.topic) for partition in batches):
            self._plan.reached("after_copy_fetch")
        return batches

    async def commit(self, offsets: Mapping[Any, int]) -> None:
        calls = {"copy_commit" if is_retry_topic(partition.topic) else "event_commit" for partition in offsets}
        if len(calls) == 1:
            await self._plan.around(calls.pop(), lambda: self._inner.commit(offsets))
        else:
            await self._plan.around(
                "event_commit", lambda: self._plan.around("copy_commit", lambda: self._inner.commit(offsets))
            )


def is_retry_topic(topic: str) -> bool:
    return ".retry." in topic
