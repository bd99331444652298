"""One pass over some work: reserve, run, settle, or the reason why not.  Never waits for another run."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from integr8s_idem.config import IdempotencyConfig, OnFailure, OnKeyReused, OnStoreError
from integr8s_idem.errors import (
    ApplicationError,
    CrashedTooOftenError,
    PermanentError,
    ResultNotStoredError,
    StoreUnavailableError,
    TransactionAbortedError,
)
from integr8s_idem.joining import Seal, run_joined
from integr8s_idem.keys import downstream_key
from integr8s_idem.leases import HeldLease, LeaseKeeper
from integr8s_idem.ledger import Ledger, describe_error
from integr8s_idem.records import Completed, Corrupt, Failed, InProgress, KeyReused, Previous, Reserved, Verdict
from integr8s_idem.stores import JoinedRepository
from integr8s_idem.telemetry import Observer, Phase, Signal
from integr8s_idem.work import Attempt, Executed, HandlerFailed, Outcome, WaitForStore, Work

T = TypeVar("T")

FIRST_LOOK: Final = 0.05
LONGEST_LOOK: Final = 1.0
"""Seconds between two looks at a key that another process works on, growing from the first to the longest."""

_AROUND: ContextVar[frozenset[asyncio.Future[None]]] = ContextVar(
    "runs that the current code is part of", default=frozenset()
)
"""Each by the future that is done when it ends.  Tasks inherit it from the code that begins them."""


@dataclass(slots=True, eq=False)
class Run:
    """One run of some work that is under way."""

    work: Work
    attempt: Attempt
    commits_itself: bool
    """Its outcome commits with a transaction of the application's."""
    lease: HeldLease | None = None
    """`None` in a transaction of the caller's, which holds the record itself."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called when the work has returned."""
    steps: object = None
    """Its steps, once it has asked for them."""
    over: bool = False
    """The work has returned or raised; what it began beside itself may go on still."""


_RUN: ContextVar[tuple[Passes, Run] | None] = ContextVar(
    "the innermost run that the current code is part of", default=None
)


class Passes:
    """Makes passes on behalf of one manager, and knows which of them are under way in this process."""

    def __init__(self, config: IdempotencyConfig, ledger: Ledger, leases: LeaseKeeper, observer: Observer) -> None:
        self.config = config
        self.observer = observer
        self._ledger = ledger
        self._leases = leases
        self._running: dict[str, asyncio.Future[None]] = {}

    def current_run(self) -> Run | None:
        """The innermost run that the current code is part of, if it is one of this manager's."""
        found = _RUN.get()
        return found[1] if found is not None and found[0] is self else None

    async def execute(
        self,
        work: Work,
        function: Callable[[Attempt], Awaitable[T]],
        *,
        wait_for_store: WaitForStore | None = None,
    ) -> Outcome[T]:
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

        async def sealed_by_us(attempt: Attempt, _: Seal) -> T:
            return await function(attempt)

        return await self._pass(work, sealed_by_us, wait_for_store, seals_itself=False)

    async def execute_sealed(
        self,
        work: Work,
        function: Callable[[Attempt, Seal], Awaitable[T]],
        *,
        wait_for_store: WaitForStore | None = None,
    ) -> Outcome[T]:
        """As `execute`, for a function that writes its outcome itself, by the seal, in a transaction of its own.

        What it wrote and its outcome commit together, or neither does.  The lease is not renewed: the record is
        written by that transaction alone, at any isolation level, and the function has one lease's time.
        """

        async def sealed(attempt: Attempt, seal: Seal) -> T:
            value = await function(attempt, seal)
            if not seal.written:
                raise ApplicationError(f"{work.key.label} has returned without writing its outcome by its seal")
            return value

        return await self._pass(work, sealed, wait_for_store, seals_itself=True)

    async def execute_joined(
        self, records: JoinedRepository, work: Work, function: Callable[[Attempt], Awaitable[T]]
    ) -> Outcome[T]:
        """As `execute`, in a transaction of the caller's; what `function` raises is raised."""

        async def under_way(attempt: Attempt) -> T:
            run = Run(work, attempt, True)
            with self._under_way(run), self.observer.phase(Phase.HANDLE, work.event_type):
                return await function(attempt)

        outcome = await run_joined(self._ledger, records, work, under_way)
        if isinstance(outcome, Executed):
            return outcome
        assert not isinstance(outcome, Reserved)
        return await self._blocked(work, lambda attempt, _: function(attempt), outcome)

    async def _pass(
        self,
        work: Work,
        function: Callable[[Attempt, Seal], Awaitable[T]],
        wait_for_store: WaitForStore | None,
        *,
        seals_itself: bool,
    ) -> Outcome[T]:
        asked_at = asyncio.get_running_loop().time()
        try:
            verdict = await self._reserve(work)
        except StoreUnavailableError:
            self.observer.count(Signal.STORE_ERROR, work.event_type)
            if self.config.on_store_error is OnStoreError.CLOSED:
                raise
            return await self._unguarded(work, function, self._ledger.space.full(work.key))
        if not isinstance(verdict, Reserved):
            return await self._blocked(work, function, verdict)
        too_often = verdict.attempt > self.config.max_attempts and not work.forgotten
        if too_often and verdict.previous is Previous.LAPSED:
            crashed = CrashedTooOftenError(verdict.attempt - 1)
            deadline = asked_at + verdict.lease.total_seconds()
            return await self._fail(work, verdict, crashed, deadline, wait_for_store)
        return await self._perform(work, function, verdict, asked_at, wait_for_store, seals_itself=seals_itself)

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
            if (running := self._running.get(found.key)) is not None:
                # Our own process tells us; the lease is the limit in case it goes on and on.
                await asyncio.wait({running}, timeout=min(max(pause, LONGEST_LOOK), at_most))
            else:
                await asyncio.sleep(pause)

    def refuse_to_wait_for_itself(self, found: InProgress, work: Work) -> None:
        """A run that waits for its own key, by itself or by a task it began, has a mistake that no wait mends.

        Raises:
            ApplicationError: It would wait for itself.
        """
        if self._running.get(found.key) in _AROUND.get():
            raise ApplicationError(
                f"{work.key.label} was asked for within its own run (attempt {found.attempt}), which would wait for "
                "itself: give the inner work a key of its own"
            )

    async def _reserve(self, work: Work) -> Verdict:
        with self.observer.phase(Phase.RESERVE, work.event_type) as span:
            span.annotate("idempotency.key", work.key.label)
            request = self._ledger.request(work, span.trace())
            try:
                verdict = await self._ledger.reserve(request)
            except asyncio.CancelledError:
                # It is given back under this token: the next try must not find it and run into that.
                work.token = secrets.token_bytes(16)
                raise
            if isinstance(verdict, Reserved):
                work.token = secrets.token_bytes(16)
                span.annotate("idempotency.attempt", verdict.attempt)
            span.annotate("idempotency.verdict", type(verdict).__name__)
        if not work.known:
            work.known = True
            fresh = isinstance(verdict, Reserved) and verdict.previous is Previous.NONE
            self.observer.count(Signal.CACHE_MISS if fresh else Signal.CACHE_HIT, work.event_type)
        if isinstance(verdict, Reserved) and verdict.previous is Previous.LAPSED:
            self.observer.count(Signal.TAKEOVER, work.event_type)
        return verdict

    async def _blocked(
        self,
        work: Work,
        function: Callable[[Attempt, Seal], Awaitable[T]],
        verdict: InProgress | Completed | Failed | KeyReused | Corrupt,
    ) -> Outcome[T]:
        match verdict:
            case Completed() | Failed():
                self.observer.count(Signal.DUPLICATE_BLOCKED, work.event_type)
                with self.observer.phase(Phase.REPLAY, work.event_type) as span:
                    if verdict.trace is not None:
                        span.link(verdict.trace)
            case KeyReused():
                self.observer.count(Signal.KEY_REUSED, work.event_type)
                if (work.on_key_reused or self.config.on_key_reused) is OnKeyReused.RUN:
                    # Downstream it is other work: with the same key, what it publishes would be dropped there.
                    return await self._unguarded(work, function, downstream_key(verdict.key, verdict.offered.hex()))
            case Corrupt():
                self.observer.count(Signal.CORRUPT_RECORD, work.event_type)
            case InProgress():
                pass
        return verdict

    async def _unguarded(self, work: Work, function: Callable[[Attempt, Seal], Awaitable[T]], key: str) -> Outcome[T]:
        """Run without a reservation, because a policy says so."""
        self.observer.count(Signal.UNGUARDED, work.event_type)
        work.unguarded_runs += 1
        attempt = _attempt(work, key, work.unguarded_runs, 0, float("inf"))
        try:
            with self.observer.phase(Phase.HANDLE, work.event_type):
                return Executed(await function(attempt, Seal(self._ledger, work, None)), attempt.number)
        except Exception as error:  # noqa: BLE001  # handed on as the outcome
            self.observer.count(Signal.HANDLER_FAILED, work.event_type)
            return HandlerFailed(error, attempt.number, self._hopeless(work, error, attempt.number))

    def _hopeless(self, work: Work, error: Exception, attempt: int) -> bool:
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
        function: Callable[[Attempt, Seal], Awaitable[T]],
        reserved: Reserved,
        asked_at: float,
        wait_for_store: WaitForStore | None,
        *,
        seals_itself: bool,
    ) -> Outcome[T]:
        lease = self._leases.hold(
            reserved, asked_at, reserve_anew=lambda: self._ledger.reserved_anew(work), renewed=not seals_itself
        )
        seal = Seal(self._ledger, work, reserved)
        attempt = Attempt(
            reserved.key, reserved.attempt, reserved.fence, lease.deadline, work.key.label, work.key.generation
        )
        try:
            run = Run(work, attempt, seals_itself, lease)
            with self._under_way(run):
                return await self._run(run, function, lease, seal, wait_for_store)
        finally:
            # The key may have been reserved anew under it: the next run needs a reservation of its own.
            work.token = secrets.token_bytes(16)

    @contextmanager
    def _under_way(self, run: Run) -> Iterator[None]:
        """Others of this process who ask for its key are told when the run is over; itself it must not wait for."""
        key = run.attempt.key
        ended = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            with self.within(run):
                yield
        finally:
            run.over = True
            if self._running.get(key) is ended:
                del self._running[key]
            ended.set_result(None)

    @contextmanager
    def within(self, run: Run) -> Iterator[None]:
        """The code in the block is part of `run`, which is under way."""
        around, outer = _AROUND.get(), _RUN.get()
        _AROUND.set(around | {self._running[run.attempt.key]})
        _RUN.set((self, run))
        try:
            yield
        finally:
            _RUN.set(outer)
            _AROUND.set(around)

    async def _run(
        self,
        run: Run,
        function: Callable[[Attempt, Seal], Awaitable[T]],
        lease: HeldLease,
        seal: Seal,
        wait_for_store: WaitForStore | None,
    ) -> Outcome[T]:
        work, attempt = run.work, run.attempt
        try:
            async with lease:
                with self.observer.phase(Phase.HANDLE, work.event_type):
                    value = await function(attempt, seal)
        except asyncio.CancelledError:
            self._ledger.release_later(work, lease.reservation)
            raise
        except Exception as error:
            if lease.lost and run.commits_itself and not seal.refused:
                # It had one lease's time, and was too slow: like any failure, or it would run for ever.
                slow = self._ledger.lost(work, lease.reservation)
                slow.__cause__ = error
                return await self._handler_failed(work, lease, slow, wait_for_store)
            if lease.lost or seal.refused:
                self.observer.count(Signal.RESERVATION_LOST, work.event_type)
                raise self._ledger.lost(work, lease.reservation, "another worker" if seal.refused else "") from error
            if error is seal.store_error:
                await self._ledger.try_to_release(work, lease.reservation)
                raise
            return await self._handler_failed(work, lease, error, wait_for_store)
        for tell in run.at_end:
            tell()
        if not seal.written:
            await self._complete(work, lease, value, wait_for_store)
        return Executed(value, attempt.number)

    async def _handler_failed(
        self, work: Work, lease: HeldLease, error: Exception, wait_for_store: WaitForStore | None
    ) -> HandlerFailed:
        self.observer.count(Signal.HANDLER_FAILED, work.event_type)
        reserved = lease.reservation
        if self._hopeless(work, error, reserved.attempt):
            return await self._fail(work, reserved, error, lease.deadline, wait_for_store)
        await self._ledger.try_to_release(work, reserved, wait_for_store, lease.deadline)
        return HandlerFailed(error, reserved.attempt, given_up=False)

    async def _complete(self, work: Work, lease: HeldLease, value: object, wait_for_store: WaitForStore | None) -> None:
        completion = self._ledger.outcome_of(work, lease.reservation, value)

        async def write(ours: Reserved) -> bool:
            return await self._ledger.complete(replace(completion, reservation=ours))

        with self.observer.phase(Phase.COMPLETE, work.event_type):
            await self._ledger.settle(work, lease.reservation, write, lease.deadline, wait_for_store)

    async def _fail(
        self, work: Work, reserved: Reserved, error: Exception, deadline: float, wait_for_store: WaitForStore | None
    ) -> HandlerFailed:
        text = describe_error(error)

        async def write(ours: Reserved) -> bool:
            return await self._ledger.fail(self._ledger.failure(ours, text, work.ttl))

        with self.observer.phase(Phase.FAIL, work.event_type):
            try:
                await self._ledger.settle(work, reserved, write, deadline, wait_for_store)
            except ResultNotStoredError:
                # Nothing was done: the caller's answer is the handler's error, and the lease ends by itself.
                return HandlerFailed(error, reserved.attempt, given_up=False)
        return HandlerFailed(error, reserved.attempt, given_up=True)


def _attempt(work: Work, key: str, number: int, fence: int, deadline: float) -> Attempt:
    return Attempt(key, number, fence, deadline, work.key.label, work.key.generation)
