"""Executes work from reservation to outcome, individually or in batches."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from time import monotonic, perf_counter
from typing import Any, Final, TypeAlias, TypeVar

from integr8s_idem._util.loop_fairness import pace_of, turn_of_the_loop
from integr8s_idem.config import IdempotencyConfig, OnInProgress, OnKeyReused, OnStoreError
from integr8s_idem.engine.active_runs import ActiveRun
from integr8s_idem.engine.leases import HeldLease, LeaseKeeper
from integr8s_idem.engine.loop_guard import LoopGuard
from integr8s_idem.engine.outcomes import pending_error
from integr8s_idem.engine.results import repeatable
from integr8s_idem.engine.run import Returned, Run, RunOptions, RunServices
from integr8s_idem.engine.store_client import StoreClient
from integr8s_idem.engine.transactions import OutcomeWriter, run_joined
from integr8s_idem.engine.verdict_observer import VerdictObserver, describe
from integr8s_idem.engine.work import (
    Attempt,
    Executed,
    HandlerFailed,
    Isolation,
    NotStarted,
    Outcome,
    WaitForStore,
    Work,
)
from integr8s_idem.errors import (
    ApplicationError,
    IdempotencyConflictError,
    StoreError,
    StoreUnavailableError,
)
from integr8s_idem.keys import Key, downstream_key
from integr8s_idem.records import (
    Completed,
    Corrupt,
    Failed,
    InProgress,
    KeyReused,
    Pending,
    Previous,
    Reserved,
    Verdict,
)
from integr8s_idem.stores import JoinedRepository
from integr8s_idem.telemetry import Observer, Phase, Relation, Signal

T = TypeVar("T")
P = TypeVar("P")

Declined: TypeAlias = Pending | Completed | Failed | KeyReused | Corrupt
"""A verdict without a reservation."""

# Read once, because a member of an enumeration takes as long to read as two calls before Python 3.12.
_LAPSED: Final = Previous.LAPSED
_NONE: Final = Previous.NONE
_RESERVE: Final = Phase.RESERVE
_REPLAY: Final = Phase.REPLAY
_DUPLICATE_BLOCKED: Final = Signal.DUPLICATE_BLOCKED
_CACHE_HIT: Final = Signal.CACHE_HIT

ONCE: Final = RunOptions()
"""For callers that do not wait for the store."""

FIRST_LOOK: Final = 0.05
LONGEST_LOOK: Final = 1.0
"""Seconds between checks of a key that another process holds; the pause doubles up to the longest."""

SHORTEST_WAIT: Final = 1e-6
"""Seconds of a wait.  A shorter one may end at its beginning, since times are floats, and then again and again."""


class Executor(RunServices):
    """Executes work for one manager and tracks its runs in this process."""

    def __init__(self, config: IdempotencyConfig, client: StoreClient, leases: LeaseKeeper, observer: Observer) -> None:
        super().__init__(config, client, observer)
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop in which a lease was last requested."""
        self._leases = leases
        self.loop_guard = LoopGuard(client.space.scope)
        self.loop_guard.add(self.is_idle)
        self.verdicts = VerdictObserver(observer)

    def known_here(
        self, key: Key, fingerprint: bytes | None, event_type: str = "", *, looked: bool = False
    ) -> Completed | None:
        """Return the outcome of `key` from the local cache, or `None`; a hit is counted as a duplicate.

        `looked`: whether the store was asked before, so that the hit has been counted already.

        Raises:
            ApplicationError: The outcome is known, but the manager was used before this process was forked.
        """
        if self.cache is None:
            return None
        done = self.cache.look(self.client.space.full(key), fingerprint)
        if done is not None:
            self.client.home.check()  # after a miss, the request does
            if not looked:
                self.observer.count(_CACHE_HIT, event_type)
            self.observer.count(_DUPLICATE_BLOCKED, event_type)
        return done

    def _known(self, work: Work) -> Completed | None:
        if work.forgotten:
            return None  # the outcome of other work with this key may be there
        return self.known_here(work.key, work.fingerprint, work.event_type, looked=work.known)

    # Single units of work.

    async def open(self, work: Work, options: RunOptions = ONCE) -> Run | Outcome[Any]:
        """Reserve `work` and return its run, or the existing outcome.

        Never waits for another run.

        Raises:
            StoreError: The store did not answer; nothing was done.
        """
        if self.cache is not None and (known := self._known(work)) is not None:
            return known
        asked_at = self.now()
        try:
            if work.looks or work.unanswered:
                since = perf_counter()
                verdict = await self.client.reserve(self.client.request(work))
                self.verdicts.observe(work, verdict, since)
            else:
                with self.observer.phase(_RESERVE, work.event_type, handler=work.handler) as span:
                    work.trace = work.trace or span.trace()
                    work.unanswered = True
                    verdict = await self.client.reserve(self.client.request(work))
                    work.unanswered = False
                    if work.trace is not None:
                        describe(span, work, verdict)
        except asyncio.CancelledError:
            # The reservation is released under this token, so the next attempt must use another one.  One that was
            # kept is released in any case: the request may fail.
            self.release_unstarted(work)
            work.forget_token()
            raise
        except StoreUnavailableError:
            run = self.unreserved(work, options)
            if run is None:
                raise
            return run
        for signal in _note_verdict(work, verdict):
            self.observer.count(signal, work.event_type)
        if type(verdict) is not Reserved:  # faster than isinstance, which a metaclass slows down
            return self.declined(work, verdict, options)
        run = self.reserved(work, verdict, asked_at, options)
        if verdict.previous is _LAPSED and run.has_crashed_too_often:
            return await run.give_up()
        return run

    def reserved(self, work: Work, verdict: Reserved, asked_at: float, options: RunOptions = ONCE) -> Run:
        """Return the run of a reservation requested at `asked_at`, by the lease clock.  It holds the lease."""
        lease = self._leases.hold(verdict, asked_at, work, renewed=not options.writes_outcome)
        return Run(self.runs, work, lease, options.writes_outcome, services=self, options=options)

    def unreserved(self, work: Work, options: RunOptions) -> Run | None:
        """Return a run without a reservation after the store did not answer; `None` if the policy forbids it."""
        self.observer.count(Signal.STORE_ERROR, work.event_type)
        if self.config.on_store_error is OnStoreError.CLOSED or options.needs_reservation:
            return None
        return self._unguarded(work, self.client.space.full(work.key), options)

    def declined(self, work: Work, verdict: Declined, options: RunOptions = ONCE) -> Run | Declined:
        """Report a verdict without a reservation, and return it, or an unguarded run if the policy allows one."""
        match verdict:
            case Completed() if work.forgotten:
                return _about_to_expire(verdict)
            case Completed() | Failed():
                self.observer.count(_DUPLICATE_BLOCKED, work.event_type)
                with self.observer.phase(_REPLAY, work.event_type, handler=work.handler) as span:
                    if verdict.trace is not None:
                        span.link(verdict.trace, Relation.RUN)
            case KeyReused():
                self.observer.count(Signal.KEY_REUSED, work.event_type)
                if (work.on_key_reused or self.config.on_key_reused) is OnKeyReused.RUN:
                    # Downstream services must treat it as other work: with the same key they would drop its messages.
                    return self._unguarded(work, downstream_key(verdict.key, verdict.offered.hex()), options)
            case Corrupt():
                self.observer.count(Signal.CORRUPT_RECORD, work.event_type)
        return verdict

    async def execute(
        self, work: Work, function: Callable[..., Awaitable[T]], options: RunOptions = ONCE
    ) -> Outcome[T]:
        """Reserve, run and record `work` once.  Never waits for another run.

        `function` does the work; its ordinary exceptions become `HandlerFailed`.

        Raises:
            StoreError: The store did not answer; nothing was done.
            ResultNotStoredError: Only without `wait_for_store`: the work is done, but the outcome is not recorded.
            LeaseLostError: The reservation was lost during the run.
            CancelledError: The caller was cancelled.  In the background, the key is released; or if the work has ended,
                its outcome is recorded.
        """
        run = await self.open(work, options)
        late_starts = 0
        while True:
            if type(run) is not Run or run.is_suspect:
                return run  # type: ignore[return-value]  # a suspect run, only of the two methods below
            if self.runs.pace.is_turn_over():
                await run.wait_for_turn()
            returned = await run.call(_writing(function, run) if options.writes_outcome else function)
            if isinstance(returned, Returned):
                return await run.complete(returned)
            if not isinstance(returned, NotStarted):
                return returned
            # The delay between the reservation and the start may exceed the lease every time.
            pause = min(FIRST_LOOK * 2**late_starts, LONGEST_LOOK) if late_starts else 0
            run = await self._open_again(work, options, pause)
            late_starts += 1

    async def _open_again(self, work: Work, options: RunOptions, pause: float) -> Run | Outcome[Any]:
        """Reserve work whose start was prevented after a pause in seconds, or release its key if that fails.

        A caller that waits for the store keeps the reservation: it reserves the work again, or releases it.
        """
        try:
            await asyncio.sleep(pause)
            return await self.open(work, options)
        except BaseException as error:
            if options.wait_for_store is None or not isinstance(error, StoreError):
                self.release_unstarted(work)
            raise

    def release_unstarted(self, work: Work) -> None:
        """Release, in the background, a reservation kept for the next attempt of `work`, which is not made."""
        reservation = work.unstarted
        if reservation is not None:
            work.forget_token()
            work.uncounted_attempts += 1
            self.client.release_later(work, reservation)

    def execute_or_suspect(
        self, work: Work, function: Callable[[Attempt], Awaitable[T]], options: RunOptions
    ) -> Coroutine[Any, Any, Outcome[T] | Run]:
        """Execute work whose isolation may be pending: a suspect run is returned without being started."""
        return self.execute(work, function, options)

    def execute_writing(
        self,
        work: Work,
        function: Callable[[Attempt, OutcomeWriter], Awaitable[T]],
        wait_for_store: WaitForStore | None = None,
    ) -> Coroutine[Any, Any, Outcome[T] | Run]:
        """Execute a function that records its outcome in its own transaction.  See `execute_or_suspect`.

        The writes of the function and its outcome are committed together.
        """
        return self.execute(work, function, RunOptions(wait_for_store, writes_outcome=True))

    async def execute_joined(
        self, records: JoinedRepository, work: Work, function: Callable[[Attempt], Awaitable[T]]
    ) -> Outcome[T]:
        """Execute `work` in a transaction of the caller.  Errors of `function` are raised."""
        self.now()

        async def tracked(attempt: Attempt) -> T:
            run = ActiveRun(self.runs, work, None, commits_itself=True)
            run.attempt = attempt
            self.runs.enter(run)
            try:
                with self.observer.phase(Phase.HANDLE, work.event_type, attempt=attempt.number, handler=work.handler):
                    value: T = repeatable(await function(attempt), work.key.label, work.returns)
                    return value
            finally:
                self.runs.leave(run)
                self.runs.remove(run)

        outcome = await run_joined(self.client, records, work, tracked)
        if isinstance(outcome, Executed):
            return outcome
        assert not isinstance(outcome, Reserved)
        declined = self.declined(work, outcome)
        if not isinstance(declined, Run):
            return declined
        async with records.savepoint():
            await turn_of_the_loop()
            returned = await declined.call(function)
            if isinstance(returned, HandlerFailed):
                raise returned.error
        assert isinstance(returned, Returned), "a run without a lease cannot be late, and no rule discards its errors"
        return await declined.complete(returned)

    async def settled(
        self,
        work: Work,
        found: Pending,
        one_pass: Callable[[], Awaitable[P | Pending]],
        *,
        on_in_progress: OnInProgress,
        wait_timeout: timedelta | None = None,
    ) -> P | Pending:
        """Wait until work that was `found` in progress or scheduled is settled, or may be run here.

        `InProgress` and `Scheduled` are returned only under the skip policy.

        Args:
            one_pass: Tries to reserve `work` once, and may run it.
            wait_timeout: How long to wait for another run, from now on; `None` for no limit.

        Raises:
            InProgressError: Another run is in progress, and the policy is not to wait; or the wait took too long
                (`IdempotencyConflictError`).  `ScheduledError` if nobody may run it yet.
            ApplicationError: The work was requested within its own run.
        """
        began_at = self._leases.now()
        outcome: P | Pending = found
        try:
            while isinstance(outcome, Pending):
                if on_in_progress is OnInProgress.SKIP:
                    self.observer.count(_DUPLICATE_BLOCKED, work.event_type)
                    return outcome
                self._check_wait(work, outcome, on_in_progress)
                left = float("inf")
                if wait_timeout is not None:
                    left = _time_left(work, outcome, wait_timeout, self._leases.now() - began_at)
                await self.wait_for_change(work, outcome, at_most=left)
                outcome = await one_pass()
            return outcome
        finally:
            if work.looks:
                self.verdicts.end_wait(work)

    def _check_wait(self, work: Work, found: Pending, on_in_progress: OnInProgress) -> None:
        """Raise an error if the caller may not wait for another run."""
        self.runs.refuse_to_wait_for_itself(found, work)
        if on_in_progress is OnInProgress.RAISE:
            raise pending_error(work.key.label, found)

    async def wait_for_change(self, work: Work, found: Pending, *, at_most: float = float("inf")) -> None:
        """Wait before the next check of a key: until its run in this process ends, or for a pause.

        The pauses grow from 50 ms to a second, but not past the end of the lease.
        """
        seconds, ended = self.next_look(work, found)
        if ended is not None:
            await asyncio.wait({ended}, timeout=min(seconds, at_most))
        else:
            await asyncio.sleep(min(seconds, at_most))

    def next_look(self, work: Work, found: Pending) -> tuple[float, asyncio.Future[None] | None]:
        """Return when to check again: the seconds to wait, and a future for the end of the run in this process."""
        looks = work.note_look()
        pause = min(FIRST_LOOK * 2 ** min(looks - 1, 10), LONGEST_LOOK, found.retry_after.total_seconds() + 0.01)
        pause *= random.uniform(0.75, 1.25)  # noqa: S311  # jitter
        if looks == 1:
            self.observer.count(Signal.WAITED, work.event_type)
        if (running := self.runs.of(found.key)) is not None:
            # The run in this process signals its end, so check the store less often.
            return max(pause, LONGEST_LOOK), running.ended()
        return pause, None

    # Batches.

    def now(self) -> float:
        """Return the time by the lease clock, in seconds.  Read it before requesting a lease in this event loop.

        Raises:
            ApplicationError: The manager is in use in another event loop that is still running, or was used before this
                process was forked.
        """
        loop = asyncio.get_running_loop()
        if loop is not self.loop:
            self._enter(loop)
        return self._leases.now()

    def _enter(self, loop: asyncio.AbstractEventLoop) -> None:
        self.client.home.check()  # first: in a child, the parent's loop claims to run
        self.loop_guard.enter(loop)
        if self.loop is not None:
            self.leave_loop()
        self.loop, self.runs.pace = loop, pace_of(loop)
        self._leases.enter(loop)

    def is_idle(self) -> bool:
        """Whether no run and no call to the store is pending."""
        return not (self.client.busy or self.runs.keys() or self._leases.held)

    def share_loop(self, guard: LoopGuard) -> None:
        """Use the event loop of another scope's manager."""
        self.loop_guard = guard
        guard.add(self.is_idle)

    def leave_loop(self) -> None:
        """Drop what belongs to an event loop that no longer runs, and would be waited for without end."""
        self.loop = None
        self.client.leave_loop()
        self.runs.forget_all()
        self._leases.leave_loop()

    async def reserve_together(self, works: Sequence[Work]) -> list[Verdict]:
        """Reserve works in one round trip.

        Raises:
            StoreError: The store did not answer; nothing was done.
        """
        since = perf_counter()
        try:
            verdicts = await self.client.reserve_together(self.client.requests(works))
        except BaseException as error:
            self.verdicts.observe_failure(works, error, since)
            raise
        self.verdicts.observe_all(works, verdicts, since)
        self._count_verdicts(works, verdicts)
        return verdicts

    async def complete_together(self, returned: Sequence[Returned[Any]], *, shielded: bool = True) -> list[bool]:
        """Record outcomes in one round trip.  `False`: not recorded; call `Run.complete` to handle the cause.

        If the caller is cancelled, they are recorded in the background.

        `shielded`: see `StoreClient.complete_together`.

        Raises:
            StoreError: The store did not answer; the outcomes may have been recorded.
        """
        began_at, since = monotonic(), perf_counter()
        completions = [each.completion for each in returned if each.completion is not None]
        assert len(completions) == len(returned), "an outcome that is not to be recorded has no place in a batch"
        try:
            written = await self.client.complete_together(completions, shielded=shielded)
            done = [each for each, is_written in zip(returned, written, strict=True) if is_written]
        except StoreError:
            raise  # the caller completes them individually
        except asyncio.CancelledError:
            for each in returned:
                each.run.complete_later(each)
            raise
        except BaseException:
            self.runs.remove(*[each.run for each in returned])
            raise
        if self.cache is not None:
            for each in done:
                if each.completion is not None:
                    each.run.keep(each.completion, began_at)
        self.runs.remove(*[each.run for each in done])
        self.verdicts.observe_completions([each.run.work for each in returned], written, since)
        return written

    # Runs in progress.

    def no_longer_alone(self, work: Work) -> None:
        """Clear the mark of isolation in the record of running work, in the background."""
        run = self.runs.of(self.client.space.full(work.key))
        if run is None or run.work is not work or run.lease is None or run.commits_itself:
            return  # only the handler's transaction may write the record
        work.isolation = Isolation.WAIVED
        self.client.unmark_later(work, run.lease.reservation)

    def renew_late(self, lease: HeldLease) -> Coroutine[Any, Any, bool]:
        """Renew a late lease; return whether it is still held."""
        return self._leases.renew_late(lease)

    def _unguarded(self, work: Work, key: str, options: RunOptions) -> Run:
        """Return a run without a reservation, as configured by a policy."""
        self.observer.count(Signal.UNGUARDED, work.event_type)
        self.release_unstarted(work)
        work.unguarded_runs += 1
        work.count_copied_attempts()
        run = Run(self.runs, work, None, options.writes_outcome, services=self, options=options)
        number = max(work.unguarded_runs, work.failed_runs + 1)
        run.attempt = Attempt(key, number, 0, float("inf"), work.key.label, work.key.generation)
        return run

    def _count_verdicts(self, works: Sequence[Work], verdicts: Sequence[Verdict]) -> None:
        """Report the verdicts of the store, by event type."""
        counts = Counter(
            [(_note_verdict(work, verdict), work.event_type) for work, verdict in zip(works, verdicts, strict=True)]
        )
        for (signals, event_type), amount in counts.items():
            for signal in signals:
                self.observer.count(signal, event_type, amount)


_HIT: Final = (_CACHE_HIT,)
_MISS: Final = (Signal.CACHE_MISS,)
_TAKEOVER: Final = (Signal.TAKEOVER,)
_HIT_AND_TAKEOVER: Final = (Signal.TAKEOVER, _CACHE_HIT)


def _note_verdict(work: Work, verdict: Verdict) -> tuple[Signal, ...]:
    """Note in `work` that the store has answered, and return what to count."""
    is_first, work.known, work.unstarted = not work.known, True, None
    if type(verdict) is not Reserved:
        return _HIT if is_first else ()
    work.token = b""  # the next `reserve` is an attempt of its own
    is_takeover = verdict.fence != work.fence and verdict.previous is _LAPSED
    work.fence = verdict.fence
    if is_takeover:
        return _HIT_AND_TAKEOVER if is_first else _TAKEOVER
    if not is_first:
        return ()
    return _MISS if verdict.previous is _NONE else _HIT


def _writing(function: Callable[[Attempt, OutcomeWriter], Awaitable[T]], run: Run) -> Callable[[Attempt], Awaitable[T]]:
    """Wrap `function` to give it a writer of its outcome, and to check that it has written one."""
    run.writer = writer = OutcomeWriter(run.services.client, run.work, run.lease)

    async def writing(attempt: Attempt) -> T:
        value = await function(attempt, writer)
        if not writer.written:
            raise ApplicationError(f"the function of {attempt.label} returned without writing its outcome")
        return value

    return writing


def _about_to_expire(done: Completed) -> InProgress:
    """Treat the record of work whose outcome is not kept as in progress; it expires within a moment."""
    return InProgress(
        key=done.key, attempt=done.attempt, retry_after=timedelta(seconds=1), owner="a run that has just ended"
    )


def _time_left(work: Work, found: Pending, longest: timedelta, waited: float) -> float:
    """Return for how many seconds the caller may still wait for another run.

    Raises:
        IdempotencyConflictError: It has waited for too long.
    """
    left = longest.total_seconds() - waited
    if left < SHORTEST_WAIT:
        raise IdempotencyConflictError(work.key.label, found.attempt, found.retry_after, found.owner, longest)
    return left
