"""The store as one manager uses it: calls gathered, outcomes written until they stand.

What is done must be remembered though the store is down for a moment, has lost the record, or has been
asked twice; what is not ours any more must not be touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

from integr8s_idem._util.tokens import new_token
from integr8s_idem.config import IdempotencyConfig, OnStoreError
from integr8s_idem.config.message_text import text_of
from integr8s_idem.config.urls import redacted
from integr8s_idem.engine.coalescer import Coalescer
from integr8s_idem.engine.fork_guard import ForkGuard
from integr8s_idem.engine.results import NOT_KEPT, encode_result
from integr8s_idem.engine.work import Isolation, WaitForStore, Work
from integr8s_idem.errors import (
    LeaseLostError,
    ResultNotStoredError,
    StoreConfigurationError,
    StoreError,
    StoreUnavailableError,
)
from integr8s_idem.keys import Key, KeySpace
from integr8s_idem.records import (
    Completion,
    Failure,
    InProgress,
    Previous,
    Reserved,
    ReserveRequest,
    StoredResult,
    TraceLink,
    Verdict,
)
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.telemetry import Observer, Phase, Signal

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_ERROR: Final = 1024
"""Characters of an error kept in a FAILED record."""

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0
"""Seconds between two tries to write an outcome, growing from the first to the longest."""

AT_ONCE: Final = timedelta(milliseconds=1)
"""Remembered so long, by the store's clock, is forgotten before the next look."""

RETENTION_IN_LEASES: Final = 10
"""A record that nobody settles is kept for this many leases at least, so that attempts of a crashing event count."""


class StoreClient:
    """Reserves and settles on behalf of one manager."""

    def __init__(
        self, config: IdempotencyConfig, repository: IdempotencyRepository, observer: Observer, scope: str, owner: str
    ) -> None:
        self._config = config
        self._observer = observer
        self._scope = scope
        self._owner = owner
        # Asked for at every event, and made anew by the settings each time.
        self._lease, self._default_ttl = config.lease, config.ttl
        self._longest_unsettled = RETENTION_IN_LEASES * self._lease
        self._retention = max(self._default_ttl, self._longest_unsettled)
        self.space = KeySpace(config.key_prefix, scope, config.hash_keys)
        self._repository = repository
        self._reservations = Coalescer(repository.reserve, abandoned=self._give_back)
        self._completions = Coalescer(repository.complete)
        self._failures = Coalescer(repository.fail)
        self._releases = Coalescer(repository.release)
        self.home = ForkGuard(scope)
        """The process that it works in."""
        self._told_of_dropping: set[str] = set()
        self._background: set[asyncio.Task[Any]] = set()

    # Single calls.

    def request(self, work: Work, trace: TraceLink | None = None) -> ReserveRequest:
        """What to ask the store for.

        Raises:
            ApplicationError: The manager was used before this process was forked.
        """
        self.home.check()
        if not work.token:
            work.token = new_token()
        return ReserveRequest(
            key=self.space.full(work.key),
            token=work.token,
            lease=self._lease,
            retention=self._retention if work.ttl is None else max(work.ttl, self._longest_unsettled),
            fingerprint=work.fingerprint,
            owner=self._owner,
            trace=trace,
            alone=work.isolation is Isolation.ALONE,
        )

    def unmark_later(self, work: Work, reserved: Reserved) -> None:
        """Let a record say that its attempt runs alone no longer; without waiting."""
        request = replace(self.request(replace(work)), token=reserved.token, alone=False)
        self._in_background(self._unmark(work, request, reserved.fence))

    async def _unmark(self, work: Work, request: ReserveRequest, fence: int) -> None:
        try:
            [found] = await self._repository.reserve([request])
        except StoreError as error:
            logger.warning("%s: its record still says that it runs alone: %s", work.key.label, error)
            return
        if isinstance(found, Reserved) and found.fence != fence:
            # It was released meanwhile: this reservation belongs to no run.
            await self.try_to_release(work, found)

    def reserve(self, request: ReserveRequest) -> Awaitable[Verdict]:
        """Ask; if we are cancelled meanwhile, what we get is given back."""
        return self._reservations.answer(request)

    async def reserve_together(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        """Ask for all of them in one call; if we are cancelled meanwhile, what we get is given back."""
        if not requests:
            return []
        call = self._in_background(self._repository.reserve(requests))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(partial(self._give_all_back, requests))
            raise

    async def complete_together(self, completions: Sequence[Completion]) -> list[bool]:
        """Remember all of them in one call, which goes on if we are cancelled."""
        if not completions:
            return []
        return await self._to_its_end(self._repository.complete(completions))

    def complete_later(self, completion: Completion) -> None:
        """Remember it without waiting, and with many of its kind."""
        # Cancelled, nobody waits for the answer; it is asked nevertheless.
        self._completions.ask(completion).cancel()

    async def release_together(self, reservations: Sequence[Reserved]) -> list[bool]:
        """Give all of them back in one call, which goes on if we are cancelled."""
        if not reservations:
            return []
        return await self._to_its_end(self._repository.release(reservations))

    async def _to_its_end(self, call: Coroutine[Any, Any, T]) -> T:
        task = self._in_background(call)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_seen)
            raise

    def _give_all_back(self, requests: Sequence[ReserveRequest], call: asyncio.Task[list[Verdict]]) -> None:
        if call.cancelled() or call.exception() is not None:
            return
        for request, verdict in zip(requests, call.result(), strict=True):
            self._give_back(request, verdict)

    def complete(self, completion: Completion) -> Awaitable[bool]:
        return self._completions.answer(completion)

    def fail(self, failure: Failure) -> Awaitable[bool]:
        return self._failures.answer(failure)

    def completion(self, reserved: Reserved, value: object, ttl: timedelta | None, event_type: str = "") -> Completion:
        """The record of a success.  A result that is too large or cannot be written is dropped and counted."""
        stored, dropped = self._result_to_keep(reserved.key, value, event_type)
        return Completion(reservation=reserved, ttl=self._ttl(ttl), result=stored, result_dropped=dropped)

    def outcome_of(self, work: Work, reserved: Reserved, value: object) -> Completion:
        """The record of `work` that has returned `value`, for as long as it wants to be remembered."""
        if work.forgotten:
            return Completion(reservation=reserved, ttl=AT_ONCE)
        return self.completion(reserved, value, work.ttl, work.event_type)

    def failure(self, reserved: Reserved, error: str, ttl: timedelta | None) -> Failure:
        """The record of work that is given up."""
        return Failure(reservation=reserved, ttl=self._ttl(ttl), error=error)

    async def close(self) -> None:
        """Return once all calls that are under way have ended, and those that come of them."""
        calls: Sequence[Coalescer[Any, Any]] = (
            self._reservations,
            self._completions,
            self._failures,
            self._releases,
        )
        # What was reserved for somebody who was cancelled meanwhile is given back: another call.
        while self._background or any(each.busy for each in calls):
            for each in calls:
                await each.settled()
            if self._background:
                await asyncio.wait(self._background)

    def _ttl(self, ttl: timedelta | None) -> timedelta:
        return self._default_ttl if ttl is None else ttl

    # Outcomes.

    async def settle(
        self, work: Work, outcome: Completion | Failure, deadline: float, wait_for_store: WaitForStore | None
    ) -> None:
        """Write the outcome; a store that is down for a moment must not turn a success into a failure.

        `deadline`: when the lease ends, renewals included, by the event loop's clock.
        """
        pause = FIRST_PAUSE
        while True:
            try:
                if await (self.complete(outcome) if isinstance(outcome, Completion) else self.fail(outcome)):
                    return
                outcome = replace(outcome, reservation=await self._reserved_again(work, outcome.reservation))
            except (StoreUnavailableError, StoreConfigurationError) as error:
                self._observer.count(Signal.STORE_ERROR, work.event_type)
                if self._config.on_store_error is OnStoreError.OPEN:
                    return  # who runs without the store does not wait for it either
                if wait_for_store is not None:
                    await wait_for_store(error)
                    continue
                refused = isinstance(error, StoreConfigurationError)
                if refused or asyncio.get_running_loop().time() + pause > deadline:
                    raise ResultNotStoredError(work.key.label, error.reason) from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)

    async def _reserved_again(self, work: Work, reserved: Reserved) -> Reserved:
        """The store does not know our token any more: find out why, and take the key if nobody has it.

        A record that was evicted, flushed or lost in a failover is reserved anew, so that the outcome
        of work that is done is remembered after all.  A key that somebody else holds or has settled
        is lost to us.
        """
        verdict = await self.reserve(self.request(work))
        if isinstance(verdict, Reserved):
            gone = verdict.previous is Previous.NONE
            self._observer.count(Signal.RECORD_VANISHED if gone else Signal.RESERVATION_LOST, work.event_type)
            return verdict
        self._observer.count(Signal.RESERVATION_LOST, work.event_type)
        raise self.lost(work, reserved, verdict.owner if isinstance(verdict, InProgress) else "another worker")

    async def reserved_anew(self, work: Work) -> Reserved | None:
        """The reservation again, if the store has merely forgotten it; `None` if somebody else had the key since."""
        request = self.request(work)
        # A look first: to reserve what somebody gave back, or an operator ended, would cost an attempt that never runs.
        [record] = await self._repository.get([request.key])
        if record is not None:
            return None
        verdict = await self.reserve(request)
        if not isinstance(verdict, Reserved):
            return None
        if verdict.previous is Previous.NONE:
            self._observer.count(Signal.RECORD_VANISHED, work.event_type)
            return verdict
        await self.try_to_release(work, verdict)
        return None

    def lost(self, work: Work, reserved: Reserved, owner: str = "", *, withdrawn: bool = False) -> LeaseLostError:
        """The error for a reservation that is no longer ours."""
        return LeaseLostError(work.key.label, reserved.attempt, reserved.lease, self._scope, owner, withdrawn=withdrawn)

    async def try_to_release(
        self, work: Work, reserved: Reserved, wait_for_store: WaitForStore | None = None, deadline: float = 0.0
    ) -> None:
        """Give the key back.  If that fails, its lease ends by itself.

        `wait_for_store`: awaited while the store gives no answer; then it is tried again, up to the end of the
        lease at `deadline`, by the event loop's clock.
        """
        with self._observer.phase(Phase.RELEASE, work.event_type):
            while True:
                try:
                    released = await self._releases.ask(reserved)
                    break
                except StoreError as error:
                    self._observer.count(Signal.STORE_ERROR, work.event_type)
                    if wait_for_store is None or not isinstance(error, StoreUnavailableError):
                        return
                    await wait_for_store(error)
                if asyncio.get_running_loop().time() > deadline:
                    return
        if not released:
            self._observer.count(Signal.RESERVATION_LOST, work.event_type)

    def release_later(self, work: Work, reserved: Reserved) -> None:
        """Give the key back without waiting: we are being cancelled."""
        self._in_background(self.try_to_release(work, reserved))

    def _give_back(self, request: ReserveRequest, verdict: Verdict) -> None:
        """The caller was cancelled while its reservation was under way."""
        if isinstance(verdict, Reserved):
            self.release_later(Work(Key(request.key, request.key)), verdict)

    def _in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _result_to_keep(self, key: str, value: object, event_type: str) -> tuple[StoredResult | None, bool]:
        if not self._config.enable_result_caching and not isinstance(value, StoredResult):
            return None, False
        stored, why = None, f"it is larger than max_result_size_bytes ({self._config.max_result_size_bytes})"
        if value is not NOT_KEPT:
            try:
                stored = encode_result(value)
            except Exception as error:  # noqa: BLE001  # a serializer is the user's code
                # The work is done: what cannot be written must not undo that.
                why = describe_error(error)
        if stored is not None and len(stored.body) <= self._config.max_result_size_bytes:
            self._observer.count(Signal.RESULT_BYTES, event_type, len(stored.body))
            return stored, False
        self._observer.count(Signal.RESULT_DROPPED, event_type)
        # Once for each type of event: where all results are too large, that is no news.
        level = logging.DEBUG if event_type in self._told_of_dropping else logging.WARNING
        self._told_of_dropping.add(event_type)
        logger.log(level, "the result of %s is not kept, so that no duplicate will get it: %s", key, why)
        return None, True


def _seen(task: asyncio.Task[Any]) -> None:
    """Nobody waits for it any more: an error that nobody has looked at would be logged as a bug."""
    if not task.cancelled():
        task.exception()


def describe_error(error: BaseException) -> str:
    """One line about `error`, bounded and without credentials: for records, logs and dead letters."""
    told = text_of(error)
    # Cut once before, so that looking for credentials is bounded, and far enough behind not to cut one in two.
    text = redacted(" ".join(f"{type(error).__name__}: {told[: 4 * LONGEST_ERROR]}".split()))
    return text if len(text) <= LONGEST_ERROR else text[: LONGEST_ERROR - 1] + "…"
