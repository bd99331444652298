"""A run of a unit of work, from its reservation to its outcome or release.

    run = await executor.open(work)                 # a `Run`, or an existing outcome
    returned = await run.call(function)             # `Returned`, or an outcome that is recorded
    outcome = await run.complete(returned)          # records the outcome

If a framework does the work between two callbacks:

    run.start(task)                                 # cancels `task` if the lease is lost
    …
    outcome = await run.finish(value)               # or `fail(error)`, or `release()`
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from types import CoroutineType
from typing import Any, Final, Generic, TypeVar, final

from msgspec import Struct

from integr8s_idem._util.first_step import as_coroutine, rest
from integr8s_idem.config import IdempotencyConfig, OnFailure
from integr8s_idem.engine.active_runs import ActiveRun, ActiveRuns
from integr8s_idem.engine.error_text import describe_error
from integr8s_idem.engine.iterators import PLAIN_CLASSES
from integr8s_idem.engine.leases import HeldLease, LateStartError
from integr8s_idem.engine.local_cache import LocalCache
from integr8s_idem.engine.results import repeatable
from integr8s_idem.engine.store_client import StoreClient
from integr8s_idem.engine.transactions import OutcomeWriter, UnknownCommitError
from integr8s_idem.engine.work import (
    SUSPECT_AFTER,
    Attempt,
    Discarded,
    Executed,
    HandlerFailed,
    Isolation,
    NotStarted,
    WaitForStore,
    is_crash_limit_reached,
)
from integr8s_idem.errors import (
    CrashedTooOftenError,
    LeaseLostError,
    OutcomeUnknownError,
    PermanentError,
    ResultNotStoredError,
    TransactionAbortedError,
)
from integr8s_idem.failures import FailureAction, FailureRule
from integr8s_idem.records import Completed, Completion, Previous, Reserved
from integr8s_idem.telemetry import Observer, Phase, Signal
from integr8s_idem.telemetry.detached_phase import DetachedPhase

T = TypeVar("T")

# Read once, because a member of an enumeration takes as long to read as two calls before Python 3.12.
_HANDLE: Final = Phase.HANDLE
_COMPLETE: Final = Phase.COMPLETE
_PENDING: Final = Isolation.PENDING


class RunServices:
    """Objects shared by all runs of one manager."""

    def __init__(self, config: IdempotencyConfig, client: StoreClient, observer: Observer) -> None:
        self.config = config
        self.client = client
        self.observer = observer
        self.runs = ActiveRuns(client.space.scope)
        self.cache = LocalCache(config.local_memory_keys) if config.local_memory_keys else None
        """The work completed by this process, if configured."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run."""

    wait_for_store: WaitForStore | None = None
    """Awaited if the store does not answer when the outcome is written; then the write is retried, without limit.
    `None`: retry until the lease ends."""
    writes_outcome: bool = False
    """Whether the work records its outcome in its own transaction.  Then its lease is not renewed, so that only that
    transaction writes the record, at any isolation level, and the work must finish within one lease."""
    needs_reservation: bool = False
    """Whether the work must not run without a reservation, not even if the policy allows it."""


class Returned(Struct, Generic[T], frozen=True, eq=False):
    """A run whose function has returned and whose outcome is not recorded yet."""

    run: Run
    value: T
    completion: Completion | None
    """`None` if the function has recorded its outcome, or if there is no reservation."""


@final
class Run(ActiveRun, kw_only=True, eq=False):
    """A run of a unit of work, with or without a reservation."""

    services: RunServices
    options: RunOptions
    writer: OutcomeWriter | None = None
    """Set if the work records its outcome in its own transaction."""
    _phase: DetachedPhase | None = None
    """Set by `start`."""

    def is_late(self) -> bool:
        """Whether too little of the lease is left to start the work now."""
        return self.lease is not None and self.lease.is_late()

    @property
    def is_suspect(self) -> bool:
        """Whether the work must run alone, because it is suspected of crashing its process."""
        work, lease = self.work, self.lease
        return (
            work.isolation is _PENDING
            and lease is not None
            and lease.reservation.lapsed >= SUSPECT_AFTER
            and not self._crashed_too_often(lease.reservation)
        )

    @property
    def has_crashed_too_often(self) -> bool:
        """Whether too many earlier runs have crashed, so that the work must be given up."""
        return self.lease is not None and self._crashed_too_often(self.lease.reservation)

    async def give_up(self) -> HandlerFailed:
        """Record that the work has crashed too often to be retried."""
        lease = self.lease
        assert lease is not None, "a run without a reservation has no recorded crashes"
        lease.drop()
        self.end()
        reserved = lease.reservation
        return await self._record_failure(lease, CrashedTooOftenError(self._crashes(reserved)), reserved.attempt)

    # Work as a function.

    async def wait_for_turn(self) -> None:
        """Wait because other functions have occupied the event loop for long.  Call it before the function is called.

        Raises:
            CancelledError: The caller was cancelled; the key has been released.
        """
        try:
            await self.among.pace.wait()
        except asyncio.CancelledError:
            self.release()
            raise

    async def call(
        self, function: Callable[[Attempt], Awaitable[T]]
    ) -> Returned[T] | HandlerFailed | Discarded | NotStarted:
        """Call `function` without recording its result: pass it to `complete`, or record it together with others.

        Returns:
            `NotStarted` if too little of the lease was left: reserve the work again.

        Raises:
            LeaseLostError: The reservation was lost during the run.
            StoreError: The function could not record its outcome.
            CancelledError: The caller was cancelled; the key has been released.
        """
        services, work, lease, runs = self.services, self.work, self.lease, self.among
        if lease is None:
            return await self._call_unguarded(function)
        if lease.is_late():
            return self.not_started()
        attempt = self._begin_attempt(lease)
        runs.enter(self)
        try:
            try:
                with services.observer.phase(_HANDLE, work.event_type, attempt=attempt.number, handler=work.handler):
                    try:
                        called = function(attempt)
                        running = called if type(called) is CoroutineType else as_coroutine(called)
                        try:
                            waiting_for = running.send(None)
                        except StopIteration as end:
                            result: T = end.value
                        else:
                            # Code that never waits cannot be cancelled, so its deadline starts only now.
                            with lease:
                                result = await rest(running, waiting_for)
                    finally:
                        lease.drop()
                    if type(result) not in PLAIN_CLASSES:
                        result = repeatable(result, attempt.label, work.returns)
            except asyncio.CancelledError:
                services.client.release_later(work, lease.reservation)
                raise
            except Exception as error:
                ended = await self._raised(lease, error)
                if ended is None:
                    raise
                return ended
            return self._returned(lease, result)
        except BaseException:
            runs.remove(self)
            raise
        finally:
            runs.leave(self)

    async def _raised(self, lease: HeldLease, error: Exception) -> HandlerFailed | Discarded | NotStarted | None:
        """End a run whose function has raised `error`; `None` if the work has not failed: re-raise the error."""
        self.services.client.home.check()
        if isinstance(error, LateStartError) and error.lease is lease:
            self._leave()
            return self.not_started()
        failed = await self._failed(lease, error)
        if failed is not None:
            self._leave()
        return failed

    async def complete(self, returned: Returned[T]) -> Executed[T]:
        """Record the result of the function; if the caller is cancelled, in the background.

        Raises:
            ResultNotStoredError: Only without `wait_for_store`: the work is done, but the outcome is not recorded.
            LeaseLostError: The reservation was lost during the run.
        """
        lease, completion = self.lease, returned.completion
        try:
            if lease is not None and completion is not None:
                began_at, services, wait = monotonic(), self.services, self.options.wait_for_store
                with services.observer.phase(_COMPLETE, self.work.event_type, handler=self.work.handler):
                    await services.client.write_outcome(self.work, completion, lease.deadline, wait)
                if services.cache is not None:
                    self.keep(completion, began_at)
        finally:
            self._leave()
        return Executed(returned.value, self.attempt.number)

    def keep(self, completion: Completion, began_at: float) -> None:
        """Add the outcome to the local cache, if configured.

        `began_at`: the time by `time.monotonic` when the store was asked to record it.
        """
        cache, work = self.services.cache, self.work
        if cache is None or work.forgotten:
            return
        reserved = completion.reservation
        completed = Completed(
            key=reserved.key,
            attempt=reserved.attempt,
            completed_at=datetime.now(UTC),
            result=completion.result,
            result_dropped=completion.result_dropped,
            trace=work.trace,
        )
        cache.keep(completed, work.fingerprint, began_at, completion.ttl)

    def unrecorded(self, returned: Returned[T]) -> Executed[T]:
        """Return the outcome of a run without a reservation, or that wrote its outcome itself, and end the run."""
        self._leave()
        return Executed(returned.value, self.attempt.number)

    def complete_later(self, returned: Returned[Any]) -> None:
        """Record the result in the background, until the lease ends, because nobody waits for it any more."""
        lease, completion = self.lease, returned.completion
        assert lease is not None
        assert completion is not None
        self.services.client.write_later(self.work, completion, lease.deadline)
        self._leave()

    # Work between two callbacks.

    def start(self, owner: asyncio.Task[Any]) -> Attempt:
        """Start the timer of the work, which must not be late.  `owner` is cancelled if the lease is lost."""
        lease = self.lease
        if lease is None:
            return self.attempt
        attempt = self._begin_attempt(lease)
        self.among.add(self)
        lease.enter(owner)
        work = self.work
        phase = self.services.observer.phase(_HANDLE, work.event_type, attempt=attempt.number, handler=work.handler)
        self._phase = DetachedPhase(phase, copy_context())
        return attempt

    def within(self) -> AbstractContextManager[None]:
        """Make the block part of the run: it may use its steps, and must not request its own key."""
        return self.among.within(self)

    def raise_if_lost(self) -> None:
        """Raise if the lease is lost, and withdraw the cancellation of the owner.

        Raises:
            LeaseLostError: The lease is lost.
        """
        lease = self.lease
        if lease is not None and not self.is_over and lease.lost:
            self.stop()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop the timer of the work, which may have raised `error`: the owner is no longer cancelled.

        `finish` and `fail` call it first.  To run them in other tasks, call it before in the owner.

        Raises:
            LeaseLostError: The lease has already expired.
        """
        lease = self.lease
        if lease is None or not lease.entered:
            return
        lost = lease.leave()
        self._end_phase(error)
        if lost:
            self._leave()
            self.services.observer.count(Signal.RESERVATION_LOST, self.work.event_type)
            raise self.services.client.lost(self.work, lease.reservation, withdrawn=lease.withdrawn) from error

    async def finish(self, value: T) -> Executed[T]:
        """Record that the work is done.

        Raises:
            LeaseLostError, ResultNotStoredError: See `complete`.
        """
        if self.lease is None:
            return self.unrecorded(Returned(self, value, None))
        return await self.complete(self.returned(self.lease, value))

    def returned(self, lease: HeldLease, value: T) -> Returned[T]:
        """End the work, whose outcome is to be recorded by `complete`, or together with others by the executor.

        Raises:
            LeaseLostError: The lease has already expired.
        """
        self.stop()
        try:
            return self._returned(lease, value)
        except BaseException:
            self._leave()
            raise

    async def fail(self, error: Exception) -> HandlerFailed | Discarded:
        """Record that the work has failed, or release it for another attempt.

        Raises:
            LeaseLostError: The reservation was lost on the way.
        """
        lease = self.lease
        if lease is None:
            return self._unguarded_failure(error)
        self.stop(error)
        try:
            failed = await self._failed(lease, error)
        finally:
            self._leave()
        if failed is None:
            raise error
        return failed

    def release(self) -> None:
        """Release the key in the background, without an outcome."""
        lease = self.lease
        if lease is None:
            self.end()
        if lease is None or self.is_over:
            return
        if lease.entered:
            lease.leave()
            self._end_phase()
            self._leave()
        else:
            if not self.has_started:
                self.work.uncounted_attempts += 1
            lease.drop()
            self.end()
        self.services.client.release_later(self.work, lease.reservation)

    def not_started(self) -> NotStarted:
        """Abandon the start because the lease is late, and prepare another reservation."""
        self.services.observer.count(Signal.STALE_START_PREVENTED, self.work.event_type)
        self.reserve_again()
        return NotStarted()

    def reserve_again(self) -> None:
        """Make the next reservation of the work, which has not started, use the same token.

        It finds this reservation, which counts as the same attempt, or gets the current state of the work.  If it is
        not made after all, call `Executor.release_unstarted`: otherwise the reservation would lapse, and count as a
        crash.
        """
        lease = self.lease
        if lease is not None:
            lease.drop()
            self.end()
            self.work.keep(lease.reservation)

    # Internals.

    def _end_phase(self, error: BaseException | None = None) -> None:
        assert self._phase is not None, "it was started"
        self._phase.end(error)

    def _begin_attempt(self, lease: HeldLease) -> Attempt:
        reserved, key = lease.reservation, self.work.key
        label = key.label if key.generation else key.name
        number = reserved.attempt
        if self.work.copied_attempt >= number:
            self.work.count_copied_attempts()
        if self.work.failed_runs >= number:
            number = self.work.failed_runs + 1  # its record has expired in the meantime
        attempt = Attempt(reserved.key, number, reserved.fence, lease.deadline, label, key.generation)
        self.attempt = attempt
        return attempt

    def _returned(self, lease: HeldLease, value: T) -> Returned[T]:
        home = self.services.client.home
        if home.forks != home.forks_now:
            home.check()  # the function has forked and returned in the child; called only then, since it is slower
        if self.steps is not None:
            self.steps.report_orphans()
        if self.writer is not None:
            return Returned(self, value, None)
        return Returned(self, value, self.services.client.outcome_of(self.work, lease.reservation, value))

    def _leave(self) -> None:
        """End the run, and remove it from those in progress."""
        self.among.remove(self)

    async def _call_unguarded(
        self, function: Callable[[Attempt], Awaitable[T]]
    ) -> Returned[T] | HandlerFailed | Discarded:
        work, observer = self.work, self.services.observer
        try:
            with (
                self.within(),
                observer.phase(_HANDLE, work.event_type, attempt=self.attempt.number, handler=work.handler),
            ):
                value: T = repeatable(await function(self.attempt), work.key.label, work.returns)
        except Exception as error:  # noqa: BLE001  # returned as the outcome
            return self._unguarded_failure(error)
        except BaseException:
            self.end()
            raise
        return Returned(self, value, None)

    def _unguarded_failure(self, error: Exception) -> HandlerFailed | Discarded:
        self.end()  # without `_leave`: the work keeps the token of an unanswered request
        self.services.observer.count(Signal.HANDLER_FAILED, self.work.event_type)
        number, rule = self.attempt.number, self.work.rule_for(error, self.services.config)
        if rule is not None and rule.action is FailureAction.DISCARD:
            return Discarded(error, number)
        return HandlerFailed(error, number, self._count_failure(error, rule, number), rule)

    async def _failed(self, lease: HeldLease, error: Exception) -> HandlerFailed | Discarded | None:
        """Handle an error of the work and return its outcome; `None` if the work has not failed: re-raise the error."""
        services, work, writer = self.services, self.work, self.writer
        refused = writer is not None and writer.refused
        if lease.lost and writer is not None and not refused:
            # The work took longer than its only lease: count it as a failure, or it would be retried forever.
            slow = services.client.lost(work, lease.reservation)
            slow.__cause__ = error
            return await self._handler_failed(lease, slow)
        if lease.lost or refused:
            services.observer.count(Signal.RESERVATION_LOST, work.event_type)
            owner = "another worker" if refused else ""
            raise services.client.lost(work, lease.reservation, owner, withdrawn=lease.withdrawn) from error
        if isinstance(error, LeaseLostError) and error.late:
            services.observer.count(Signal.STALE_START_PREVENTED, work.event_type)
            await services.client.try_to_release(work, lease.reservation)
            return None
        if writer is not None and (error is writer.store_error or isinstance(error, UnknownCommitError)):
            work.uncounted_attempts += 1
            wait = self.options.wait_for_store
            await services.client.try_to_release(work, lease.reservation, wait, lease.deadline)
            return None
        return await self._handler_failed(lease, error)

    async def _handler_failed(self, lease: HeldLease, error: Exception) -> HandlerFailed | Discarded:
        services, reserved = self.services, lease.reservation
        services.observer.count(Signal.HANDLER_FAILED, self.work.event_type)
        rule = self.work.rule_for(error, services.config)
        if rule is not None and rule.action is FailureAction.DISCARD:
            return await self._discard(lease, error)
        if self._count_failure(error, rule, reserved.attempt, reserved):
            return await self._record_failure(lease, error, self.attempt.number)
        delay = self.work.delay_of(rule)
        is_released = await services.client.try_to_release(
            self.work, reserved, self.options.wait_for_store, lease.deadline, delay=delay
        )
        due_in = delay if is_released and delay else None
        return HandlerFailed(error, self.attempt.number, given_up=False, rule=rule, due_in=due_in)

    async def _discard(self, lease: HeldLease, error: Exception) -> HandlerFailed | Discarded:
        client, work, reserved = self.services.client, self.work, lease.reservation
        completion, began_at = client.discarded(reserved, describe_error(error), work.ttl), monotonic()
        with self.services.observer.phase(_COMPLETE, work.event_type, handler=work.handler):
            try:
                await client.write_outcome(work, completion, lease.deadline, self.options.wait_for_store)
            except ResultNotStoredError:
                # Nothing is recorded, so it must not be settled: the handler runs again.
                return HandlerFailed(error, self.attempt.number, given_up=False)
        self.keep(completion, began_at)
        return Discarded(error, self.attempt.number)

    async def _record_failure(self, lease: HeldLease, error: Exception, attempt: int) -> HandlerFailed:
        client, work, reserved = self.services.client, self.work, lease.reservation
        failure = client.failure(reserved, describe_error(error), work.ttl)
        with self.services.observer.phase(Phase.FAIL, work.event_type, handler=work.handler):
            try:
                await client.write_outcome(work, failure, lease.deadline, self.options.wait_for_store)
            except ResultNotStoredError:
                # The failure is not recorded: return the handler's error, and let the lease expire.
                return HandlerFailed(error, attempt, given_up=False)
        return HandlerFailed(error, attempt, given_up=True)

    def _count_failure(
        self, error: Exception, rule: FailureRule | None, attempt: int, reserved: Reserved | None = None
    ) -> bool:
        """Count a failed run, and return whether it is the last one.  `rule`: the one for the error."""
        config, work = self.services.config, self.work
        if reserved is not None and work.isolation is not Isolation.NONE:
            # Do not count crashes of attempts that ran beside others.
            attempt -= reserved.lapsed - reserved.lapsed_alone
        if work.forgotten:
            return False  # outcomes of this work are not recorded, including failures
        if isinstance(error, TransactionAbortedError):
            work.uncounted_attempts += 1
            return False  # the database rolled the run back; it did not fail
        attempt = work.failed_runs = max(attempt - work.uncounted_attempts, work.failed_runs + 1)
        if rule is not None:
            return rule.is_last(attempt, config.max_attempts)
        return (
            isinstance(error, PermanentError)
            or (
                (work.on_failure or config.on_failure) is OnFailure.BLOCK and not isinstance(error, OutcomeUnknownError)
            )
            or (work.gives_up and attempt >= config.max_attempts)
        )

    def _crashed_too_often(self, reserved: Reserved) -> bool:
        """Whether the work is given up, because too many runs have crashed."""
        work = self.work
        if work.forgotten or reserved.previous is not Previous.LAPSED:
            return False
        return is_crash_limit_reached(
            reserved.attempt,
            reserved.lapsed,
            reserved.lapsed_alone,
            self.services.config.max_attempts,
            isolates=work.isolation is not Isolation.NONE,
            most_attempts=0 if work.failures is None else work.failures.most_attempts,
        )

    def _crashes(self, reserved: Reserved) -> int:
        """Return how many attempts count as crashed."""
        limit = self.services.config.max_attempts
        if not reserved.lapsed or (self.work.isolation is Isolation.NONE and reserved.lapsed < limit):
            return reserved.attempt - 1
        alone = reserved.lapsed_alone
        return alone if alone >= limit else reserved.lapsed
