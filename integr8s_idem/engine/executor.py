"""One pass over some work: reserve, run, settle, or the reason why not.  Never waits for another run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final, TypeVar, cast

from integr8s_idem._util.loop_fairness import turn_of_the_loop
from integr8s_idem.config import IdempotencyConfig, OnFailure, OnKeyReused, OnStoreError
from integr8s_idem.engine.active_runs import ActiveRuns, Returned, Run, Suspected
from integr8s_idem.engine.leases import HeldLease, LateStartError, LeaseKeeper
from integr8s_idem.engine.local_cache import LocalCache
from integr8s_idem.engine.results import repeatable
from integr8s_idem.engine.store_client import StoreClient, describe_error
from integr8s_idem.engine.transactions import OutcomeWriter, run_joined
from integr8s_idem.engine.work import (
    SUSPECT_AFTER,
    Attempt,
    Executed,
    HandlerFailed,
    Isolation,
    NotStarted,
    Outcome,
    WaitForStore,
    Work,
    is_crash_limit_reached,
)
from integr8s_idem.errors import (
    ApplicationError,
    CrashedTooOftenError,
    LeaseLostError,
    PermanentError,
    ResultNotStoredError,
    StoreError,
    StoreUnavailableError,
    TransactionAbortedError,
)
from integr8s_idem.keys import Key, downstream_key
from integr8s_idem.records import (
    Completed,
    Corrupt,
    Failed,
    InProgress,
    KeyReused,
    Previous,
    Reserved,
    Verdict,
)
from integr8s_idem.stores import JoinedRepository
from integr8s_idem.telemetry import Observer, Phase, Signal

T = TypeVar("T")

FIRST_LOOK: Final = 0.05
LONGEST_LOOK: Final = 1.0
"""Seconds between two looks at a key that another process works on, growing from the first to the longest."""


class Executor:
    """Makes passes on behalf of one manager, and knows which of them are under way in this process."""

    def __init__(self, config: IdempotencyConfig, client: StoreClient, leases: LeaseKeeper, observer: Observer) -> None:
        self.config = config
        self.observer = observer
        self._client = client
        self._leases = leases
        self.runs = ActiveRuns()
        self.memory = LocalCache(config.local_memory_keys) if config.local_memory_keys else None
        """What this process has completed itself, if a setting says so."""

    def known_here(
        self, key: Key, fingerprint: bytes | None, event_type: str = "", *, looked: bool = False
    ) -> Completed | None:
        """The outcome of `key`, if this process has completed it and knows that still; counted as a duplicate.

        `looked`: whether the store was asked for it before, and so it is counted as a hit already.
        """
        if self.memory is None:
            return None
        done = self.memory.look(self._client.space.full(key), fingerprint)
        if done is not None:
            if not looked:
                self.observer.count(Signal.CACHE_HIT, event_type)
            self.observer.count(Signal.DUPLICATE_BLOCKED, event_type)
        return done

    def execute(
        self,
        work: Work,
        function: Callable[[Attempt], Awaitable[T]],
        *,
        wait_for_store: WaitForStore | None = None,
    ) -> Coroutine[Any, Any, Outcome[T]]:
        """One pass: reserve, run, settle.  Never waits for another run.

        Args:
            function: Does the work; its ordinary exceptions become `HandlerFailed`.
            wait_for_store: Awaited whenever the store gives no answer once the function has run; then the
                outcome is written again, as often as it takes.  Without it patience ends with the lease.

        Raises:
            StoreError: The store gave no verdict; nothing was done.
            ResultNotStoredError: Only without `wait_for_store`: it was done, and the store does not know.
            LeaseLostError: The reservation was lost on the way.
            CancelledError: We were cancelled; the key has been given back.
        """
        return cast("Coroutine[Any, Any, Outcome[T]]", self.execute_or_suspect(work, function, wait_for_store))

    def execute_or_suspect(
        self, work: Work, function: Callable[[Attempt], Awaitable[T]], wait_for_store: WaitForStore | None
    ) -> Coroutine[Any, Any, Outcome[T] | Suspected]:
        """As `execute`, for work whose isolation may be pending: then it may come back reserved and not run."""
        return self._pass(work, function, wait_for_store, None)

    def execute_writing(
        self,
        work: Work,
        function: Callable[[Attempt, OutcomeWriter], Awaitable[T]],
        *,
        wait_for_store: WaitForStore | None = None,
    ) -> Coroutine[Any, Any, Outcome[T] | Suspected]:
        """As `execute_or_suspect`, for a function that writes its outcome itself, in a transaction of its own.

        What it wrote and its outcome commit together, or neither does.  The lease is not renewed: the record is
        written by that transaction alone, at any isolation level, and the function has one lease's time.
        """
        writer = OutcomeWriter(self._client, work)

        async def with_writer(attempt: Attempt) -> T:
            value = await function(attempt, writer)
            if not writer.written:
                raise ApplicationError(f"{work.key.label} has returned without writing its outcome")
            return value

        return self._pass(work, with_writer, wait_for_store, writer)

    async def execute_joined(
        self, records: JoinedRepository, work: Work, function: Callable[[Attempt], Awaitable[T]]
    ) -> Outcome[T]:
        """As `execute`, in a transaction of the caller's; what `function` raises is raised."""

        async def under_way(attempt: Attempt) -> T:
            run = self.runs.begin(Run(self.runs, work, attempt, True))
            try:
                with self.observer.phase(Phase.HANDLE, work.event_type):
                    value: T = repeatable(await function(attempt), work.key.label, work.returns)
                    return value
            finally:
                self.runs.leave(run)
                self.runs.over(run)

        outcome = await run_joined(self._client, records, work, under_way)
        if isinstance(outcome, Executed):
            return outcome
        assert not isinstance(outcome, Reserved)
        return await self.decline(work, function, outcome)

    async def _pass(
        self,
        work: Work,
        function: Callable[[Attempt], Awaitable[T]],
        wait_for_store: WaitForStore | None,
        writer: OutcomeWriter | None,
    ) -> Outcome[T] | Suspected:
        known = self.known_here(work.key, work.fingerprint, work.event_type, looked=work.known)
        if known is not None:
            return known
        late_starts = 0
        while True:
            asked_at = self._leases.now()
            try:
                verdict = await self._reserve(work)
            except StoreUnavailableError:
                self.observer.count(Signal.STORE_ERROR, work.event_type)
                if self.config.on_store_error is OnStoreError.CLOSED:
                    raise
                return await self._unguarded(work, function, self._client.space.full(work.key))
            if not isinstance(verdict, Reserved):
                return await self.decline(work, function, verdict)
            lease = self.hold(work, verdict, asked_at, renewed=writer is None)
            if self.is_suspect(work, verdict):
                return Suspected(lease)
            outcome = await self._perform(work, function, lease, wait_for_store, writer)
            if not isinstance(outcome, NotStarted):
                return outcome
            # What lies between the reservation and the start may take longer than the lease each time.
            await asyncio.sleep(min(FIRST_LOOK * 2**late_starts, LONGEST_LOOK) if late_starts else 0)
            late_starts += 1

    def now(self) -> float:
        """The time by the lease clock, in seconds: to be read before the store is asked for a lease."""
        return self._leases.now()

    def hold(self, work: Work, reserved: Reserved, asked_at: float, *, renewed: bool = True) -> HeldLease:
        """Hold the lease of a reservation that was asked for at `asked_at`, by the lease clock, until it is dropped."""
        return self._leases.hold(
            reserved, asked_at, reserve_anew=lambda: self._client.reserved_anew(work), renewed=renewed
        )

    def not_started(self, work: Work, lease: HeldLease) -> NotStarted:
        """Prevent a start on a lease that is late; `work` is to be reserved again."""
        self.observer.count(Signal.STALE_START_PREVENTED, work.event_type)
        self.reserve_again(work, lease)
        return NotStarted()

    def reserve_again(self, work: Work, lease: HeldLease) -> None:
        """Let the next reservation of `work`, which has not started, ask under the same token.

        It finds its own reservation, which counts as the same attempt, or learns what has become of the work meanwhile.
        """
        lease.drop()
        work.token = lease.reservation.token

    def is_suspect(self, work: Work, reserved: Reserved) -> bool:
        """Whether `work` is to run alone, since it may be what crashes its process."""
        return (
            reserved.lapsed >= SUSPECT_AFTER
            and work.isolation is Isolation.PENDING
            and not self._crashed_too_often(work, reserved)
        )

    def no_longer_alone(self, work: Work) -> None:
        """Let the record of `work`, which is under way, say that it runs alone no longer; without waiting."""
        run = self.runs.of(self._client.space.full(work.key))
        if run is None or run.work is not work or run.lease is None or run.commits_itself:
            return  # where the handler's transaction is open, its record is nobody else's to write
        work.isolation = Isolation.WAIVED
        self._client.unmark_later(work, run.lease.reservation)

    async def wait_for_change(self, found: InProgress, *, at_most: float = 3600.0, looks: int = 0) -> None:
        """Return when it is worth asking again: the run in this process ended, or a while has passed.

        `looks`: how often the caller has looked before; the pauses grow from 50 ms to a second, never
        past the end of the lease.
        """
        pause = min(FIRST_LOOK * 2 ** min(looks, 10), LONGEST_LOOK, found.retry_after.total_seconds() + 0.01)
        pause = min(pause * random.uniform(0.75, 1.25), at_most)  # noqa: S311  # jitter, no secret
        if looks == 0:
            self.observer.count(Signal.WAITED)
        with self.observer.phase(Phase.WAIT):
            if (running := self.runs.of(found.key)) is not None:
                # Our own process tells us; the lease is the limit in case it goes on and on.
                await asyncio.wait({running.ended()}, timeout=min(max(pause, LONGEST_LOOK), at_most))
            else:
                await asyncio.sleep(pause)

    async def _reserve(self, work: Work) -> Verdict:
        with self.observer.phase(Phase.RESERVE, work.event_type) as span:
            span.annotate("idempotency.key", work.key.label)
            request = self._client.request(work, span.trace())
            try:
                verdict = await self._client.reserve(request)
            except asyncio.CancelledError:
                # It is given back under this token: the next try must not find it and run into that.
                work.token = b""
                raise
            if isinstance(verdict, Reserved):
                span.annotate("idempotency.attempt", verdict.attempt)
            span.annotate("idempotency.verdict", type(verdict).__name__)
        self._told(work, verdict)
        return verdict

    async def reserve_together(self, works: Sequence[Work]) -> list[Verdict]:
        """As each of them is reserved by `execute`, in one round trip, and in no span.

        Raises:
            StoreError: As for every verb; nothing was done.
        """
        with self.observer.together(Phase.RESERVE, [work.event_type for work in works]):
            verdicts = await self._client.reserve_together(list(map(self._client.request, works)))
        for work, verdict in zip(works, verdicts, strict=True):
            self._told(work, verdict)
        return verdicts

    async def complete_together(self, done: Sequence[Returned[Any]]) -> list[bool]:
        """Write many outcomes in one round trip.  `False`: it takes `conclude` to find out what is wrong.

        Raises:
            StoreError: As for every verb; it may have been done.
        """
        begun = monotonic()
        try:
            with self.observer.together(Phase.COMPLETE, [each.run.work.event_type for each in done]):
                outcomes = [each.outcome for each in done if each.outcome is not None]
                written = await self._client.complete_together(outcomes)
        except StoreError:
            raise  # concluded one by one
        except BaseException:
            for each in done:
                self.runs.over(each.run)
            raise
        for each, stands in zip(done, written, strict=True):
            if stands:
                self._keep(each, begun)
                self.runs.over(each.run)
        return written

    def _keep(self, done: Returned[Any], begun: float) -> None:
        outcome, work = done.outcome, done.run.work
        if self.memory is None or outcome is None or work.forgotten:
            return
        self.memory.keep(
            Completed(
                key=outcome.reservation.key,
                attempt=outcome.reservation.attempt,
                completed_at=datetime.now(UTC),
                result=outcome.result,
                result_dropped=outcome.result_dropped,
            ),
            work.fingerprint,
            begun,
            outcome.ttl,
        )

    def complete_later(self, done: Returned[Any]) -> None:
        """Write an outcome without waiting: we are being cancelled."""
        assert done.outcome is not None
        self._client.complete_later(done.outcome)
        self.runs.over(done.run)

    def _told(self, work: Work, verdict: Verdict) -> None:
        """What the store has said of `work` is counted."""
        reserved = isinstance(verdict, Reserved)
        if reserved:
            work.token = b""
        if not work.known:
            work.known = True
            fresh = reserved and verdict.previous is Previous.NONE  # type: ignore[union-attr]
            self.observer.count(Signal.CACHE_MISS if fresh else Signal.CACHE_HIT, work.event_type)
        if reserved and verdict.fence != work.fence:  # type: ignore[union-attr]
            work.fence = verdict.fence  # type: ignore[union-attr]
            if verdict.previous is Previous.LAPSED:  # type: ignore[union-attr]
                self.observer.count(Signal.TAKEOVER, work.event_type)

    async def decline(
        self,
        work: Work,
        function: Callable[[Attempt], Awaitable[T]],
        verdict: InProgress | Completed | Failed | KeyReused | Corrupt,
    ) -> Outcome[T]:
        """What comes of a verdict that lets no guarded run begin."""
        self.blocked(work, verdict)
        on_key_reused = work.on_key_reused or self.config.on_key_reused
        if isinstance(verdict, KeyReused) and on_key_reused is OnKeyReused.RUN:
            # Downstream it is other work: with the same key, what it publishes would be dropped there.
            return await self._unguarded(work, function, downstream_key(verdict.key, verdict.offered.hex()))
        return verdict

    def blocked(self, work: Work, verdict: InProgress | Completed | Failed | KeyReused | Corrupt) -> None:
        """Tell that `verdict` lets no run begin."""
        match verdict:
            case Completed() | Failed():
                self.observer.count(Signal.DUPLICATE_BLOCKED, work.event_type)
                with self.observer.phase(Phase.REPLAY, work.event_type) as span:
                    if verdict.trace is not None:
                        span.link(verdict.trace)
            case KeyReused():
                self.observer.count(Signal.KEY_REUSED, work.event_type)
            case Corrupt():
                self.observer.count(Signal.CORRUPT_RECORD, work.event_type)
            case InProgress():
                pass

    def release(self, work: Work, lease: HeldLease) -> None:
        """Release a key without waiting: no run comes of its reservation."""
        lease.drop()
        self._client.release_later(work, lease.reservation)

    async def _unguarded(self, work: Work, function: Callable[[Attempt], Awaitable[T]], key: str) -> Outcome[T]:
        """Run without a reservation, because a policy says so."""
        self.observer.count(Signal.UNGUARDED, work.event_type)
        work.unguarded_runs += 1
        attempt = _attempt(work, key, work.unguarded_runs, 0, float("inf"))
        try:
            with self.observer.phase(Phase.HANDLE, work.event_type):
                return Executed(repeatable(await function(attempt), work.key.label, work.returns), attempt.number)
        except Exception as error:  # noqa: BLE001  # handed on as the outcome
            self.observer.count(Signal.HANDLER_FAILED, work.event_type)
            return HandlerFailed(error, attempt.number, self._hopeless(work, error, attempt.number))

    def _hopeless(self, work: Work, error: Exception, attempt: int, reserved: Reserved | None = None) -> bool:
        if reserved is not None and work.isolation is not Isolation.NONE:
            # What crashed beside it is not held against it.
            attempt -= reserved.lapsed - reserved.lapsed_alone
        if work.forgotten:
            return False  # nothing is remembered of it, a failure neither
        if isinstance(error, TransactionAbortedError):
            work.aborted_runs += 1
            return False  # no run has failed
        return (
            isinstance(error, PermanentError)
            or (work.on_failure or self.config.on_failure) is OnFailure.BLOCK
            or (work.gives_up and attempt - work.aborted_runs >= self.config.max_attempts)
        )

    async def _perform(
        self,
        work: Work,
        function: Callable[[Attempt], Awaitable[T]],
        lease: HeldLease,
        wait_for_store: WaitForStore | None,
        writer: OutcomeWriter | None,
    ) -> Outcome[T] | NotStarted:
        try:
            await turn_of_the_loop()
        except asyncio.CancelledError:
            self.release(work, lease)
            raise
        done = await self.perform(work, function, lease, wait_for_store, writer)
        if isinstance(done, HandlerFailed | NotStarted):
            return done
        if writer is not None:
            self.runs.over(done.run)
            return Executed(done.value, done.run.attempt.number)
        return await self.conclude(done, wait_for_store)

    async def perform(
        self,
        work: Work,
        function: Callable[[Attempt], Awaitable[T]],
        lease: HeldLease,
        wait_for_store: WaitForStore | None,
        writer: OutcomeWriter | None = None,
    ) -> Returned[T] | HandlerFailed | NotStarted:
        """Run `function` under its lease.  What it returned is to be remembered: by `conclude`, or with others.

        `NotStarted`: too little of the lease was left; `work` is to be reserved again.

        Raises: As `execute`.
        """
        reserved = lease.reservation
        if self._crashed_too_often(work, reserved):
            lease.drop()
            return await self._fail(
                work, reserved, CrashedTooOftenError(self._crashes(work, reserved)), lease.deadline, wait_for_store
            )
        if lease.is_late():
            return self.not_started(work, lease)
        if writer is not None:
            writer.reserved = reserved
        key = work.key
        attempt = Attempt(reserved.key, reserved.attempt, reserved.fence, lease.deadline, key.label, key.generation)
        run = self.runs.begin(Run(self.runs, work, attempt, writer is not None, lease))
        try:
            try:
                with lease, self.observer.phase(Phase.HANDLE, work.event_type):
                    value: T = repeatable(await function(attempt), work.key.label, work.returns)
            except asyncio.CancelledError:
                self._client.release_later(work, lease.reservation)
                raise
            except Exception as error:
                if isinstance(error, LateStartError) and error.lease is lease:
                    self.runs.over(run)
                    return self.not_started(work, lease)
                failed = await self._run_failed(work, lease, writer, error, wait_for_store)
                if failed is None:
                    raise
                self.runs.over(run)
                return failed
            for tell in run.at_end:
                tell()
            return Returned(run, value, None if writer else self._client.outcome_of(work, lease.reservation, value))
        except BaseException:
            self.runs.over(run)
            raise
        finally:
            self.runs.leave(run)

    def renew_late(self, lease: HeldLease) -> Coroutine[Any, Any, bool]:
        """Renew a lease that is late; whether it is ours still."""
        return self._leases.renew_late(lease)

    def _crashed_too_often(self, work: Work, reserved: Reserved) -> bool:
        """Whether no more runs of it are begun, since none has come to an end."""
        if work.forgotten or reserved.previous is not Previous.LAPSED:
            return False
        return is_crash_limit_reached(
            reserved.attempt,
            reserved.lapsed,
            reserved.lapsed_alone,
            self.config.max_attempts,
            isolates=work.isolation is not Isolation.NONE,
        )

    def _crashes(self, work: Work, reserved: Reserved) -> int:
        """How many attempts count as crashed."""
        if work.isolation is Isolation.NONE or not reserved.lapsed:
            return reserved.attempt - 1
        alone = reserved.lapsed_alone
        return alone if alone >= self.config.max_attempts else reserved.lapsed

    async def conclude(self, done: Returned[T], wait_for_store: WaitForStore | None) -> Executed[T]:
        """Remember what a run returned, as `execute` does."""
        run = done.run
        assert run.lease is not None
        assert done.outcome is not None
        begun = monotonic()
        try:
            with self.observer.phase(Phase.COMPLETE, run.work.event_type):
                await self._client.settle(run.work, done.outcome, run.lease.deadline, wait_for_store)
            self._keep(done, begun)
        finally:
            self.runs.over(run)
        return Executed(done.value, run.attempt.number)

    async def _run_failed(
        self,
        work: Work,
        lease: HeldLease,
        writer: OutcomeWriter | None,
        error: Exception,
        wait_for_store: WaitForStore | None,
    ) -> HandlerFailed | None:
        """What comes of a run that has raised `error`; `None` if the work has not failed: raise the error on."""
        refused = writer is not None and writer.refused
        if lease.lost and writer is not None and not refused:
            # It had one lease's time, and was too slow: like any failure, or it would run for ever.
            slow = self._client.lost(work, lease.reservation)
            slow.__cause__ = error
            return await self._handler_failed(work, lease, slow, wait_for_store)
        if lease.lost or refused:
            self.observer.count(Signal.RESERVATION_LOST, work.event_type)
            owner = "another worker" if refused else ""
            raise self._client.lost(work, lease.reservation, owner, withdrawn=lease.withdrawn) from error
        if isinstance(error, LeaseLostError) and error.late:
            self.observer.count(Signal.STALE_START_PREVENTED, work.event_type)
            await self._client.try_to_release(work, lease.reservation)
            return None
        if writer is not None and error is writer.store_error:
            await self._client.try_to_release(work, lease.reservation)
            return None
        return await self._handler_failed(work, lease, error, wait_for_store)

    async def _handler_failed(
        self, work: Work, lease: HeldLease, error: Exception, wait_for_store: WaitForStore | None
    ) -> HandlerFailed:
        self.observer.count(Signal.HANDLER_FAILED, work.event_type)
        reserved = lease.reservation
        if self._hopeless(work, error, reserved.attempt, reserved):
            return await self._fail(work, reserved, error, lease.deadline, wait_for_store)
        await self._client.try_to_release(work, reserved, wait_for_store, lease.deadline)
        return HandlerFailed(error, reserved.attempt, given_up=False)

    async def _fail(
        self, work: Work, reserved: Reserved, error: Exception, deadline: float, wait_for_store: WaitForStore | None
    ) -> HandlerFailed:
        failure = self._client.failure(reserved, describe_error(error), work.ttl)
        with self.observer.phase(Phase.FAIL, work.event_type):
            try:
                await self._client.settle(work, failure, deadline, wait_for_store)
            except ResultNotStoredError:
                # Nothing was done: the caller's answer is the handler's error, and the lease ends by itself.
                return HandlerFailed(error, reserved.attempt, given_up=False)
        return HandlerFailed(error, reserved.attempt, given_up=True)


def _attempt(work: Work, key: str, number: int, fence: int, deadline: float) -> Attempt:
    return Attempt(key, number, fence, deadline, work.key.label, work.key.generation)
