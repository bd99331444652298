"""`IdempotencyManager`: the decision whether work is done, waited for, answered or refused.

No driver, no Kafka, no Dishka.  `run` is for callers who want a value; `execute` makes one pass and
says what came of it, for those who settle deliveries.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, TypeVar

from integr8s_idem.config import IdempotencyConfig, OnFailure, OnInProgress, OnKeyReused, OnStoreError
from integr8s_idem.errors import (
    ApplicationError,
    CorruptRecordError,
    CrashedTooOftenError,
    InProgressError,
    KeyReusedError,
    PermanentError,
    PreviouslyFailedError,
    ResultDroppedError,
    ResultNotStoredError,
    StoreUnavailableError,
    TransactionAbortedError,
)
from integr8s_idem.joining import Seal, run_joined
from integr8s_idem.keys import LAST_GENERATION, Key, KeySpace, downstream_key, generation_key
from integr8s_idem.leases import HeldLease, LeaseKeeper
from integr8s_idem.ledger import Ledger, describe_error
from integr8s_idem.records import (
    Completed,
    Completion,
    Corrupt,
    Failed,
    IdempotencyRecord,
    InProgress,
    KeyReused,
    Previous,
    Reserved,
    Verdict,
)
from integr8s_idem.results import decode_result, return_type_of
from integr8s_idem.stores import IdempotencyRepository, JoinedRepository, JoiningRepository
from integr8s_idem.telemetry import SILENT, Observer, Phase, Signal
from integr8s_idem.work import Attempt, Executed, HandlerFailed, Outcome, WaitForStore, Work

T = TypeVar("T")

FIRST_LOOK: Final = 0.05
LONGEST_LOOK: Final = 1.0
"""Seconds between two looks at a key that another process works on, growing from the first to the longest."""

_AROUND: ContextVar[frozenset[asyncio.Future[None]]] = ContextVar(
    "runs that the current code is part of", default=frozenset()
)
"""Each by the future that is done when it ends.  Tasks inherit it from the code that begins them."""

_JOINED: ContextVar[tuple[IdempotencyManager, JoinedRepository] | None] = ContextVar(
    "the transaction that the current code has joined", default=None
)


class IdempotencyManager:
    """Does work once per key: in this process and in all that share the store and the scope."""

    def __init__(
        self,
        config: IdempotencyConfig | None = None,
        repository: IdempotencyRepository | None = None,
        observer: Observer = SILENT,
        *,
        scope: str,
        owner: str | None = None,
    ) -> None:
        """`scope`: who does the work, usually the service; `owner`: how messages name this process."""
        if repository is None:
            raise ApplicationError(
                "a manager needs a repository: RedisIdempotencyRepository, or MemoryIdempotencyRepository to try it"
            )
        if not scope:
            raise ApplicationError("a manager needs a scope: who does the work, usually the service's name")
        self.config = config or IdempotencyConfig()
        self.checked_ttl(self.config.ttl)
        self.repository = repository
        self.observer = observer
        self.scope = scope
        self.owner = (owner or f"{scope}@{socket.gethostname()}:{os.getpid()}")[:128]
        self._leases = LeaseKeeper(repository, scope, observer)
        self._ledger = Ledger(self.config, repository, observer, scope, self.owner)
        self._running: dict[str, asyncio.Future[None]] = {}

    @property
    def space(self) -> KeySpace:
        """Where its keys live in the store."""
        return self._ledger.space

    def checked_ttl(self, ttl: timedelta) -> timedelta:
        """`ttl`, if outcomes kept for so long protect anything.

        Raises:
            ApplicationError: It is shorter than the lease: a duplicate of a running event would come too late.
        """
        if ttl < self.config.lease:
            raise ApplicationError(
                f"a ttl of {ttl.total_seconds():g} s is shorter than the lease of "
                f"{self.config.processing_timeout_seconds:g} s: outcomes would be forgotten before their twins come. "
                "Raise the ttl, or lower [idempotency] processing_timeout_seconds"
            )
        return ttl

    # The verbs of the store, for one key or many.

    async def reserve(self, key: str | Key, *, fingerprint: bytes | None = None) -> Verdict:
        """Ask to do the work of `key`.

        Raises:
            CorruptRecordError: Its record cannot be read.
            StoreError: As for every verb.
        """
        verdict = await self._ledger.reserve(self._ledger.request(Work(self.space.key(key), fingerprint)))
        if isinstance(verdict, Corrupt):
            raise CorruptRecordError(verdict.key, verdict.reason)
        return verdict

    async def reserve_many(self, keys: Sequence[str | Key]) -> list[Verdict]:
        """Ask for many keys in one round trip; an unreadable record is `Corrupt` in its place."""
        return await self.repository.reserve([self._ledger.request(Work(self.space.key(key))) for key in keys])

    async def renew(self, *reservations: Reserved) -> list[bool]:
        """Let their leases begin anew, with the configured length.  `False`: no longer ours."""
        return await self.repository.renew(reservations, self.config.lease)

    async def complete(self, reserved: Reserved, result: object = None, *, ttl: timedelta | None = None) -> bool:
        """Remember that the work is done.  `False`: the reservation is no longer ours."""
        return await self._ledger.complete(self.completion(reserved, result, ttl))

    async def complete_many(self, completions: Sequence[Completion]) -> list[bool]:
        """As `complete`, many in one round trip; `completion` makes them."""
        return await self.repository.complete(completions)

    async def fail(self, reserved: Reserved, error: str, *, ttl: timedelta | None = None) -> bool:
        """Remember that the work was given up.  `False`: the reservation is no longer ours."""
        return await self._ledger.fail(self._ledger.failure(reserved, error, ttl))

    async def release(self, *reservations: Reserved) -> list[bool]:
        """Give keys back undone; the attempts stay counted."""
        return list(await asyncio.gather(*map(self._ledger.release, reservations)))

    async def get(self, key: str | Key) -> IdempotencyRecord | None:
        """The record of `key`, if there is one."""
        return (await self.repository.get([self.space.full(self.space.key(key))]))[0]

    async def history(self, key: str | Key) -> dict[int, IdempotencyRecord]:
        """The records of `key` by generation, as far as the store still has them: what became of each replay.

        Raises:
            CorruptRecordError: One of them cannot be read.
        """
        return await self.history_of(self.space.full(self.space.key(key).in_generation(0)))

    async def history_of(self, record_key: str) -> dict[int, IdempotencyRecord]:
        """As `history`, by the full key of the first generation, as dead letters and records tell it.

        All generations there can be are asked for, since earlier ones may have expired: a thousand small
        reads, for people and tools rather than for each event.
        """
        generations = range(LAST_GENERATION + 1)
        names = [generation_key(record_key, generation) for generation in generations]
        found = zip(generations, await self.repository.get(names), strict=True)
        return {generation: record for generation, record in found if record is not None}

    async def delete(self, key: str | Key) -> bool:
        """Forget `key`, whatever its state: the next caller does the work again."""
        return await self.repository.delete([self.space.full(self.space.key(key))]) == 1

    async def count_active(self) -> int:
        """How many keys of this scope hold a lease now."""
        return await self.repository.count_active(self.space.root)

    def completion(self, reserved: Reserved, result: object = None, ttl: timedelta | None = None) -> Completion:
        """What to hand to `complete_many`.  A result that is too large or cannot be written is dropped and counted."""
        return self._ledger.completion(reserved, result, ttl)

    # Doing work once.

    @asynccontextmanager
    async def in_transaction(self, held: Any) -> AsyncIterator[None]:
        """Within the block, `run` reserves and completes in the transaction of `held`: it commits with what you write.

            async with session.begin(), manager.in_transaction(session):
                receipt = await manager.run(f"refund:{order_id}", refund)

        The transaction is yours: if it is rolled back, nothing was reserved or done.  Needs a store in the same
        SQL database.  A transaction that the database has given up (`TransactionAbortedError`) is to be begun anew.

        Args:
            held: SQLAlchemy's `AsyncSession` or `AsyncConnection`.

        Raises:
            ApplicationError: The store is not in a SQL database.
        """
        if not isinstance(self.repository, JoiningRepository):
            raise ApplicationError(f"{type(self.repository).__name__} cannot join a transaction: use a store in SQL")
        token = _JOINED.set((self, self.repository.joined(held)))
        try:
            yield
        finally:
            _JOINED.reset(token)

    async def run(
        self,
        key: str | Key,
        function: Callable[[], Awaitable[T]],
        *,
        fingerprint: bytes | None = None,
        ttl: timedelta | None = None,
        on_in_progress: OnInProgress | None = None,
        wait_timeout: timedelta | None = None,
    ) -> T:
        """Do the work of `key` once; every other caller gets the first one's result.

        Args:
            key: Names the work within the scope; compared byte for byte.
            function: Does it.  Its return annotation gives a replayed result its type.
            fingerprint: 16 bytes that name the payload; a second use of the key must bring the same.
            ttl: How long the outcome is remembered, by the store's clock.
            on_in_progress: What to do while somebody else does it; as configured if `None`.
                `skip` returns `None`: the outcome is unknown.
            wait_timeout: Longest wait for a running twin; as configured if `None`.

        Raises:
            InProgressError: Somebody else is at it, and the wait was too long or not wanted.
            ApplicationError: Asked from within the run of this very key, which would wait for itself.
            KeyReusedError: The key is known with another payload.
            PreviouslyFailedError: It was given up earlier.
            LeaseLostError: It could not be finished within the lease; its effects may have happened.
            ResultDroppedError: It is done, but its result was too large to keep.
            ResultDecodeError: It is done, but its result does not fit the return annotation.
            StoreError: As for every verb; nothing was done, except for `ResultNotStoredError`.
            Exception: Whatever `function` raises, unchanged.
        """

        async def ignoring_the_attempt(_: Attempt) -> T:
            running = function()
            if not inspect.isawaitable(running):
                raise ApplicationError(f"{function!r} is no async function; what it did has been done")
            return await running

        work = Work(self.space.key(key), fingerprint, None if ttl is None else self.checked_ttl(ttl))
        return await self.run_work(
            work, ignoring_the_attempt, returns=function, on_in_progress=on_in_progress, wait_timeout=wait_timeout
        )

    async def run_work(
        self,
        work: Work,
        function: Callable[[Attempt], Awaitable[T]],
        *,
        returns: Callable[..., object],
        on_in_progress: OnInProgress | None = None,
        wait_timeout: timedelta | None = None,
    ) -> T:
        """As `run`, for a function that wants its `Attempt`; the annotation of `returns` types a replayed result."""

        async def one_pass() -> Outcome[T]:
            return await self._joined_or_executed(work, function)

        return await self.settled(work, one_pass, returns, on_in_progress=on_in_progress, wait_timeout=wait_timeout)

    async def settled(
        self,
        work: Work,
        one_pass: Callable[[], Awaitable[Outcome[T]]],
        returns: Callable[..., object],
        *,
        on_in_progress: OnInProgress | None = None,
        wait_timeout: timedelta | None = None,
    ) -> T:
        """The value of `work`, by as many passes as it takes.  Raises as `run` does."""
        policy = OnInProgress(on_in_progress or self.config.on_in_progress)
        longest = self.config.wait_timeout if wait_timeout is None else wait_timeout
        give_up_at = asyncio.get_running_loop().time() + longest.total_seconds()
        looks = 0
        while True:
            outcome = await one_pass()
            if not isinstance(outcome, InProgress):
                return self._value_of(outcome, work, returns)
            if policy is OnInProgress.SKIP:
                self.observer.count(Signal.DUPLICATE_BLOCKED)
                return None  # type: ignore[return-value]  # what `skip` asks for
            self._refuse_to_wait_for_itself(outcome, work)
            left = give_up_at - asyncio.get_running_loop().time()
            if policy is OnInProgress.RAISE or left <= 0:
                raise InProgressError(work.key.label, outcome.attempt, outcome.retry_after, outcome.owner)
            await self.wait_for_change(outcome, at_most=left, looks=looks)
            looks += 1

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

    async def _joined_or_executed(self, work: Work, function: Callable[[Attempt], Awaitable[T]]) -> Outcome[T]:
        joined = _JOINED.get()
        if joined is None or joined[0] is not self:
            return await self.execute(work, function)

        async def under_way(attempt: Attempt) -> T:
            with self._under_way(attempt.key), self.observer.phase(Phase.HANDLE, work.event_type):
                return await function(attempt)

        outcome = await run_joined(self._ledger, joined[1], work, under_way)
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
            return await self._unguarded(work, function, self.space.full(work.key))
        if not isinstance(verdict, Reserved):
            return await self._blocked(work, function, verdict)
        if verdict.attempt > self.config.max_attempts and verdict.previous is Previous.LAPSED:
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

    async def close(self) -> None:
        """Let writes that are under way end, and stop renewing."""
        await self._ledger.close()
        self._leases.close()

    def _refuse_to_wait_for_itself(self, found: InProgress, work: Work) -> None:
        """A run that waits for its own key, by itself or by a task it began, has a mistake that no wait mends."""
        if self._running.get(found.key) in _AROUND.get():
            raise ApplicationError(
                f"{work.key.label} was asked for within its own run (attempt {found.attempt}), which would wait for "
                "itself: give the inner work a key of its own"
            )

    # The parts of one pass.

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
                if self.config.on_key_reused is OnKeyReused.RUN:
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
            return HandlerFailed(error, attempt.number, self._hopeless(error, attempt.number))

    def _hopeless(self, error: Exception, attempt: int) -> bool:
        if isinstance(error, TransactionAbortedError):
            return False  # no run has failed
        return (
            isinstance(error, PermanentError)
            or self.config.on_failure is OnFailure.BLOCK
            or attempt >= self.config.max_attempts
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
            with self._under_way(reserved.key):
                return await self._run(work, function, attempt, lease, seal, wait_for_store)
        finally:
            # The key may have been reserved anew under it: the next run needs a reservation of its own.
            work.token = secrets.token_bytes(16)

    @contextmanager
    def _under_way(self, key: str) -> Iterator[None]:
        """Others of this process who ask for `key` are told when the run is over; itself it must not wait for."""
        ended = self._running[key] = asyncio.get_running_loop().create_future()
        around = _AROUND.get()
        _AROUND.set(around | {ended})
        try:
            yield
        finally:
            if self._running.get(key) is ended:
                del self._running[key]
            ended.set_result(None)
            _AROUND.set(around)

    async def _run(
        self,
        work: Work,
        function: Callable[[Attempt, Seal], Awaitable[T]],
        attempt: Attempt,
        lease: HeldLease,
        seal: Seal,
        wait_for_store: WaitForStore | None,
    ) -> Outcome[T]:
        try:
            async with lease:
                with self.observer.phase(Phase.HANDLE, work.event_type):
                    value = await function(attempt, seal)
        except asyncio.CancelledError:
            self._ledger.release_later(work, lease.reservation)
            raise
        except Exception as error:
            if lease.lost or seal.refused:
                self.observer.count(Signal.RESERVATION_LOST, work.event_type)
                raise self._ledger.lost(work, lease.reservation, "another worker" if seal.refused else "") from error
            if error is seal.store_error:
                await self._ledger.try_to_release(work, lease.reservation)
                raise
            return await self._handler_failed(work, lease, error, wait_for_store)
        if not seal.written:
            await self._complete(work, lease, value, wait_for_store)
        return Executed(value, attempt.number)

    async def _handler_failed(
        self, work: Work, lease: HeldLease, error: Exception, wait_for_store: WaitForStore | None
    ) -> HandlerFailed:
        self.observer.count(Signal.HANDLER_FAILED, work.event_type)
        reserved = lease.reservation
        if self._hopeless(error, reserved.attempt):
            return await self._fail(work, reserved, error, lease.deadline, wait_for_store)
        await self._ledger.try_to_release(work, reserved)
        return HandlerFailed(error, reserved.attempt, given_up=False)

    async def _complete(self, work: Work, lease: HeldLease, value: object, wait_for_store: WaitForStore | None) -> None:
        completion = self._ledger.completion(lease.reservation, value, work.ttl, work.event_type)

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

    def _value_of(self, outcome: Outcome[T], work: Work, function: Callable[..., object]) -> T:
        label = work.key.label
        match outcome:
            case Executed():
                return outcome.value
            case HandlerFailed():
                raise outcome.error
            case Completed():
                return replayed_value(label, outcome, function)  # type: ignore[no-any-return]
            case Failed():
                raise PreviouslyFailedError(label, outcome.attempt, outcome.error)
            case KeyReused():
                raise KeyReusedError(label, outcome.stored, outcome.offered)
            case Corrupt():
                raise CorruptRecordError(label, outcome.reason)
            case InProgress():
                raise InProgressError(label, outcome.attempt, outcome.retry_after, outcome.owner)


def replayed_value(label: str, completed: Completed, function: Callable[..., object]) -> Any:
    """What the first run of `function` returned; `None` where a setting says that results are not kept.

    Raises:
        ResultDroppedError: It was too large to keep.
        ResultDecodeError: It does not fit the return annotation of `function`.
    """
    if completed.result is not None:
        return decode_result(label, completed.result, return_type_of(function))
    if completed.result_dropped:
        raise ResultDroppedError(label)
    return None


def _attempt(work: Work, key: str, number: int, fence: int, deadline: float) -> Attempt:
    return Attempt(key, number, fence, deadline, work.key.label, work.key.generation)
