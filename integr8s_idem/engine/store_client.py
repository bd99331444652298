"""Store access for one manager: coalesces calls and retries outcomes until they are durable.

The outcome of finished work must be recorded even if the store is briefly down, has lost the record, or receives a
request twice.  Records of other owners must not be changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from integr8s_idem._util.tokens import new_token
from integr8s_idem.config import IdempotencyConfig, OnStoreError
from integr8s_idem.engine.coalescer import Coalescer
from integr8s_idem.engine.error_text import describe_error
from integr8s_idem.engine.fork_guard import ForkGuard
from integr8s_idem.engine.request_batches import requests_of, retention_rule
from integr8s_idem.engine.results import NO_RESULT, NOT_KEPT, discarded_result, encode_result
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
    Pending,
    Previous,
    Reserved,
    ReserveRequest,
    StoredResult,
    Verdict,
)
from integr8s_idem.stores import NO_DELAY, IdempotencyRepository
from integr8s_idem.telemetry import Observer, Phase, Signal
from integr8s_idem.telemetry.log_fields import logging_with

logger = logging.getLogger(__name__)

T = TypeVar("T")
Q = TypeVar("Q")

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0
"""Seconds between attempts to write an outcome; the pause doubles up to the longest."""

EXPIRES_AT_ONCE: Final = timedelta(milliseconds=1)
"""The ttl of outcomes that are not kept: they expire before the next request."""

# Read once, because a member of an enumeration takes as long to read as two calls before Python 3.12.
_ALONE: Final = Isolation.ALONE
_RESULT_BYTES: Final = Signal.RESULT_BYTES

_UNRECORDED: Final = "%s has ended, but its outcome is not recorded, so it may run again: %s"
"""Log message."""


class StoreClient:
    """Reserves and settles keys for one manager."""

    def __init__(
        self, config: IdempotencyConfig, repository: IdempotencyRepository, observer: Observer, scope: str, owner: str
    ) -> None:
        self._config = config
        self._observer = observer
        self._scope = scope
        self._owner = owner
        # Read for every event; the settings compute them on each access.
        self._lease, self._default_ttl = config.lease, config.ttl
        self._retention_of = retention_rule(self._default_ttl, self._lease)
        self._default_retention = self._retention_of(None)
        self._stores_results, self._max_result_size = config.enable_result_caching, config.max_result_size_bytes
        self.space = KeySpace(config.key_prefix, scope, config.hash_keys)
        self._repository = repository
        self._coalescers: list[Coalescer[Any, Any]] = []
        self._reservations = self.coalesced(repository.reserve, self._release_abandoned)
        self._completions = self.coalesced(repository.complete)
        # Called for each unit of work, so they are the methods themselves.
        self.reserve: Callable[[ReserveRequest], Awaitable[Verdict]] = self._reservations.answer
        """Reserves a key.  If the caller is cancelled, the reservation is released."""
        self.complete: Callable[[Completion], Awaitable[bool]] = self._completions.answer
        """Records a completion."""
        self._failures = self.coalesced(repository.fail)
        self._releases = self.coalesced(repository.release)
        self.home = ForkGuard(scope)
        """Detects a use after the process was forked."""
        self._logged_drops: set[str] = set()
        self._background: set[asyncio.Task[Any]] = set()

    def coalesced(
        self, call: Callable[[list[Q]], Awaitable[Sequence[T]]], abandoned: Callable[[Q, T], None] | None = None
    ) -> Coalescer[Q, T]:
        """Return a coalescer of `call` whose requests `close` waits for."""
        with logging_with(service=self._scope):
            coalescer = Coalescer(call, abandoned=abandoned)
        self._coalescers.append(coalescer)
        return coalescer

    def leave_loop(self) -> None:
        """Drop the calls of an event loop that no longer runs."""
        for each in self._coalescers:
            each.leave_loop()
        self._background = set()

    # Single calls.

    def request(self, work: Work) -> ReserveRequest:
        """Make the reservation request for `work`.

        Raises:
            ApplicationError: The manager was used before this process was forked.
        """
        self.home.check()
        key, token = self.space.full(work.key), work.token
        if not token:
            token = work.token = new_token()
        return ReserveRequest(
            key=key,
            token=token,
            lease=self._lease,
            retention=self._default_retention if work.ttl is None else self._retention_of(work.ttl),
            fingerprint=work.fingerprint,
            owner=self._owner,
            trace=work.trace,
            alone=work.isolation is _ALONE,
        )

    def requests(self, works: Sequence[Work]) -> list[ReserveRequest]:
        """Make the reservation requests for `works`.  Raises an error like `request`."""
        self.home.check()
        return requests_of(works, self.space, self._lease, self._owner, self._retention_of)

    def unmark_later(self, work: Work, reserved: Reserved) -> None:
        """Clear the mark of an isolated attempt in the record, in the background."""
        request = replace(self.request(copy(work)), token=reserved.token, alone=False)
        self.in_background(self._unmark(work, request, reserved.fence))

    async def _unmark(self, work: Work, request: ReserveRequest, fence: int) -> None:
        try:
            [found] = await self._repository.reserve([request])
        except StoreError as error:
            logger.warning("%s: the record still marks the attempt as isolated: %s", work.key.label, error)
            return
        if isinstance(found, Reserved) and found.fence != fence:
            # The run released the key in the meantime, so this reservation has no run.
            await self.try_to_release(work, found)

    async def reserve_together(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        """Reserve keys in one call.  If the caller is cancelled, the reservations are released."""
        if not requests:
            return []
        call = self.in_background(self._repository.reserve(requests))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            call.add_done_callback(partial(self._release_all_abandoned, requests))
            raise

    async def complete_together(self, completions: Sequence[Completion], *, shielded: bool = True) -> list[bool]:
        """Record completions in one call, which continues if the caller is cancelled.

        Without `shielded`, it does not: for callers that run `in_background`.
        """
        if not completions:
            return []
        call = self._repository.complete(completions)
        return await (self._shielded(call) if shielded else call)

    async def release_together(self, reservations: Sequence[Reserved]) -> list[bool]:
        """Release reservations in one call, which continues if the caller is cancelled."""
        if not reservations:
            return []
        return await self._shielded(self._repository.release(reservations))

    async def _shielded(self, call: Coroutine[Any, Any, T]) -> T:
        task = self.in_background(call)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_retrieve_exception)
            raise

    def _release_all_abandoned(self, requests: Sequence[ReserveRequest], call: asyncio.Task[list[Verdict]]) -> None:
        if call.cancelled() or call.exception() is not None:
            return
        for request, verdict in zip(requests, call.result(), strict=True):
            self._release_abandoned(request, verdict)

    def fail(self, failure: Failure) -> Awaitable[bool]:
        return self._failures.answer(failure)

    def completion(self, reserved: Reserved, value: object, ttl: timedelta | None, event_type: str = "") -> Completion:
        """Make the record of a success.  A result that is too large or not serializable is dropped and counted."""
        stored, dropped = self._result_to_keep(reserved.key, value, event_type)
        return Completion(reservation=reserved, ttl=self._ttl(ttl), result=stored, result_dropped=dropped)

    def outcome_of(self, work: Work, reserved: Reserved, value: object) -> Completion:
        """Make the record of `work` that has returned `value`, with the ttl of the work."""
        if work.forgotten:
            return Completion(reservation=reserved, ttl=EXPIRES_AT_ONCE)
        stored, dropped = self._result_to_keep(reserved.key, value, work.event_type)
        return Completion(reservation=reserved, ttl=self._ttl(work.ttl), result=stored, result_dropped=dropped)

    def failure(self, reserved: Reserved, error: str, ttl: timedelta | None) -> Failure:
        """Make the record of work that is given up."""
        return Failure(reservation=reserved, ttl=self._ttl(ttl), error=error)

    def discarded(self, reserved: Reserved, error: str, ttl: timedelta | None) -> Completion:
        """Make the record of work that a rule discards."""
        return Completion(reservation=reserved, ttl=self._ttl(ttl), result=discarded_result(error))

    @property
    def busy(self) -> bool:
        """Whether a call is pending."""
        return bool(self._background) or any(each.busy for each in self._coalescers)

    async def close(self) -> None:
        """Wait for all pending calls, including those that they cause."""
        # A reservation whose caller was cancelled is released, which is another call.
        while self.busy:
            for each in self._coalescers:
                await each.wait_until_idle()
            if self._background:
                await asyncio.wait(self._background)

    def _ttl(self, ttl: timedelta | None) -> timedelta:
        return self._default_ttl if ttl is None else ttl

    # Outcomes.

    async def write_outcome(
        self,
        work: Work,
        outcome: Completion | Failure,
        deadline: float,
        wait_for_store: WaitForStore | None,
        *,
        policy: OnStoreError | None = None,
        unawaited: bool = False,
    ) -> None:
        """Write the outcome and retry while the store is down, so that a brief outage does not fail the work.

        If the caller is cancelled, the outcome is written in the background.  With `on_store_error = "open"`, it is not
        written if the store is down.

        Args:
            deadline: The end of the lease, including renewals, by the event loop's clock.
            policy: As configured if `None`.
            unawaited: Whether this is in the background already.  Then a refusal is retried too, since nobody gets it.
        """
        pause = FIRST_PAUSE
        try:
            while True:
                try:
                    if await (self.complete(outcome) if isinstance(outcome, Completion) else self.fail(outcome)):
                        return
                    outcome = replace(outcome, reservation=await self._reserved_again(work, outcome.reservation))
                except (StoreUnavailableError, StoreConfigurationError) as error:
                    self._observer.count(Signal.STORE_ERROR, work.event_type)
                    if (policy or self._config.on_store_error) is OnStoreError.OPEN:
                        return  # the policy is to continue without the store
                    if wait_for_store is not None:
                        await wait_for_store(error)
                        continue
                    refused = isinstance(error, StoreConfigurationError) and not unawaited
                    if refused or asyncio.get_running_loop().time() + pause > deadline:
                        raise ResultNotStoredError(work.key.label, error.reason) from error
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, LONGEST_PAUSE)
        except asyncio.CancelledError:
            if not unawaited:
                self.write_later(work, outcome, deadline)
            raise

    def write_later(self, work: Work, outcome: Completion | Failure, deadline: float) -> None:
        """Write the outcome in the background.  While the store is down or refuses it, retry until the lease ends.

        `deadline`: the end of the lease, by the event loop's clock.
        """
        self.in_background(self._write_unawaited(work, outcome, deadline))

    async def _write_unawaited(self, work: Work, outcome: Completion | Failure, deadline: float) -> None:
        try:
            await self.write_outcome(work, outcome, deadline, None, unawaited=True)
        except asyncio.CancelledError:
            logger.warning(_UNRECORDED, work.key.label, "the event loop ends")
            raise
        except (StoreError, LeaseLostError, ResultNotStoredError) as error:
            logger.warning(_UNRECORDED, work.key.label, error)

    async def _reserved_again(self, work: Work, reserved: Reserved) -> Reserved:
        """Reserve a key again after the store has rejected its token.

        A record that was evicted, flushed or lost in a failover is reserved again, so that the outcome of finished
        work is recorded after all.  If another worker holds or has settled the key, the lease is lost.
        """
        verdict = await self.reserve(self.request(work))
        if isinstance(verdict, Reserved):
            gone = verdict.previous is Previous.NONE
            self._observer.count(Signal.RECORD_VANISHED if gone else Signal.RESERVATION_LOST, work.event_type)
            return verdict
        self._observer.count(Signal.RESERVATION_LOST, work.event_type)
        raise self.lost(work, reserved, verdict.owner if isinstance(verdict, Pending) else "another worker")

    async def reserve_vanished(self, work: Work) -> Reserved | None:
        """Reserve a key again if the store has lost its record; return `None` if another worker has had the key."""
        request = self.request(work)
        # Read first: reserving a key that was released or ended by an operator would count an attempt that never runs.
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
        """Make the error for a reservation that this process no longer holds."""
        return LeaseLostError(work.key.label, reserved.attempt, reserved.lease, self._scope, owner, withdrawn=withdrawn)

    async def try_to_release(
        self,
        work: Work,
        reserved: Reserved,
        wait_for_store: WaitForStore | None = None,
        deadline: float = 0.0,
        *,
        delay: timedelta = NO_DELAY,
    ) -> bool:
        """Release the key, and return whether it was released.  If that fails, its lease expires.

        Args:
            wait_for_store: Awaited if the store does not answer; then the release is retried until the end of the lease
                at `deadline`.  Not with `on_store_error = "open"`: everything continues without the store.
            deadline: By the event loop's clock.
            delay: How long nobody may run the work, by the store's clock; zero for another attempt at once.
        """
        with self._observer.phase(Phase.RELEASE, work.event_type, handler=work.handler):
            while True:
                try:
                    released = await (self._schedule(work, reserved, delay) if delay else self._releases.ask(reserved))
                    break
                except StoreError as error:
                    self._observer.count(Signal.STORE_ERROR, work.event_type)
                    if wait_for_store is None or not isinstance(error, StoreUnavailableError):
                        return False
                    if self._config.on_store_error is OnStoreError.OPEN:
                        return False
                    await wait_for_store(error)
                if asyncio.get_running_loop().time() > deadline:
                    return False
        if not released:
            self._observer.count(Signal.RESERVATION_LOST, work.event_type)
        return released

    async def _schedule(self, work: Work, reserved: Reserved, delay: timedelta) -> bool:
        retention = self._retention_of(work.ttl)
        [released] = await self._shielded(self._repository.release([reserved], delay=delay, retention=retention))
        return released

    def release_later(self, work: Work, reserved: Reserved) -> None:
        """Release the key in the background, because the caller is being cancelled."""
        context = None if work.context is None else work.context.copy()
        self.in_background(self.try_to_release(work, reserved), context)

    def _release_abandoned(self, request: ReserveRequest, verdict: Verdict) -> None:
        """Release a reservation whose caller was cancelled before the answer arrived."""
        if isinstance(verdict, Reserved):
            self.release_later(Work(Key(request.key, request.key)), verdict)

    def in_background(self, work: Coroutine[Any, Any, T], context: Context | None = None) -> asyncio.Task[T]:
        """Start a task that nobody cancels, and for which `close` waits."""
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _result_to_keep(self, key: str, value: object, event_type: str) -> tuple[StoredResult | None, bool]:
        if value is NO_RESULT or (not self._stores_results and not isinstance(value, StoredResult)):
            return None, False
        stored, why = None, ""
        if value is not NOT_KEPT:
            try:
                stored = encode_result(value)
            except Exception as error:  # noqa: BLE001  # user-defined serializers may raise
                # The work is done, so a result that cannot be serialized must not fail it.
                why = describe_error(error)
        if stored is not None and len(stored.body) <= self._max_result_size:
            self._observer.count(_RESULT_BYTES, event_type, len(stored.body))
            return stored, False
        self._observer.count(Signal.RESULT_DROPPED, event_type)
        # Warn once per event type; if all its results are too large, repeating it does not help.
        level = logging.DEBUG if event_type in self._logged_drops else logging.WARNING
        self._logged_drops.add(event_type)
        why = why or f"it is larger than max_result_size_bytes ({self._max_result_size})"
        logger.log(level, "the result of %s is not stored, so duplicates will not get it: %s", key, why)
        return None, True


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a task without a waiter; asyncio would log it as never retrieved."""
    if not task.cancelled():
        task.exception()
