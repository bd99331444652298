"""`IdempotencyManager`: the decision whether work is done, waited for, answered or refused.

No driver, no Kafka, no Dishka.  `run` is for callers who want a value; `execute` makes one pass and
says what came of it, for those who settle deliveries.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Generic, TypeAlias, TypeVar

from integr8s_idem.batching import Coalescer
from integr8s_idem.config import IdempotencyConfig, OnFailure, OnInProgress, OnKeyReused, OnStoreError
from integr8s_idem.errors import (
    ApplicationError,
    CorruptRecordError,
    CrashedTooOftenError,
    InProgressError,
    KeyReusedError,
    LeaseLostError,
    PermanentError,
    PreviouslyFailedError,
    ResultDroppedError,
    ResultNotStoredError,
    StoreConfigurationError,
    StoreError,
    StoreUnavailableError,
)
from integr8s_idem.keys import Key, KeySpace, downstream_key
from integr8s_idem.leases import LeaseKeeper
from integr8s_idem.records import (
    Completed,
    Completion,
    Corrupt,
    Failed,
    Failure,
    IdempotencyRecord,
    InProgress,
    KeyReused,
    Previous,
    Reserved,
    ReserveRequest,
    StoredResult,
    TraceLink,
    Verdict,
)
from integr8s_idem.results import decode_result, encode_result, return_type_of
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.telemetry import SILENT, Observer, Phase, Signal

T = TypeVar("T")

LONGEST_ERROR: Final = 1024
"""Characters of an error kept in a FAILED record."""

FIRST_LOOK: Final = 0.05
LONGEST_LOOK: Final = 1.0
"""Seconds between two looks at a key that another process works on, growing from the first to the longest."""

RETENTION_IN_LEASES: Final = 10
"""A record that nobody settles is kept for this many leases at least, so that attempts of a crashing event count."""


WaitForStore: TypeAlias = Callable[[StoreError], Awaitable[None]]
"""Returns when it is worth asking the store again."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of some work, as its function sees it."""

    key: str
    """The full key."""
    number: int
    """1 for the first; more means that an earlier run failed, was stopped or crashed."""
    fence: int
    """For conditional writes downstream: refuse those with a lower number than the highest seen."""
    deadline: float
    """When the lease ends unless it is renewed, by the event loop's clock (`loop.time()`)."""
    label: str = ""
    """The key as people read it."""

    def key_for(self, name: str) -> str:
        """A key for something done downstream, the same at every attempt: hand it to a payment API."""
        return downstream_key(self.key, name)


@dataclass(slots=True)
class Work:
    """One unit of work on its way through `execute`; the same object is used for every try."""

    key: Key
    fingerprint: bytes | None = None
    ttl: timedelta | None = None
    """How long its outcome is remembered; the configured default if `None`."""
    event_type: str = ""
    """For metrics: one of a closed set, or empty."""
    unguarded_runs: int = 0
    """Runs without a reservation, counted here because no record does."""
    token: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    """Kept while `reserve` gets no answer, so that a lost answer finds its reservation; then made anew."""


@dataclass(frozen=True, slots=True)
class Executed(Generic[T]):
    """The function ran and returned."""

    value: T
    attempt: int


@dataclass(frozen=True, slots=True)
class HandlerFailed:
    """The function ran and raised, or crashed too often to be tried again."""

    error: Exception
    attempt: int
    given_up: bool
    """The key is FAILED now; otherwise it was released, and the work may be tried again."""


Outcome: TypeAlias = Executed[T] | HandlerFailed | Completed | InProgress | Failed | KeyReused | Corrupt
"""What came of one pass: the work was done now, was done before, or why it was not done."""


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
        self.config = config or IdempotencyConfig()
        self.repository = repository
        self.observer = observer
        self.scope = scope
        self.space = KeySpace(self.config.key_prefix, scope, self.config.hash_keys)
        self.owner = (owner or f"{scope}@{socket.gethostname()}:{os.getpid()}")[:128]
        self._leases = LeaseKeeper(repository, scope, observer)
        self._reservations = Coalescer(repository.reserve, abandoned=self._give_back)
        self._completions = Coalescer(repository.complete)
        self._failures = Coalescer(repository.fail)
        self._releases = Coalescer(repository.release)
        self._running: dict[str, asyncio.Future[None]] = {}
        self._background: set[asyncio.Task[Any]] = set()

    # The verbs of the store, for one key or many.

    async def reserve(self, key: str | Key, *, fingerprint: bytes | None = None) -> Verdict:
        """Ask to do the work of `key`.

        Raises:
            CorruptRecordError: Its record cannot be read.
            StoreError: As for every verb.
        """
        verdict = await self._reservations.answer(self._request(Work(as_key(key), fingerprint)))
        if isinstance(verdict, Corrupt):
            raise CorruptRecordError(verdict.key, verdict.reason)
        return verdict

    async def reserve_many(self, keys: Sequence[str | Key]) -> list[Verdict]:
        """Ask for many keys in one round trip; an unreadable record is `Corrupt` in its place."""
        return await self.repository.reserve([self._request(Work(as_key(key))) for key in keys])

    async def renew(self, *reservations: Reserved) -> list[bool]:
        """Let their leases begin anew, with the configured length.  `False`: no longer ours."""
        return await self.repository.renew(reservations, self.config.lease)

    async def complete(self, reserved: Reserved, result: object = None, *, ttl: timedelta | None = None) -> bool:
        """Remember that the work is done.  `False`: the reservation is no longer ours."""
        return await self._completions.ask(self.completion(reserved, result, ttl))

    async def complete_many(self, completions: Sequence[Completion]) -> list[bool]:
        """As `complete`, many in one round trip; `completion` makes them."""
        return await self.repository.complete(completions)

    async def fail(self, reserved: Reserved, error: str, *, ttl: timedelta | None = None) -> bool:
        """Remember that the work was given up.  `False`: the reservation is no longer ours."""
        return await self._failures.ask(Failure(reservation=reserved, ttl=ttl or self.config.ttl, error=error))

    async def release(self, *reservations: Reserved) -> list[bool]:
        """Give keys back undone; the attempts stay counted."""
        return list(await asyncio.gather(*map(self._releases.ask, reservations)))

    async def get(self, key: str | Key) -> IdempotencyRecord | None:
        """The record of `key`, if there is one."""
        return (await self.repository.get([self.space.full(as_key(key))]))[0]

    async def delete(self, key: str | Key) -> bool:
        """Forget `key`, whatever its state: the next caller does the work again."""
        return await self.repository.delete([self.space.full(as_key(key))]) == 1

    async def count_active(self) -> int:
        """How many keys of this scope hold a lease now."""
        return await self.repository.count_active(self.space.root)

    def completion(self, reserved: Reserved, result: object = None, ttl: timedelta | None = None) -> Completion:
        """What to hand to `complete_many`.  A result that is too large or cannot be written is dropped and counted."""
        stored, dropped = self._result_to_keep(result)
        return Completion(reservation=reserved, ttl=ttl or self.config.ttl, result=stored, result_dropped=dropped)

    # Doing work once.

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
            KeyReusedError: The key is known with another payload.
            PreviouslyFailedError: It was given up earlier.
            LeaseLostError: It could not be finished within the lease; its effects may have happened.
            ResultDroppedError: It is done, but its result was too large to keep.
            ResultDecodeError: It is done, but its result does not fit the return annotation.
            StoreError: As for every verb; nothing was done, except for `ResultNotStoredError`.
            Exception: Whatever `function` raises, unchanged.
        """

        async def ignoring_the_attempt(_: Attempt) -> T:
            return await function()

        work = Work(as_key(key), fingerprint, ttl)
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
        policy = on_in_progress or self.config.on_in_progress
        longest = self.config.wait_timeout if wait_timeout is None else wait_timeout
        give_up_at = asyncio.get_running_loop().time() + longest.total_seconds()
        looks = 0
        while True:
            outcome = await self.execute(work, function)
            if not isinstance(outcome, InProgress):
                return self._value_of(outcome, work, returns)
            if policy is OnInProgress.SKIP:
                self.observer.count(Signal.DUPLICATE_BLOCKED)
                return None  # type: ignore[return-value]  # what `skip` asks for
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
        return await self._perform(work, function, verdict, asked_at, wait_for_store)

    async def wait_for_change(self, found: InProgress, *, at_most: float = 3600.0, looks: int = 0) -> None:
        """Return when it is worth asking again: the run in this process ended, or a while has passed.

        `looks`: how often the caller has looked before; the pauses grow from 50 ms to a second, never
        past the end of the lease.
        """
        pause = min(FIRST_LOOK * 2 ** min(looks, 10), LONGEST_LOOK, found.retry_after.total_seconds() + 0.01)
        pause = min(pause * random.uniform(0.75, 1.25), at_most)  # noqa: S311  # jitter, no secret
        self.observer.count(Signal.WAITED)
        with self.observer.phase(Phase.WAIT):
            if (running := self._running.get(found.key)) is not None:
                # Our own process tells us; the lease is the limit in case it goes on and on.
                await asyncio.wait({running}, timeout=min(max(pause, LONGEST_LOOK), at_most))
            else:
                await asyncio.sleep(pause)

    async def close(self) -> None:
        """Let writes that are under way end, and stop renewing."""
        if self._background:
            await asyncio.wait(self._background)
        for writes in (self._completions, self._failures, self._releases):
            await writes.settled()
        self._leases.close()

    # The parts of one pass.

    def _request(self, work: Work, trace: TraceLink | None = None) -> ReserveRequest:
        return ReserveRequest(
            key=self.space.full(work.key),
            token=work.token,
            lease=self.config.lease,
            retention=max(work.ttl or self.config.ttl, RETENTION_IN_LEASES * self.config.lease),
            fingerprint=work.fingerprint,
            owner=self.owner,
            trace=trace,
        )

    async def _reserve(self, work: Work) -> Verdict:
        with self.observer.phase(Phase.RESERVE, work.event_type) as span:
            span.annotate("idempotency.key", work.key.label)
            request = self._request(work, span.trace())
            try:
                verdict = await self._reservations.answer(request)
            except asyncio.CancelledError:
                # It is given back under this token: the next try must not find it and run into that.
                work.token = secrets.token_bytes(16)
                raise
            if isinstance(verdict, Reserved):
                work.token = secrets.token_bytes(16)
                span.annotate("idempotency.attempt", verdict.attempt)
            span.annotate("idempotency.verdict", type(verdict).__name__)
        fresh = isinstance(verdict, Reserved) and verdict.previous is Previous.NONE
        self.observer.count(Signal.CACHE_MISS if fresh else Signal.CACHE_HIT, work.event_type)
        if isinstance(verdict, Reserved) and verdict.previous is Previous.LAPSED:
            self.observer.count(Signal.TAKEOVER, work.event_type)
        return verdict

    async def _blocked(
        self,
        work: Work,
        function: Callable[[Attempt], Awaitable[T]],
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

    async def _unguarded(self, work: Work, function: Callable[[Attempt], Awaitable[T]], key: str) -> Outcome[T]:
        """Run without a reservation, because a policy says so."""
        self.observer.count(Signal.UNGUARDED, work.event_type)
        work.unguarded_runs += 1
        attempt = Attempt(key, work.unguarded_runs, 0, float("inf"), work.key.label)
        try:
            with self.observer.phase(Phase.HANDLE, work.event_type):
                return Executed(await function(attempt), attempt.number)
        except Exception as error:  # noqa: BLE001  # handed on as the outcome
            self.observer.count(Signal.HANDLER_FAILED, work.event_type)
            return HandlerFailed(error, attempt.number, self._hopeless(error, attempt.number))

    def _hopeless(self, error: Exception, attempt: int) -> bool:
        return (
            isinstance(error, PermanentError)
            or self.config.on_failure is OnFailure.BLOCK
            or attempt >= self.config.max_attempts
        )

    async def _perform(
        self,
        work: Work,
        function: Callable[[Attempt], Awaitable[T]],
        reserved: Reserved,
        asked_at: float,
        wait_for_store: WaitForStore | None,
    ) -> Outcome[T]:
        lease = self._leases.hold(reserved, asked_at)
        attempt = Attempt(reserved.key, reserved.attempt, reserved.fence, lease.deadline, work.key.label)
        ended = self._running[reserved.key] = asyncio.get_running_loop().create_future()
        try:
            try:
                async with lease:
                    with self.observer.phase(Phase.HANDLE, work.event_type):
                        value = await function(attempt)
            except asyncio.CancelledError:
                self._in_background(self._try_to_release(work, reserved))
                raise
            except Exception as error:
                if lease.lost:
                    self.observer.count(Signal.RESERVATION_LOST, work.event_type)
                    raise self._lost(work, reserved) from error
                return await self._handler_failed(work, reserved, error, lease.deadline, wait_for_store)
            await self._complete(work, reserved, value, lease.deadline, wait_for_store)
            return Executed(value, reserved.attempt)
        finally:
            if self._running.get(reserved.key) is ended:
                del self._running[reserved.key]
            ended.set_result(None)

    async def _handler_failed(
        self, work: Work, reserved: Reserved, error: Exception, deadline: float, wait_for_store: WaitForStore | None
    ) -> HandlerFailed:
        self.observer.count(Signal.HANDLER_FAILED, work.event_type)
        if self._hopeless(error, reserved.attempt):
            return await self._fail(work, reserved, error, deadline, wait_for_store)
        await self._try_to_release(work, reserved)
        return HandlerFailed(error, reserved.attempt, given_up=False)

    async def _complete(
        self,
        work: Work,
        reserved: Reserved,
        value: object,
        deadline: float,
        wait_for_store: WaitForStore | None,
    ) -> None:
        stored, dropped = self._result_to_keep(value, work.event_type)

        async def write(ours: Reserved) -> bool:
            return await self._completions.ask(
                Completion(reservation=ours, ttl=work.ttl or self.config.ttl, result=stored, result_dropped=dropped)
            )

        with self.observer.phase(Phase.COMPLETE, work.event_type):
            await self._settle(work, reserved, write, deadline, wait_for_store)

    async def _fail(
        self, work: Work, reserved: Reserved, error: Exception, deadline: float, wait_for_store: WaitForStore | None
    ) -> HandlerFailed:
        text = describe_error(error)

        async def write(ours: Reserved) -> bool:
            return await self._failures.ask(Failure(reservation=ours, ttl=work.ttl or self.config.ttl, error=text))

        with self.observer.phase(Phase.FAIL, work.event_type):
            try:
                await self._settle(work, reserved, write, deadline, wait_for_store)
            except ResultNotStoredError:
                # Nothing was done: the caller's answer is the handler's error, and the lease ends by itself.
                return HandlerFailed(error, reserved.attempt, given_up=False)
        return HandlerFailed(error, reserved.attempt, given_up=True)

    async def _settle(
        self,
        work: Work,
        reserved: Reserved,
        write: Callable[[Reserved], Awaitable[bool]],
        deadline: float,
        wait_for_store: WaitForStore | None,
    ) -> None:
        """Write the outcome; a store that is down for a moment must not turn a success into a failure.

        `deadline`: when the lease ends, renewals included, by the event loop's clock.
        """
        pause = FIRST_LOOK
        while True:
            try:
                if await write(reserved):
                    return
                reserved = await self._reserved_again(work, reserved)
            except (StoreUnavailableError, StoreConfigurationError) as error:
                self.observer.count(Signal.STORE_ERROR, work.event_type)
                if self.config.on_store_error is OnStoreError.OPEN:
                    return  # who runs without the store does not wait for it either
                if wait_for_store is not None:
                    await wait_for_store(error)
                    continue
                refused = isinstance(error, StoreConfigurationError)
                if refused or asyncio.get_running_loop().time() + pause > deadline:
                    raise ResultNotStoredError(work.key.label, error.reason) from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_LOOK)

    async def _reserved_again(self, work: Work, reserved: Reserved) -> Reserved:
        """The store does not know our token any more: find out why, and take the key if nobody has it.

        A record that was evicted, flushed or lost in a failover is reserved anew, so that the outcome
        of work that is done is remembered after all.  A key that somebody else holds or has settled
        is lost to us.
        """
        verdict = await self._reservations.answer(self._request(work))
        if isinstance(verdict, Reserved):
            gone = verdict.previous is Previous.NONE
            self.observer.count(Signal.RECORD_VANISHED if gone else Signal.RESERVATION_LOST, work.event_type)
            return verdict
        self.observer.count(Signal.RESERVATION_LOST, work.event_type)
        raise self._lost(work, reserved, verdict.owner if isinstance(verdict, InProgress) else "another worker")

    def _lost(self, work: Work, reserved: Reserved, owner: str = "") -> LeaseLostError:
        return LeaseLostError(work.key.label, reserved.attempt, reserved.lease, self.scope, owner)

    async def _try_to_release(self, work: Work, reserved: Reserved) -> None:
        """Give the key back.  If that fails, its lease ends by itself."""
        with self.observer.phase(Phase.RELEASE, work.event_type):
            try:
                released = await self._releases.ask(reserved)
            except StoreError:
                self.observer.count(Signal.STORE_ERROR, work.event_type)
                return
        if not released:
            self.observer.count(Signal.RESERVATION_LOST, work.event_type)

    def _give_back(self, request: ReserveRequest, verdict: Verdict) -> None:
        """The caller was cancelled while its reservation was under way."""
        if isinstance(verdict, Reserved):
            self._in_background(self._try_to_release(Work(Key(request.key, request.key)), verdict))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _result_to_keep(self, value: object, event_type: str = "") -> tuple[StoredResult | None, bool]:
        if not self.config.enable_result_caching:
            return None, False
        try:
            stored = encode_result(value)
        except Exception:  # noqa: BLE001  # a serializer is the user's code
            # The work is done: what cannot be written must not undo that.
            self.observer.count(Signal.RESULT_DROPPED, event_type)
            return None, True
        if len(stored.body) > self.config.max_result_size_bytes:
            self.observer.count(Signal.RESULT_DROPPED, event_type)
            return None, True
        self.observer.count(Signal.RESULT_BYTES, event_type, len(stored.body))
        return stored, False

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


def as_key(key: str | Key) -> Key:
    """A caller's string as a key; a key as it is."""
    return key if isinstance(key, Key) else Key.of(key)


def describe_error(error: BaseException) -> str:
    """One line about `error`, bounded: for records and dead letters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= LONGEST_ERROR else text[: LONGEST_ERROR - 1] + "…"
