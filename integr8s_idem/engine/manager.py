"""`IdempotencyManager`: the decision whether work is done, waited for, answered or refused.

No driver, no Kafka, no Dishka.  `run` is for callers who want a value; `execute` makes one pass and
says what came of it, for those who settle deliveries.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from itertools import compress
from operator import not_
from typing import Any, Literal, TypeVar

from integr8s_idem._util.lease_clock import Clock
from integr8s_idem.config import IdempotencyConfig, OnFailure, OnInProgress, chosen
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.active_runs import ActiveRun
from integr8s_idem.engine.executor import Executor
from integr8s_idem.engine.leases import BatchLeases, LeaseKeeper
from integr8s_idem.engine.outcomes import error_of
from integr8s_idem.engine.results import decode_result, refuse_call, refuse_generator, refuse_iterator, return_type_of
from integr8s_idem.engine.run import RunOptions
from integr8s_idem.engine.steps import Steps
from integr8s_idem.engine.store_client import StoreClient
from integr8s_idem.engine.work import Attempt, Executed, Outcome, WaitForStore, Work
from integr8s_idem.errors import (
    ApplicationError,
    CorruptRecordError,
    ResultDroppedError,
)
from integr8s_idem.keys import LAST_GENERATION, Key, KeySpace, generation_key
from integr8s_idem.records import (
    Completed,
    Completion,
    Corrupt,
    IdempotencyRecord,
    InProgress,
    Reserved,
    Verdict,
)
from integr8s_idem.stores import IdempotencyRepository, JoinedRepository, JoiningRepository
from integr8s_idem.telemetry import SILENT, Observer, Signal

T = TypeVar("T")
K = TypeVar("K", bound="str | Key")

_JOINED: ContextVar[tuple[IdempotencyManager, JoinedRepository] | None] = ContextVar(
    "the transaction that the current code has joined", default=None
)


class IdempotencyManager:
    """Does work once per key: in this process and in all that share the store and the scope.

    It belongs to the process that uses it first.  In a child made by `os.fork` after that, its methods raise
    `ApplicationError`: make a manager and a store in each child.
    """

    def __init__(
        self,
        config: IdempotencyConfig | None = None,
        repository: IdempotencyRepository | None = None,
        observer: Observer = SILENT,
        *,
        scope: str,
        owner: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Opens nothing.

        Args:
            scope: Who does the work, usually the service.
            owner: How messages name this process.
            clock: Returns the seconds by which leases are measured before each start; `lease_clock.system_clock`, or
                the time of the event loop where that is simulated, if not given.

        Raises:
            ApplicationError: There is no repository or no scope.
        """
        if repository is None:
            raise ApplicationError(
                "a manager needs a repository: RedisIdempotencyRepository, or MemoryIdempotencyRepository to try it"
            )
        if not scope:
            raise ApplicationError("a manager needs a scope: who does the work, usually the service's name")
        self.config = config or IdempotencyConfig()
        self.checked_ttl(self.config.ttl)
        self._wait_timeout = self.config.wait_timeout
        self.repository = repository
        self.observer = observer
        self.scope = scope
        self.owner = (owner or f"{scope}@{socket.gethostname()}:{os.getpid()}")[:128]
        self._clock = clock
        self._in_scopes: dict[str, IdempotencyManager] = {}
        self._leases = LeaseKeeper(repository, scope, observer, clock)
        self._batch_leases = BatchLeases()
        self._store_client = StoreClient(self.config, repository, observer, scope, self.owner)
        self.executor = Executor(self.config, self._store_client, self._leases, observer)
        """What makes one pass over some work: for those who settle deliveries."""

    @property
    def space(self) -> KeySpace:
        """Where its keys live in the store."""
        return self._store_client.space

    @property
    def running_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that it works in, if it has begun to and the loop still runs.

        Raises:
            ApplicationError: It was used before this process was forked.
        """
        loop = self.executor.loop
        if loop is None:
            return None
        self._store_client.home.check()  # a loop of the parent's says that it runs, but its thread is not here
        return loop if loop.is_running() else None

    @property
    def _store(self) -> IdempotencyRepository:
        """The repository, to be used now."""
        self._store_client.home.check()
        return self.repository

    def in_scope(self, scope: str) -> IdempotencyManager:
        """The same manager for the work of another scope; closed together with this one."""
        if scope == self.scope:
            return self
        if scope not in self._in_scopes:
            sibling = IdempotencyManager(self.config, self.repository, self.observer, scope=scope, clock=self._clock)
            sibling._store_client.home = self._store_client.home
            self._in_scopes[scope] = sibling
        return self._in_scopes[scope]

    def checked_ttl(self, ttl: Duration) -> timedelta:
        """`ttl`, if outcomes kept for so long protect anything.

        Raises:
            ApplicationError: It is shorter than the lease: a duplicate of a running event would come too late.  Or it
                is not a duration.
        """
        ttl = duration(ttl, "ttl")
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
        verdict = await self._store_client.reserve(self._store_client.request(Work(self.space.key(key), fingerprint)))
        if isinstance(verdict, Corrupt):
            raise CorruptRecordError(verdict.key, verdict.reason)
        return verdict

    async def reserve_many(self, keys: Sequence[str | Key]) -> list[Verdict]:
        """Ask for many keys in one round trip: a verdict for each, in their order.

        An unreadable record is `Corrupt` in its place.
        """
        return await self._store.reserve([self._store_client.request(Work(self.space.key(key))) for key in keys])

    async def renew(self, *reservations: Reserved) -> list[bool]:
        """Let their leases begin anew, with the configured length; an answer for each, in their order.

        `False`: the reservation is no longer ours.
        """
        asked_at = self._leases.now()
        answers = await self._store.renew(reservations, self.config.lease)
        self._batch_leases.renewed(compress(reservations, answers), asked_at)
        return answers

    async def complete(self, reserved: Reserved, result: object = None, *, ttl: Duration | None = None) -> bool:
        """Remember that the work is done.  `False`: the reservation is no longer ours.

        Raises:
            ApplicationError: As `completion`.
        """
        self._batch_leases.settle([reserved])
        return await self._store_client.complete(self.completion(reserved, result, ttl))

    async def complete_many(self, completions: Sequence[Completion]) -> list[bool]:
        """As `complete`, many in one round trip, an answer for each, in their order; `completion` makes them."""
        self._batch_leases.settle(each.reservation for each in completions)
        return await self._store.complete(completions)

    async def fail(self, reserved: Reserved, error: str, *, ttl: Duration | None = None) -> bool:
        """Remember that the work was given up.  `False`: the reservation is no longer ours."""
        self._store_client.home.check()
        self._batch_leases.settle([reserved])
        return await self._store_client.fail(self._store_client.failure(reserved, error, duration(ttl, "ttl")))

    async def release(self, *reservations: Reserved) -> list[bool]:
        """Give keys back undone, in one round trip; the attempts stay counted.  An answer for each, in their order."""
        self._store_client.home.check()
        self._batch_leases.settle(reservations)
        return await self._store_client.release_together(reservations)

    async def get(self, key: str | Key) -> IdempotencyRecord | None:
        """The record of `key`, if there is one."""
        return (await self._store.get([self.space.full(self.space.key(key))]))[0]

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
        found = zip(generations, await self._store.get(names), strict=True)
        return {generation: record for generation, record in found if record is not None}

    async def delete(self, key: str | Key) -> bool:
        """Forget `key`, whatever its state: the next caller does the work again."""
        record_key = self.space.full(self.space.key(key))
        deleted = await self._store.delete([record_key]) == 1
        if self.executor.cache is not None:
            self.executor.cache.forget(record_key)
        return deleted

    async def count_active(self) -> int:
        """How many keys of this scope hold a lease now."""
        return await self._store.count_active(self.space.root)

    # Batches: for those who have many pieces of work in hand and settle them one by one.

    async def acquire_batch(
        self, keys: Iterable[K], *, fingerprint: Callable[[K], bytes | None] | None = None
    ) -> dict[K, Verdict]:
        """Ask to do the work of many keys, in one round trip.  A key that is given twice is asked for once.

        The leases are not renewed by themselves: settle within `processing_timeout_seconds`, or `renew` before that.
        Ask `may_start` immediately before you do the work of each.

        Args:
            keys: In the order in which the verdicts are given back.
            fingerprint: 16 bytes that name the payload of a key.

        Returns:
            The verdict for each key.  Do those that are `Reserved`, with the attempt and the fence in it, and hand
            it to `confirm_batch` or `release_batch`.  `InProgress` is somebody else's, with unknown outcome: do not
            acknowledge it.  An unreadable record is `Corrupt` in its place.

        Raises:
            StoreError: As for every verb.  What was reserved nevertheless is free when its lease ends.
            ApplicationError: It is a single key.
        """
        if isinstance(keys, str | Key):
            raise ApplicationError("acquire_batch takes many keys, as in acquire_batch([key]); reserve takes one")
        asked = list(dict.fromkeys(keys))
        works = [Work(self.space.key(key), fingerprint(key) if fingerprint else None) for key in asked]
        asked_at = self._leases.now()
        verdicts = await self._store_client.reserve_together(list(map(self._store_client.request, works)))
        self._batch_leases.add((verdict for verdict in verdicts if isinstance(verdict, Reserved)), asked_at)
        return dict(zip(asked, verdicts, strict=True))

    async def may_start(self, reserved: Reserved) -> bool:
        """Whether you may do the work of `reserved`, which `acquire_batch` returned.  Ask immediately before the work.

        Costs no round trip while enough of the lease is left.  Otherwise all reservations of its batch that are
        short of time are renewed in one call, which counts no attempt.

        Returns:
            `False`: the reservation is no longer ours.  Do not do the work, and leave it out of `confirm_batch`;
            to learn what became of it, acquire its key again.

        Raises:
            StoreError: As for every verb.  Do not do the work.
        """
        _refuse_what_is_not_ours("may_start", [reserved])
        while not self._batch_leases.may_start(reserved, self._leases.now()):
            self.observer.count(Signal.STALE_START_PREVENTED)
            if not await self._renew_late(reserved):
                return False
        return True

    async def _renew_late(self, reserved: Reserved) -> bool:
        """Renew all leases of batches that are late; whether that of `reserved` is ours still."""
        asked_at = self._leases.now()
        late = self._batch_leases.late_beside(reserved, asked_at)
        answers = await self._store.renew(late, self.config.lease)
        lost = set(compress(late, map(not_, answers)))
        self._batch_leases.settle(lost)
        self._batch_leases.renewed((each for each in late if each not in lost), asked_at)
        return reserved not in lost

    async def confirm_batch(
        self, done: Iterable[Reserved] | Mapping[Reserved, object], *, ttl: Duration | None = None
    ) -> list[bool]:
        """Remember that work is done, in one round trip.  `False`: the reservation is no longer ours.

        `done`: any part of what was acquired; as a mapping, with what each returned.

        Raises:
            StoreError: As for every verb.  Confirming again does no harm.
            ApplicationError: As `completion`; nothing is confirmed then.
        """
        results: Mapping[Reserved, object] = done if isinstance(done, Mapping) else dict.fromkeys(done)
        _refuse_what_is_not_ours("confirm_batch", results)
        if ttl is not None:
            self.checked_ttl(ttl)
        completions = [self.completion(reserved, result, ttl) for reserved, result in results.items()]
        written = await self._store_client.complete_together(completions)
        self._batch_leases.settle(results)
        return written

    async def release_batch(self, rest: Iterable[Reserved]) -> list[bool]:
        """Give work back undone, in one round trip; the attempts stay counted.

        An answer for each, in their order.  `False`: it is no longer ours.

        Raises:
            StoreError: As for every verb.  What was not given back is free when its lease ends.
        """
        given = list(rest)
        _refuse_what_is_not_ours("release_batch", given)
        self._batch_leases.settle(given)
        return await self.release(*given)

    def completion(self, reserved: Reserved, result: object = None, ttl: Duration | None = None) -> Completion:
        """What to hand to `complete_many`.  A result that is too large or cannot be written is dropped and counted.

        Raises:
            ApplicationError: The result is an iterator or a file, or holds an iterator, which storing it would use up.
        """
        self._store_client.home.check()
        refuse_iterator(result, reserved.key)
        return self._store_client.completion(reserved, result, duration(ttl, "ttl"))

    # Doing work once.

    def attempt(self) -> Attempt:
        """The run that calls this: its number, its fence, and keys for what it does downstream.

        For work that is not handed it: a decorated function, an endpoint, FastStream's handlers.

        Raises:
            ApplicationError: Nothing of this manager's is under way here.  In a batch of FastStream's several things
                are, and none of them is meant.
        """
        return self._under_way()[1].attempt

    def steps(self) -> Steps:
        """The steps of the run that calls this: parts of its work that a later run does not repeat.

        Raises:
            ApplicationError: Nothing of this manager's is under way here.
        """
        manager, run = self._under_way()
        if run.steps is None:
            run.steps = Steps(manager.space, manager.executor, manager.repository, run)
        assert isinstance(run.steps, Steps)
        return run.steps

    def _under_way(self) -> tuple[IdempotencyManager, ActiveRun]:
        """The run that calls, and whose it is: ours, or that of the same manager in another scope."""
        for manager in (self, *self._in_scopes.values()):
            if (run := manager.executor.runs.current()) is not None:
                return manager, run
        raise ApplicationError(
            f"nothing that the manager of {self.scope} guards is under way here: ask within manager.run(…), or within "
            "whatever else it guards"
        )

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
        ttl: Duration | None = None,
        on_in_progress: OnInProgress | Literal["wait", "raise", "skip"] | None = None,
        wait_timeout: Duration | None = None,
        on_failure: OnFailure | Literal["retry", "block"] | None = None,
    ) -> T:
        """Do the work of `key` once; every other caller gets the first one's result.

        Args:
            key: Names the work within the scope; compared byte for byte.
            function: Does it.  Its return annotation gives a replayed result its type.
            fingerprint: 16 bytes that name the payload; a second use of the key must bring the same.
            ttl: How long the outcome is remembered, by the store's clock: a `timedelta`, or seconds.
            on_in_progress: What to do while somebody else does it; as configured if `None`.
                `skip` returns `None`: the outcome is unknown.
            wait_timeout: Longest wait for a running twin; as configured if `None`.
            on_failure: What a failed run means for the next caller; as configured if `None`.

        Raises:
            InProgressError: Somebody else is at it, and a wait was not wanted; as `IdempotencyConflictError`
                if it was too long.
            ApplicationError: Asked from within the run of this very key, which would wait for itself.  Or `function` is
                what a call of it returned, or returns what cannot be awaited.
            KeyReusedError: The key is known with another payload.
            PreviouslyFailedError: It was given up earlier.
            LeaseLostError: It could not be finished within the lease; its effects may have happened.
            ResultDroppedError: It is done, but its result was too large to keep.
            ResultDecodeError: It is done, but its result does not fit the return annotation.
            StoreError: As for every verb; nothing was done, except for `ResultNotStoredError`.
            Exception: Whatever `function` raises, unchanged.
        """
        refuse_call(function, "manager.run(key, function)")
        refuse_generator(function)
        longest_wait = duration(wait_timeout, "wait_timeout")
        checked = None if ttl is None else self.checked_ttl(ttl)
        block = None if on_failure is None else chosen(OnFailure, on_failure, "on_failure")
        wait = None if on_in_progress is None else chosen(OnInProgress, on_in_progress, "on_in_progress")
        of = self.space.key(key)
        if (known := self.executor.known_here(of, fingerprint)) is not None:
            return replayed_value(of.label, known, function)  # type: ignore[no-any-return]
        work = Work(of, fingerprint, checked, on_failure=block)

        async def ignoring_the_attempt(_: Attempt) -> T:
            running = function()
            if not inspect.isawaitable(running):
                raise _not_awaitable(work, function, running)
            return await running

        return await self.run_work(
            work, ignoring_the_attempt, returns=function, on_in_progress=wait, wait_timeout=longest_wait
        )

    def run_work(
        self,
        work: Work,
        function: Callable[[Attempt], Awaitable[T]],
        *,
        returns: Callable[..., object] | None,
        on_in_progress: OnInProgress | None = None,
        wait_timeout: timedelta | None = None,
    ) -> Coroutine[Any, Any, T]:
        """As `run`, for a function that wants its `Attempt`; the annotation of `returns` types its result."""
        work.returns = returns
        joined = _JOINED.get()
        one_pass: Callable[[], Awaitable[Outcome[T]]]
        if joined is not None and joined[0] is self:
            one_pass = partial(self.executor.execute_joined, joined[1], work, function)
        else:
            one_pass = partial(self.executor.execute, work, function)
        return self.settled(work, one_pass, returns, on_in_progress=on_in_progress, wait_timeout=wait_timeout)

    async def settled(
        self,
        work: Work,
        one_pass: Callable[[], Awaitable[Outcome[T]]],
        returns: Callable[..., object] | None,
        *,
        on_in_progress: OnInProgress | None = None,
        wait_timeout: timedelta | None = None,
    ) -> T:
        """The value of `work`, by as many passes as it takes.  Raises as `run` does."""
        outcome = await self.outcome(work, one_pass, on_in_progress=on_in_progress, wait_timeout=wait_timeout)
        return outcome.value if type(outcome) is Executed else self._value_of(outcome, work, returns)

    def outcome(
        self,
        work: Work,
        one_pass: Callable[[], Awaitable[Outcome[T]]],
        *,
        on_in_progress: OnInProgress | None = None,
        wait_timeout: timedelta | None = None,
    ) -> Coroutine[Any, Any, Outcome[T]]:
        """What comes of `work`, by as many passes as it takes.  `InProgress` only where the policy is to skip.

        Raises:
            InProgressError: Somebody else is at it, and a wait was not wanted, or too long.
            LeaseLostError, StoreError, ApplicationError: As `run`.
        """
        return self.executor.await_outcome(
            work,
            one_pass,
            on_in_progress=on_in_progress or self.config.on_in_progress,
            wait_timeout=self._wait_timeout if wait_timeout is None else wait_timeout,
        )

    async def execute(
        self,
        work: Work,
        function: Callable[[Attempt], Awaitable[T]],
        *,
        wait_for_store: WaitForStore | None = None,
    ) -> Outcome[T]:
        """One pass of `work`, as `Executor.execute` makes it: for those who settle deliveries."""
        return await self.executor.execute(work, function, RunOptions(wait_for_store))

    async def close(self) -> None:
        """Let writes that are under way end, and stop renewing."""
        for sibling in self._in_scopes.values():
            await sibling.close()
        await self._store_client.close()
        self._leases.close()

    def _value_of(self, outcome: Outcome[T], work: Work, function: Callable[..., object] | None) -> T:
        match outcome:
            case Executed():
                return outcome.value
            case Completed():
                return replayed_value(work.key.label, outcome, function)  # type: ignore[no-any-return]
            case InProgress():
                return None  # type: ignore[return-value]  # what `skip` asks for
        error = error_of(work.key.label, outcome)
        assert error is not None, "the work is not done"
        raise error


def _not_awaitable(work: Work, function: Callable[..., object], returned: object) -> ApplicationError:
    work.on_failure = OnFailure.RETRY  # a mistake of the program is not an outcome: the key is released
    return ApplicationError(
        f"{getattr(function, '__qualname__', repr(function))} is no async function: it returned "
        f"{type(returned).__name__}, which cannot be awaited. Its side effects have happened, and the key is released. "
        "Write it as async def"
    )


def _refuse_what_is_not_ours(verb: str, given: Iterable[object]) -> None:
    for each in given:
        if not isinstance(each, Reserved):
            raise ApplicationError(
                f"{verb} takes what acquire_batch has Reserved for us, and {type(each).__name__} is none of that: "
                "write [verdict for verdict in verdicts.values() if isinstance(verdict, Reserved)]"
            )


def replayed_value(label: str, completed: Completed, function: Callable[..., object] | None) -> Any:
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
