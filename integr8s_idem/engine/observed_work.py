"""Observe work without guarding it: which deliveries are duplicates, of which kind, and how far apart.

The work never waits for an observation.  Its key is reserved in the background, and completed when the work has
succeeded.  If the key is not free, the work is a duplicate, which runs nevertheless.  An observation that fails is
counted, and has no other effect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from integr8s_idem.config import OnStoreError
from integr8s_idem.engine.leases import HeldLease
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.results import observed_place, observed_result
from integr8s_idem.engine.work import Work
from integr8s_idem.errors import IdempotencyError, StoreError
from integr8s_idem.keys import KeySpace
from integr8s_idem.records import (
    Completion,
    Corrupt,
    IdempotencyRecord,
    IdempotencyStatus,
    InProgress,
    KeyReused,
    Previous,
    Reserved,
    Scheduled,
    Verdict,
)
from integr8s_idem.telemetry import Observation, Observed, Signal

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 10_000
"""Observations that wait for the store; further work is not observed until it answers."""

BLIND_SECONDS: Final = 1.0
"""After the store did not answer, work is not observed for this long: every request could take until its timeout."""

OUTCOME_SECONDS: Final = 10.0
"""How long an outcome is written again while the store does not answer, at most until the lease ends."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a message is in Kafka."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


class WorkObserver:
    """Observes the work of one manager."""

    def __init__(self, manager: IdempotencyManager, ttl: timedelta) -> None:
        """`ttl`: how long records are kept."""
        self._manager = manager
        self._ttl = ttl
        self._executor = manager.executor
        self._client = manager.executor.client
        self._observer = manager.observer
        self._records = self._client.coalesced(manager.measured_repository.get)
        self._ending: dict[tuple[str, int], asyncio.Task[None]] = {}
        """Tasks that record the end of work, by its key and generation."""
        self._waiting = 0
        self._blind_until = float("-inf")
        """When to ask the store again, by the event loop's clock."""
        self._is_failing = False
        self._logged: set[type[Exception]] = set()

    @property
    def space(self) -> KeySpace:
        """The namespace of the keys in the store."""
        return self._client.space

    def observed(self, work: Work, place: Place | None) -> ObservedWork:
        """Return an object to report the attempts of `work` to; `place` is that of its message, if it has one."""
        return ObservedWork(self, work, place)

    def note_no_key(self, event_type: str, error: Exception) -> None:
        """Note that work is not observed, because making its key raised `error`."""
        self.note(event_type, Observation(Observed.FAILED))
        self._log_once(error, "work without a key is not observed")

    def note(self, event_type: str, observation: Observation) -> None:
        """Report an observation."""
        self._observer.observed(event_type, observation)

    def in_background(self, part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part of an observation in a task, for which the manager waits when it is closed."""
        return self._client.in_background(part)

    def ending(self, work: Work) -> asyncio.Task[None] | None:
        """Return the task that records the end of other work with the same key in this process, if there is one.

        A duplicate that comes before that is recorded is not concurrent.
        """
        return self._ending.get((work.key.text, work.key.generation))

    def note_ending(self, work: Work, task: asyncio.Task[None]) -> None:
        """Note the task that records the end of `work`."""
        key = work.key.text, work.key.generation
        self._ending[key] = task

        def forget(ended: asyncio.Task[None]) -> None:
            if self._ending.get(key) is ended:
                del self._ending[key]

        task.add_done_callback(forget)

    # Requests to the store.

    async def ask(self, work: Work, place: Place | None) -> tuple[HeldLease | None, Observation]:
        """Reserve the key of `work`, or find out which kind of duplicate it is."""
        if self._waiting >= MOST_WAITING or asyncio.get_running_loop().time() < self._blind_until:
            return None, Observation(Observed.FAILED)
        self._waiting += 1
        try:
            asked_at = self._executor.now()
            verdict = await self._client.reserve(self._client.request(work))
            work.forget_token()
            lease = None
            if isinstance(verdict, Reserved):
                lease = self._executor.reserved(work, verdict, asked_at).lease
            observation = await self._judge(verdict, place)
        except Exception as error:  # noqa: BLE001  # counted; the work goes on without it
            self._note_failure(work, error)
            return None, Observation(Observed.FAILED)
        finally:
            self._waiting -= 1
        self._note_answer()
        return lease, observation

    async def _judge(self, verdict: Verdict, place: Place | None) -> Observation:
        if isinstance(verdict, Reserved):
            return Observation(Observed.FIRST if verdict.previous is Previous.NONE else Observed.RETRIED)
        if isinstance(verdict, Scheduled):  # by a worker that enforces; nobody is handling it
            return Observation(Observed.RETRIED)
        if isinstance(verdict, Corrupt):
            self._observer.count(Signal.CORRUPT_RECORD)
            return Observation(Observed.FAILED)
        has_other_payload = isinstance(verdict, KeyReused)
        if isinstance(verdict, InProgress):
            return Observation(Observed.CONCURRENT)
        # The record has the place of the first message, and both times by the store's clock.
        record = await self._records.answer(verdict.key)
        return Observation(_kind(record, place), _gap(record), has_other_payload)

    async def settle(self, work: Work, place: Place | None, lease: HeldLease, *, is_done: bool) -> None:
        """Complete the key of work that has succeeded, or release it."""
        lease.drop()
        if not is_done:
            await self._client.try_to_release(work, lease.reservation)
            return
        result = None if place is None else observed_result(str(place))
        completion = Completion(reservation=lease.reservation, ttl=self._ttl, result=result)
        deadline = min(lease.deadline, asyncio.get_running_loop().time() + OUTCOME_SECONDS)
        try:
            await self._client.write_outcome(work, completion, deadline, None, policy=OnStoreError.CLOSED)
        except Exception as error:  # noqa: BLE001  # counted; the work has succeeded all the same
            self.note(work.event_type, Observation(Observed.UNRECORDED))
            if not isinstance(error, IdempotencyError):
                self._log_once(error, "the outcome of observed work is not recorded")

    # Failures.

    def _note_failure(self, work: Work, error: Exception) -> None:
        self._observer.count(Signal.STORE_ERROR, work.event_type)
        if not isinstance(error, StoreError):
            self._log_once(error, "work is not observed")
            return
        self._blind_until = asyncio.get_running_loop().time() + BLIND_SECONDS
        if not self._is_failing:
            self._is_failing = True
            logger.warning("%s: handlers run, but deliveries are not observed: %s", self._manager.scope, error)

    def _note_answer(self) -> None:
        if self._is_failing:
            self._is_failing = False
            logger.info("%s: the store answers again, deliveries are observed", self._manager.scope)

    def _log_once(self, error: Exception, what: str) -> None:
        """Log the first error of its class; all of them are counted."""
        if type(error) not in self._logged:
            self._logged.add(type(error))
            logger.error("%s: %s: %s", self._manager.scope, what, error, exc_info=error)


class ObservedWork:
    """One unit of work whose attempts are observed, in order, by tasks of their own."""

    __slots__ = ("_is_noted", "_last", "_lease", "_observer", "_place", "_work")

    def __init__(self, observer: WorkObserver, work: Work, place: Place | None) -> None:
        self._observer = observer
        self._work = work
        self._place = place
        self._lease: HeldLease | None = None
        self._is_noted = False
        """Whether the work has been counted."""
        self._last: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Note that an attempt begins."""
        before = self._last, self._observer.ending(self._work)
        self._last = self._observer.in_background(self._begin(*before))

    def end(self, *, is_done: bool) -> None:
        """Note that the attempt has ended: the work is done, or may be tried again."""
        self._last = self._observer.in_background(self._end(self._last, is_done))
        self._observer.note_ending(self._work, self._last)

    async def _begin(self, last: asyncio.Task[None] | None, other: asyncio.Task[None] | None) -> None:
        await _ended(last)
        await _ended(other)
        self._lease, observation = await self._observer.ask(self._work, self._place)
        if observation.result is Observed.FAILED or not self._is_noted:
            self._is_noted |= observation.result is not Observed.FAILED
            self._observer.note(self._work.event_type, observation)

    async def _end(self, last: asyncio.Task[None] | None, is_done: bool) -> None:
        await _ended(last)
        lease, self._lease = self._lease, None
        if lease is not None:
            await self._observer.settle(self._work, self._place, lease, is_done=is_done)


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task is not None and not task.done():
        await asyncio.wait({task})


def _kind(record: IdempotencyRecord | None, place: Place | None) -> Observed:
    """Return which kind of duplicate the message at `place` is of the work in `record`."""
    if record is None or record.status is IdempotencyStatus.FAILED:
        return Observed.UNKNOWN
    if record.status is IdempotencyStatus.PROCESSING:
        return Observed.CONCURRENT
    first = observed_place(record.result)
    if first is None or place is None:
        return Observed.UNKNOWN
    return Observed.REDELIVERED if first == str(place) else Observed.REPUBLISHED


def _gap(record: IdempotencyRecord | None) -> timedelta | None:
    """Return the time since the work was settled, by the store's clock; `None` if it is unknown."""
    if record is None or record.settled_at is None or record.seen_at is None:
        return None
    return max(record.seen_at - record.settled_at, timedelta())
