"""`IdempotencyManager`: run work once per key, or wait for it, replay its result or reject it.

Independent of drivers, Kafka and Dishka.  `run` returns a value; `execute` makes one attempt and returns its outcome,
for code that settles deliveries.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from functools import partial
from itertools import compress
from operator import not_
from types import CoroutineType
from typing import Any, Final, Literal, TypeVar

from integr8s_idem._util.lease_clock import Clock
from integr8s_idem.config import IdempotencyConfig, OnFailure, OnInProgress, chosen
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.active_runs import ActiveRun
from integr8s_idem.engine.batch_leases import MOST_LATE_RENEWALS, BatchLeases
from integr8s_idem.engine.call_arguments import not_awaitable, refuse_single_key, require_reserved, reservations_of
from integr8s_idem.engine.error_text import shorten_error
from integr8s_idem.engine.executor import Executor
from integr8s_idem.engine.iterators import refuse_iterator
from integr8s_idem.engine.joined_transactions import JOINED, InTransaction, never_unknown
from integr8s_idem.engine.leases import LeaseKeeper
from integr8s_idem.engine.loop_guard import finish_in
from integr8s_idem.engine.measured_store import measured
from integr8s_idem.engine.outcomes import error_of
from integr8s_idem.engine.reconciliation import Question, awaitable_answer, reconciled
from integr8s_idem.engine.results import (
    check_function,
    decode_result,
    discarded_error,
    observed_place,
    refuse_call,
    return_type_of,
)
from integr8s_idem.engine.run import RunOptions
from integr8s_idem.engine.step_slots import delete_steps
from integr8s_idem.engine.steps import Steps, UnrecordedSteps
from integr8s_idem.engine.store_client import StoreClient
from integr8s_idem.engine.work import Attempt, Executed, Outcome, WaitForStore, Work
from integr8s_idem.errors import (
    ApplicationError,
    CorruptRecordError,
    DiscardedError,
    ResultDroppedError,
)
from integr8s_idem.events import BaseEvent
from integr8s_idem.keys import LAST_GENERATION, Key, KeySpace, generation_key
from integr8s_idem.keys.fingerprints import given_fingerprint
from integr8s_idem.reconciliation import Answer
from integr8s_idem.records import (
    JSON,
    Completed,
    Completion,
    Corrupt,
    IdempotencyRecord,
    Pending,
    Reserved,
    Verdict,
)
from integr8s_idem.stores import IdempotencyRepository, JoiningRepository
from integr8s_idem.telemetry import SILENT, Observer, Signal

T = TypeVar("T")
K = TypeVar("K", bound="str | Key")

_SETTLED: Final = (Executed, Completed)
"""The usual outcomes; comparing their types is faster than `isinstance`, which the metaclass of structs slows down."""


class IdempotencyManager:
    """Runs work once per key, across all processes that share the store and the scope.

    An instance belongs to the process that uses it first.  In a child that `os.fork` makes after that, its methods
    raise `ApplicationError`, except for `close`: make a manager and a store in each child.
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
        """Create a manager without opening a connection.

        Args:
            scope: Namespace of the keys, usually the service's name.
            owner: Name of this process in messages.
            clock: Returns the seconds by which leases are measured before each start.  The default is
                `lease_clock.system_clock`, or the time of the event loop if that is simulated.

        Raises:
            ApplicationError: The repository or the scope is missing.
        """
        if repository is None:
            raise ApplicationError(
                "a manager needs a repository: RedisIdempotencyRepository, or MemoryIdempotencyRepository to try it"
            )
        if not scope:
            raise ApplicationError("a manager needs a scope, usually the service's name")
        self.config = config or IdempotencyConfig()
        self.checked_ttl(self.config.ttl)
        self._wait_timeout = self.config.wait_timeout
        self.repository = repository
        self.measured_repository = measured(repository, observer)
        """`repository`, with its calls measured; of the optional protocols, it has only `PurgeSupport`."""
        # Checked only once, because it takes as long as ten function calls.
        self._joining = repository if isinstance(repository, JoiningRepository) else None
        self.observer = observer
        self.scope = scope
        self.owner = (owner or f"{scope}@{socket.gethostname()}:{os.getpid()}")[:128]
        self._given_owner = owner
        self._clock = clock
        self._by_scope: dict[str, IdempotencyManager] = {scope: self}
        """This manager and those of other scopes, which share the dictionary."""
        self._made: list[IdempotencyManager] = []
        """Those that this one made, and closes."""
        self._store_client = StoreClient(self.config, self.measured_repository, observer, scope, self.owner)
        reserve_vanished = self._store_client.reserve_vanished
        self._leases = LeaseKeeper(self.measured_repository, scope, reserve_vanished, observer, clock)
        self._batch_leases = BatchLeases()
        self.executor = Executor(self.config, self._store_client, self._leases, observer)
        """Executes single attempts, for code that settles deliveries."""

    @property
    def space(self) -> KeySpace:
        """The namespace of its keys in the store."""
        return self._store_client.space

    @property
    def running_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which it was used, if that is still running.

        Raises:
            ApplicationError: It was used before this process was forked.
        """
        loop = self.executor.loop_guard.loop
        if loop is None:
            return None
        self._store_client.home.check()  # the parent's loop claims to run, but its thread does not exist in a child
        return loop if loop.is_running() else None

    @property
    def _store(self) -> IdempotencyRepository:
        """The repository, after the check for forks."""
        self._store_client.home.check()
        return self.measured_repository

    def _check_use(self) -> None:
        """Check for forks and for a second event loop before a call that leaves state in this manager."""
        self._store_client.home.check()
        self.executor.now()

    def in_scope(self, scope: str) -> IdempotencyManager:
        """Return the manager for another scope with the same configuration, and the same `owner` if you gave one.

        It is made by the first call, and closed together with the manager that made it.
        """
        known = self._by_scope.get(scope)
        if known is not None:
            return known
        sibling = IdempotencyManager(
            self.config, self.repository, self.observer, scope=scope, owner=self._given_owner, clock=self._clock
        )
        sibling._store_client.home = self._store_client.home
        sibling.executor.share_loop(self.executor.loop_guard)
        sibling._by_scope = self._by_scope
        self._by_scope[scope] = sibling
        self._made.append(sibling)
        return sibling

    def checked_ttl(self, ttl: Duration) -> timedelta:
        """Validate `ttl` and return it as a `timedelta`.

        Raises:
            ApplicationError: `ttl` is not a duration, or is shorter than the lease.
        """
        ttl = duration(ttl, "ttl")
        if ttl < self.config.lease:
            raise ApplicationError(
                f"a ttl of {ttl.total_seconds():g} s is shorter than the lease of "
                f"{self.config.processing_timeout_seconds:g} s: outcomes would be forgotten before duplicates arrive. "
                "Raise the ttl, or lower [idempotency] processing_timeout_seconds"
            )
        return ttl

    # Store operations, for one key or many.

    async def reserve(self, key: str | Key, *, fingerprint: bytes | BaseEvent | None = None) -> Verdict:
        """Reserve `key` and return the verdict of the store.

        Args:
            key: Identifies the work within the scope; compared byte for byte.
            fingerprint: The payload, as for `run`.

        Raises:
            CorruptRecordError: The record cannot be read.
            StoreError: The store did not answer.
        """
        self._check_use()
        work = Work(self.space.key(key), given_fingerprint(fingerprint))
        verdict = await self._store_client.reserve(self._store_client.request(work))
        if isinstance(verdict, Corrupt):
            raise CorruptRecordError(verdict.key, verdict.reason)
        return verdict

    async def reserve_many(self, keys: Sequence[str | Key]) -> list[Verdict]:
        """Reserve many keys in one round trip and return their verdicts in order.

        The verdict of an unreadable record is `Corrupt`.
        """
        refuse_single_key("reserve_many", keys)
        return await self._store.reserve([self._store_client.request(Work(self.space.key(key))) for key in keys])

    async def renew(self, *reservations: Reserved) -> list[bool]:
        """Renew leases with the configured length and return an answer for each, in order.

        `False`: the reservation is no longer held by this process.
        """
        require_reserved("renew", reservations)
        asked_at = self._leases.now()
        answers = await self._store.renew(reservations, self.config.lease)
        self._batch_leases.renewed(compress(reservations, answers), asked_at)
        return answers

    async def complete(self, reserved: Reserved, result: object = None, *, ttl: Duration | None = None) -> bool:
        """Record that the work is done.  `False`: the reservation is no longer held by this process.

        Raises:
            ApplicationError: The result cannot be stored; see `completion`.
        """
        self._check_use()
        require_reserved("complete", [reserved])
        completion = self.completion(reserved, result, ttl)
        self._batch_leases.forget([reserved])
        return await self._store_client.complete(completion)

    async def complete_many(self, completions: Sequence[Completion]) -> list[bool]:
        """Complete many reservations in one round trip and return an answer for each, in order; see `completion`."""
        for ttl in {each.ttl for each in completions}:
            self.checked_ttl(ttl)
        self._batch_leases.forget(each.reservation for each in completions)
        return await self._store.complete(completions)

    async def fail(self, reserved: Reserved, error: str, *, ttl: Duration | None = None) -> bool:
        """Record that the work is given up.  `False`: the reservation is no longer held by this process.

        `error`: shortened to one line of at most 1024 characters, with the credentials in URLs hidden.
        """
        self._check_use()
        require_reserved("fail", [reserved])
        kept_for = None if ttl is None else self.checked_ttl(ttl)
        self._batch_leases.forget([reserved])
        return await self._store_client.fail(self._store_client.failure(reserved, shorten_error(error), kept_for))

    async def release(self, *reservations: Reserved) -> list[bool]:
        """Release reservations in one round trip; their attempts stay counted.  Return an answer for each, in order."""
        self._check_use()
        require_reserved("release", reservations)
        self._batch_leases.forget(reservations)
        return await self._store_client.release_together(reservations)

    async def get(self, key: str | Key) -> IdempotencyRecord | None:
        """Return the record of `key`, or `None`."""
        return (await self._store.get([self.space.full(self.space.key(key))]))[0]

    async def history(self, key: str | Key) -> dict[int, IdempotencyRecord]:
        """Return the records of `key` by generation, with one for each replay that the store still has.

        Raises:
            CorruptRecordError: A record cannot be read.
        """
        return await self.history_of(self.space.full(self.space.key(key).in_generation(0)))

    async def history_of(self, record_key: str) -> dict[int, IdempotencyRecord]:
        """Return the records by generation for the full key of the first generation, as found in dead letters.

        This reads all possible generations, because earlier ones may have expired: a thousand small reads, so use it
        in tools and not for each event.
        """
        generations = range(LAST_GENERATION + 1)
        names = [generation_key(record_key, generation) for generation in generations]
        found = zip(generations, await self._store.get(names), strict=True)
        return {generation: record for generation, record in found if record is not None}

    async def delete(self, key: str | Key) -> bool:
        """Delete the record of `key` in any state, and those of its steps: the next caller runs all of it again.

        Not in other processes or other managers of this one that completed it, while it is in their local memory.
        """
        record_key = self.space.full(self.space.key(key))
        await delete_steps(self.space, self._delete, [record_key])
        return await self._delete([record_key]) == 1

    async def _delete(self, record_keys: Sequence[str]) -> int:
        store = self._store
        try:
            return await store.delete(record_keys)
        finally:  # an unanswered call may have deleted them
            if self.executor.cache is not None:
                self.executor.cache.forget(record_keys)

    async def count_active(self) -> int:
        """Return how many keys of this scope are currently leased."""
        return await self._store.count_active(self.space.root)

    # Batches: reserve many keys together, and settle them individually.

    async def acquire_batch(
        self, keys: Iterable[K], *, fingerprint: Callable[[K], bytes | BaseEvent | None] | None = None
    ) -> dict[K, Verdict]:
        """Reserve many keys in one round trip.  Repeated keys, and keys of the same record, are reserved once.

        The leases are not renewed automatically: settle within `processing_timeout_seconds`, or call `renew` before.
        Call `may_start` immediately before you do the work of each key.

        Args:
            keys: The keys; the verdicts are returned in the same order.
            fingerprint: Returns the payload of a key, as for `run`.

        Returns:
            The verdict for each key.  Do the work of those that are `Reserved`, and pass the reservation to
            `confirm_batch` or `release_batch`.  `InProgress` means that another worker is doing the work, with unknown
            outcome: do not acknowledge it.  The verdict of an unreadable record is `Corrupt`.

        Raises:
            StoreError: The store did not answer.  Keys that were reserved nevertheless are free after their lease.
            ApplicationError: `keys` is a single key.
        """
        refuse_single_key("acquire_batch", keys)
        self._store_client.home.check()
        unique = list(dict.fromkeys(keys))
        works = [
            Work(self.space.key(key), given_fingerprint(fingerprint(key)) if fingerprint else None) for key in unique
        ]
        requests = list(map(self._store_client.request, works))
        # A string and a resolved key may have the same record; with different payloads, one of them is refused.
        records = [(request.key, request.fingerprint) for request in requests]
        distinct = dict(zip(records, requests, strict=True))
        asked_at = self.executor.now()
        answers = await self._store_client.reserve_together(list(distinct.values()))
        self._batch_leases.add((verdict for verdict in answers if isinstance(verdict, Reserved)), asked_at)
        verdicts = dict(zip(distinct, answers, strict=True))
        return {key: verdicts[record] for key, record in zip(unique, records, strict=True)}

    async def may_start(self, reserved: Reserved) -> bool:
        """Whether you may do the work of `reserved`, returned by `acquire_batch`.  Call it immediately before the work.

        It needs no round trip while enough of the lease is left.  Otherwise it renews all reservations of the batch
        that are short of time in one call, which does not count as an attempt.

        Returns:
            `False`: the reservation is no longer held by this process.  Do not do the work, and do not pass the
            reservation to `confirm_batch`.  To find out what became of it, acquire its key again.  It is released, and
            the answer is `False`, if three renewals in a row take so long that too little of the lease is left.

        Raises:
            StoreError: The store did not answer.  Do not do the work.
        """
        self._store_client.home.check()
        require_reserved("may_start", [reserved])
        renewals = 0
        while not self._batch_leases.may_start(reserved, self._leases.now()):
            self.observer.count(Signal.STALE_START_PREVENTED)
            if renewals == MOST_LATE_RENEWALS:
                await self.release(reserved)  # otherwise it would lapse, and count as a crash
                return False
            renewals += 1
            if not await self._renew_late(reserved):
                return False
        return True

    async def _renew_late(self, reserved: Reserved) -> bool:
        """Renew all late leases of the batch; return whether `reserved` is still held by this process."""
        asked_at = self._leases.now()
        late = self._batch_leases.late_beside(reserved, asked_at)
        answers = await self._store.renew(late, self.config.lease)
        lost = set(compress(late, map(not_, answers)))
        self._batch_leases.forget(lost)
        self._batch_leases.renewed((each for each in late if each not in lost), asked_at)
        return reserved not in lost

    async def confirm_batch(
        self, done: Iterable[Reserved] | Mapping[Reserved, object], *, ttl: Duration | None = None
    ) -> list[bool]:
        """Record in one round trip that work is done.  Return an answer for each reservation, in their order.

        A reservation that is listed twice is recorded once, and has the same answer in both places.

        `False`: the reservation is no longer held by this process.

        Args:
            done: Any of the acquired reservations; or a mapping from reservations to their results.
            ttl: How long the outcomes are kept; as configured if `None`.

        Raises:
            StoreError: The store did not answer.  You may confirm again.
            ApplicationError: A result cannot be stored, see `completion`; nothing is confirmed.
        """
        self._check_use()
        reservations = reservations_of("confirm_batch", "complete", done)
        results: Mapping[Reserved, object] = done if isinstance(done, Mapping) else dict.fromkeys(reservations)
        completions = [self.completion(reserved, result, ttl) for reserved, result in results.items()]
        written = dict(zip(results, await self._store_client.complete_together(completions), strict=True))
        self._batch_leases.forget(results)
        return [written[reserved] for reserved in reservations]

    async def release_batch(self, rest: Iterable[Reserved]) -> list[bool]:
        """Release reservations in one round trip without doing their work; the attempts stay counted.

        Returns an answer for each, in order; the same for a reservation that is listed twice.  `False`: the reservation
        is no longer held by this process.

        Raises:
            StoreError: The store did not answer.  Keys that were not released are free after their lease.
        """
        reservations = reservations_of("release_batch", "release", rest)
        unique = list(dict.fromkeys(reservations))
        released = dict(zip(unique, await self.release(*unique), strict=True))
        return [released[reserved] for reserved in reservations]

    def completion(self, reserved: Reserved, result: object = None, ttl: Duration | None = None) -> Completion:
        """Make an argument for `complete_many`.  A result that is too large or not serializable is dropped and counted.

        Raises:
            ApplicationError: The result is an iterator or a file, or contains an iterator, which storing would consume;
                or `ttl` is shorter than the lease.
        """
        self._store_client.home.check()
        require_reserved("completion", [reserved])
        refuse_iterator(result, reserved.key)
        kept_for = None if ttl is None else self.checked_ttl(ttl)
        return self._store_client.completion(reserved, result, kept_for)

    # Running work once.

    def attempt(self) -> Attempt:
        """Return the current attempt: its number, its fence, and keys for downstream calls.

        Use it in code that does not receive the attempt: decorated functions, endpoints, FastStream handlers.

        Raises:
            ApplicationError: The calling code is not part of a run of this manager.  This includes FastStream handlers
                of a batch, which belong to several runs.
        """
        return self._current_run()[1].attempt

    def steps(self) -> Steps:
        """Return the steps of the current run: parts of its work that a later run does not repeat.

        Raises:
            ApplicationError: The calling code is not part of a run of this manager.
        """
        manager, run = self._current_run()
        if run.lease is None and not run.commits_itself:
            return UnrecordedSteps()  # as the run, which a policy allowed without a record
        if run.steps is None:
            run.steps = Steps(manager.space, manager.executor, manager.measured_repository, run)
        assert isinstance(run.steps, Steps)
        return run.steps

    def _current_run(self) -> tuple[IdempotencyManager, ActiveRun]:
        """Return the current run and its manager: this one, or the same manager in another scope."""
        for manager in self._by_scope.values():
            if (run := manager.executor.runs.current()) is not None:
                return manager, run
        raise ApplicationError(
            f"no work of the manager of {self.scope} is running here: call this within manager.run(…), or within a "
            "guarded function, endpoint or handler"
        )

    def in_transaction(self, held: Any) -> AbstractAsyncContextManager[None]:
        """Make `run` reserve and complete in the transaction of `held`, so that it commits together with your writes.

            async with session.begin(), manager.in_transaction(session):
                receipt = await manager.run(f"refund:{order_id}", refund)

        You control the transaction: if it is rolled back, nothing was reserved or done.  The store must be in the same
        SQL database.  If the database aborts the transaction (`TransactionAbortedError`), start a new one.

        Args:
            held: SQLAlchemy's `AsyncSession` or `AsyncConnection`.

        Raises:
            ApplicationError: The store is not in a SQL database.
        """
        if self._joining is None:
            raise ApplicationError(f"{type(self.repository).__name__} cannot join a transaction: use a SQL store")
        return InTransaction(self, self._joining, held)

    async def run(
        self,
        key: str | Key,
        function: Callable[[], Awaitable[T]],
        *,
        fingerprint: bytes | BaseEvent | None = None,
        ttl: Duration | None = None,
        on_in_progress: OnInProgress | Literal["wait", "raise", "skip"] | None = None,
        wait_timeout: Duration | None = None,
        on_failure: OnFailure | Literal["retry", "block"] | None = None,
        reconcile: Callable[[], Awaitable[Answer]] | None = None,
    ) -> T:
        """Run the work of `key` once; every other caller gets the result of the first run.

        Args:
            key: Identifies the work within the scope; compared byte for byte.
            function: Async function that does the work.  A replayed result has the type of its return annotation.
            fingerprint: The payload, which must be the same in a later use of the key: an event, or 16 bytes.  Events
                are compared if their classes have the same fields, and bytes always.
            ttl: How long the outcome is kept, by the store's clock: a `timedelta`, or seconds.
            on_in_progress: What to do while another caller runs the work; as configured if `None`.
                `skip` returns `None`: the outcome is unknown.
            wait_timeout: How long to wait for a concurrent duplicate; as configured if `None`.
            on_failure: What a failed run means for the next caller; as configured if `None`.
            reconcile: Async function that finds out whether an earlier attempt has had its effect.  It is asked before
                each run that may repeat the effect; see `integr8s_idem.reconciliation`.

        Raises:
            InProgressError: Another caller runs the work, and the policy is not to wait; after a wait that took too
                long, `IdempotencyConflictError`.
            ApplicationError: The call is made from within the run of the same key, which would wait for itself; or
                `function` is not callable, or does not return an awaitable; or `reconcile` is given in a transaction.
            OutcomeUnknownError: `reconcile` answered `Unknown`; the key is free, or FAILED after the last attempt.
            KeyReusedError: The key was used with another payload.
            PreviouslyFailedError: An earlier run was given up.
            LeaseLostError: The lease expired during the run; its side effects may have happened.
            ResultDroppedError: The work is done, but its result was too large to store.
            ResultDecodeError: The work is done, but its result does not match the return annotation.
            StoreError: The store did not answer; nothing was done, except with `ResultNotStoredError`.
            Exception: Any error of `function`, unchanged.
            BaseException: As well, such as `SystemExit`; but then no outcome is recorded, and the key stays reserved
                until the lease ends, as after a crash.
        """
        check_function(function, "manager.run(key, function)")
        longest_wait = None if wait_timeout is None else duration(wait_timeout, "wait_timeout")
        checked_ttl = None if ttl is None else self.checked_ttl(ttl)
        block = None if on_failure is None else chosen(OnFailure, on_failure, "on_failure")
        wait = None if on_in_progress is None else chosen(OnInProgress, on_in_progress, "on_in_progress")
        work_key = self._store_client.space.key(key)
        payload = None if fingerprint is None else given_fingerprint(fingerprint)
        if self.executor.cache is not None and (known := self.executor.known_here(work_key, payload)) is not None:
            return replayed_value(work_key.label, known, function)  # type: ignore[no-any-return]
        work = Work(work_key, payload, checked_ttl, on_failure=block)

        def without_attempt(_: Attempt) -> Awaitable[T]:
            running = function()
            if type(running) is not CoroutineType and not inspect.isawaitable(running):
                raise not_awaitable(work, function, running)
            return running

        question: Question | None = None
        if reconcile is not None:
            refuse_call(reconcile, "manager.run(key, function, reconcile=find)")
            question = partial(_asked, reconcile)
        # As `result_of`; another coroutine would take as long as a verdict.
        one_pass = self._one_pass(work, without_attempt, function, question)
        outcome = await one_pass()
        if type(outcome) not in _SETTLED and isinstance(outcome, Pending):
            outcome = await self.settled(work, outcome, one_pass, on_in_progress=wait, wait_timeout=longest_wait)
        return self._value_of(outcome, work, function)

    def run_work(
        self,
        work: Work,
        function: Callable[[Attempt], Awaitable[T]],
        *,
        returns: Callable[..., object] | None,
        on_in_progress: OnInProgress | None = None,
        wait_timeout: timedelta | None = None,
        question: Question | None = None,
    ) -> Coroutine[Any, Any, T]:
        """Run a function that receives its `Attempt`.  Replayed results have the return type of `returns`.

        `question`: calls its reconcile function.

        Raises:
            ApplicationError: There is a reconcile function, and the work is done in a transaction of the caller.
        """
        one_pass = self._one_pass(work, function, returns, question)
        return self.result_of(work, one_pass, returns, on_in_progress=on_in_progress, wait_timeout=wait_timeout)

    def _one_pass(
        self,
        work: Work,
        function: Callable[[Attempt], Awaitable[T]],
        returns: Callable[..., object] | None,
        question: Question | None,
    ) -> Callable[[], Awaitable[Outcome[T]]]:
        """Return a function that executes `work` once, in the transaction of the caller if there is one."""
        work.returns = returns
        joined = JOINED.get()
        if joined is not None and joined[0] is self:
            if question is not None:
                raise never_unknown(work)
            return partial(self.executor.execute_joined, joined[1], work, function)
        if question is not None:
            function = reconciled(function, question, self.observer, work.key.label)
        return partial(self.executor.execute, work, function)

    async def result_of(
        self,
        work: Work,
        one_pass: Callable[[], Awaitable[Outcome[T]]],
        returns: Callable[..., object] | None,
        *,
        on_in_progress: OnInProgress | None = None,
        wait_timeout: timedelta | None = None,
    ) -> T:
        """Call `one_pass` until the work is settled, and return its value.  Raises the errors of `run`."""
        outcome = await one_pass()
        if type(outcome) not in _SETTLED and isinstance(outcome, Pending):
            outcome = await self.settled(
                work, outcome, one_pass, on_in_progress=on_in_progress, wait_timeout=wait_timeout
            )
        return self._value_of(outcome, work, returns)

    def settled(
        self,
        work: Work,
        found: Pending,
        one_pass: Callable[[], Awaitable[Outcome[T]]],
        *,
        on_in_progress: OnInProgress | None = None,
        wait_timeout: timedelta | None = None,
    ) -> Coroutine[Any, Any, Outcome[T]]:
        """Wait for the outcome of work that was `found` in progress.  See `Executor.settled`.

        Args:
            on_in_progress, wait_timeout: As configured if `None`.
        """
        return self.executor.settled(
            work,
            found,
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
        """Make one attempt at `work` and return its outcome, for code that settles deliveries."""
        return await self.executor.execute(work, function, RunOptions(wait_for_store))

    async def close(self) -> None:
        """Wait for pending writes, and stop renewing leases; also of the managers that `in_scope` made for this one.

        Writes that are pending in another event loop are waited for while that loop runs.  In a child of the process
        that used it, this does nothing: the writes and the leases belong to the parent.
        """
        if self._store_client.home.is_forked:
            return
        for sibling in tuple(self._made):  # more of them may be requested meanwhile
            await sibling.close()
        loop, client = self.executor.loop, self._store_client
        if loop is not None and loop is not asyncio.get_running_loop() and client.busy:
            await finish_in(loop, client.close)
            if not loop.is_running():
                self.executor.leave_loop()
        await client.close()
        self._leases.close()

    def _value_of(self, outcome: Outcome[T], work: Work, function: Callable[..., object] | None) -> T:
        if type(outcome) is Executed:
            return outcome.value
        if type(outcome) is Completed:
            return replayed_value(work.key.label, outcome, function)  # type: ignore[no-any-return]
        if isinstance(outcome, Pending):
            return None  # type: ignore[return-value]  # the policy is `skip`
        error = error_of(work.key.label, outcome)
        assert error is not None, "the work is not done"
        raise error


async def _asked(reconcile: Callable[[], Awaitable[Answer]], _: Attempt) -> Answer:
    return await awaitable_answer(reconcile, reconcile())


def replayed_value(label: str, completed: Completed, function: Callable[..., object] | None) -> Any:
    """Return the result of the first run of `function`; `None` if results are not stored, or the run was only observed.

    Raises:
        DiscardedError: A rule has discarded the work, which has no result.
        ResultDroppedError: The result was too large to store.
        ResultDecodeError: The result does not match the return annotation of `function`.
    """
    stored = completed.result
    if stored is not None and stored.content_type != JSON:
        if (discarded := discarded_error(stored)) is not None:
            raise DiscardedError(label, completed.attempt, discarded)
        if observed_place(stored) is not None:
            stored = None
    if stored is not None:
        return decode_result(label, stored, return_type_of(function))
    if completed.result_dropped:
        raise ResultDroppedError(label)
    return None
