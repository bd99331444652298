"""Run handlers, guarded or not.

A run consists of these steps: the handler returns, its scope is closed (which commits business data), its outgoing
events are published, and the record is completed.  Then the offset may be committed.

In a transactional run, the handler returns, its outgoing events and its completed record are written in its
transaction, and its scope commits the transaction.  Then the offset may be committed.  A relay publishes the events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from datetime import timedelta
from types import CoroutineType
from typing import Any, Final

from integr8s_idem._util.first_step import as_coroutine, rest
from integr8s_idem.config import OnFailure, OnInProgress
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.active_runs import run_of
from integr8s_idem.engine.error_text import describe_error
from integr8s_idem.engine.failure_policy import FailurePolicy
from integr8s_idem.engine.iterators import PLAIN_CLASSES
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.results import repeatable
from integr8s_idem.engine.run import Run, RunOptions
from integr8s_idem.engine.transactions import OutcomeWriter
from integr8s_idem.engine.work import (
    Attempt,
    Discarded,
    Executed,
    HandlerFailed,
    Isolation,
    Outcome,
    Transaction,
    WaitForStore,
    Work,
)
from integr8s_idem.errors import (
    ApplicationError,
    HandlerCancelledError,
    HandlerExitError,
    HandlerTimeoutError,
    PublishError,
)
from integr8s_idem.events import BaseEvent, Message
from integr8s_idem.failures import FailureAction
from integr8s_idem.handlers.batch_collector import BatchCollector, Member
from integr8s_idem.handlers.handler_calls import (
    Batch,
    BatchCall,
    BatchSize,
    FieldLimit,
    HandlerCall,
    HandlerFunction,
    RegisteredHandler,
    async_function,
    call_with_event,
    name_of,
    returned_by,
)
from integr8s_idem.handlers.outgoing import MessageMaker, Outgoing, Publisher
from integr8s_idem.handlers.router import Invoke
from integr8s_idem.keys import Key, KeySpace
from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.records import Completed
from integr8s_idem.stores.outbox import OutboxStore
from integr8s_idem.telemetry import SILENT, Observer, Phase, Signal
from integr8s_idem.telemetry.log_fields import logging_as

# Read once, because a member of an enumeration takes as long to read as two calls before Python 3.12.
_HANDLED: Final = Signal.HANDLED
_PENDING: Final = Isolation.PENDING
_HANDLE: Final = Phase.HANDLE

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""Minimum and maximum seconds between attempts to publish the events of a handler."""


class HandlerExecution:
    """All attempts of one handler at one event.

    This class is unguarded and counts attempts in memory.
    """

    __slots__ = ("_failed_together", "_tries", "event", "generation", "handler", "own_cancellations")

    def __init__(self, handler: EventHandler, event: BaseEvent, generation: int = 0) -> None:
        """`generation` is the number of replays of the event."""
        self.handler = handler
        self.event = event
        self.generation = generation
        self.own_cancellations = 0
        self._tries = 0
        self._failed_together = False

    @property
    def on_in_progress(self) -> OnInProgress:
        """What to do while another run is in progress."""
        return OnInProgress.WAIT

    @property
    def label(self) -> str:
        """Readable name: type and id of the event, or its key."""
        return f"{self.event.event_type}:{self.event.event_id}"

    @property
    def record_key(self) -> str:
        """The full key of its record in the first generation; empty if it is unguarded."""
        return ""

    def log_fields(self) -> Mapping[str, object]:
        """Return the fields of log records about it."""
        return {
            "service": self.handler.scope,
            "event_id": self.event.event_id,
            "event_type": self.event.event_type,
            "handler": self.handler.name,
            # Guarded attempts are known by their run.
            "attempt": self._unguarded_attempt() or None,
            "record_key": self.record_key,
        }

    def note_own_cancellation(self) -> int:
        """Note that its handler has cancelled its own task, which is a failure; return how many times it has."""
        self.own_cancellations += 1
        return self.own_cancellations

    def refuse_if_given_up(self, number: int) -> None:
        """Raise an error, which ends the attempts, if the handler has cancelled its own task and may not run again.

        A run that is cancelled releases its key.  Only the next attempt can record that the work has failed.
        """
        if number > self.handler.max_attempts or self._blocks_on_failure():
            raise HandlerCancelledError(self.handler.name, own_task=True)

    def _blocks_on_failure(self) -> bool:
        """Whether the first failure is final."""
        return False

    def _unguarded_attempt(self) -> int:
        """Return the number of the last attempt without a reservation; 0 if there was none."""
        return self._tries

    async def attempt(self, *, wait_for_store: WaitForStore | None = None) -> Outcome[Any]:
        """Make an attempt, with the arguments and errors of `IdempotencyManager.execute`.

        With `wait_for_store`, it also waits for the broker to accept the handler's events.
        """
        self._tries += 1
        handler = self.handler
        key = handler.plain_key(self.event, self.generation)
        attempt = Attempt(key, self._tries, 0, float("inf"), self.label, self.generation)
        try:
            with handler.observer.phase(_HANDLE, self.event.event_type, attempt=self._tries, handler=handler.name):
                value = await handler.work(self, attempt, patient=wait_for_store is not None)
        except Exception as error:  # noqa: BLE001  # returned as the outcome
            return self._failed(error)
        return Executed(value, self._tries)

    def _failed(self, error: Exception) -> HandlerFailed | Discarded:
        handler, tries = self.handler, self._tries
        handler.observer.count(Signal.HANDLER_FAILED, self.event.event_type)
        together, self._failed_together = self._failed_together, False
        rule = handler.failures.decide(error, together=together, max_attempts=handler.max_attempts)
        if rule is None:
            return HandlerFailed(error, tries, tries >= handler.max_attempts)
        if rule.action is FailureAction.DISCARD:
            return Discarded(error, tries)
        return HandlerFailed(error, tries, rule.is_last(tries, handler.max_attempts), rule)

    def note_failed_together(self) -> None:
        """Note that the attempt fails in a batch with others, only one of which may be the cause."""
        self._failed_together = True

    def release_unstarted(self) -> None:
        """Release a reservation that the next attempt would use, since that is not made."""

    async def attempt_or_suspect(self, *, wait_for_store: WaitForStore) -> Outcome[Any] | Run:
        """Make an attempt like `attempt`, or return a reserved suspect if `isolate` was called."""
        return await self.attempt(wait_for_store=wait_for_store)


class GuardedExecution(HandlerExecution):
    """A guarded execution.  The key is computed once, before the handler can modify the event."""

    __slots__ = ("executor", "work")
    handler: IdempotentEventHandler

    def __init__(self, handler: IdempotentEventHandler, event: BaseEvent, generation: int = 0) -> None:
        self.handler = handler
        self.event = event
        self.generation = generation
        self.own_cancellations = 0
        keyed = handler.resolver.resolve(handler.name, event, generation)
        self.work = Work(
            keyed.key.hidden() if handler.hides_keys else keyed.key,
            keyed.fingerprint,
            handler.ttl,
            event.event_type,
            returns=handler.returns,
            handler=handler.name,
            failures=handler.failures,
        )
        self.executor = handler.manager.executor

    @property
    def on_in_progress(self) -> OnInProgress:
        return self.handler.manager.config.on_in_progress

    @property
    def label(self) -> str:
        return self.work.key.label

    @property
    def record_key(self) -> str:
        return self.handler.manager.space.full(self.work.key.in_generation(0))

    def _unguarded_attempt(self) -> int:
        work = self.work
        return max(work.unguarded_runs, work.failed_runs) if work.unguarded_runs else 0

    def _blocks_on_failure(self) -> bool:
        return self.handler.manager.config.on_failure is OnFailure.BLOCK

    def note_failed_together(self) -> None:
        self.work.failed_together = True

    def isolate(self) -> None:
        """Return the event as a suspect instead of running it, if it may have crashed its process."""
        if self.handler.max_attempts > 1:  # otherwise it is not retried after any crash
            self.work.isolation = _PENDING

    def run_isolated(
        self, suspect: Run, *, alone: bool, wait_for_store: WaitForStore
    ) -> Coroutine[Any, Any, Outcome[Any] | Run]:
        """Make an attempt of a suspect, either alone, which is noted in its record, or concurrently with others."""
        self.work.isolation = Isolation.ALONE if alone else Isolation.WAIVED
        suspect.reserve_again()
        return self.attempt_or_suspect(wait_for_store=wait_for_store)

    def release_unstarted(self) -> None:
        self.executor.release_unstarted(self.work)

    def no_longer_alone(self) -> None:
        """Note in its record, without waiting, that other handlers may run concurrently."""
        self.executor.no_longer_alone(self.work)

    async def attempt(self, *, wait_for_store: WaitForStore | None = None) -> Outcome[Any]:
        outcome = await self._attempt(wait_for_store)
        assert not isinstance(outcome, Run), "`isolate` was not called"
        return outcome

    async def attempt_or_suspect(self, *, wait_for_store: WaitForStore) -> Outcome[Any] | Run:
        return await self._attempt(wait_for_store)

    async def _attempt(self, wait_for_store: WaitForStore | None) -> Outcome[Any] | Run:
        if self.handler.outbox is not None:
            async with self.handler.outbox.turn():
                return await self.executor.execute_writing(self.work, self._with_writer, wait_for_store)
        function = self.call if wait_for_store is None else self.call_patiently
        return await self.executor.execute_or_suspect(self.work, function, RunOptions(wait_for_store))

    def known_here(self) -> Completed | None:
        """Return its completed record if the local cache contains it, so that the store need not be asked."""
        work = self.work
        return self.executor.known_here(work.key, work.fingerprint, work.event_type)

    def call(self, attempt: Attempt) -> Coroutine[Any, Any, Any]:
        """Run the handler; raise an error if the broker does not accept its events."""
        return self.handler.work(self, attempt)

    def call_patiently(self, attempt: Attempt) -> Coroutine[Any, Any, Any]:
        """Run the handler, and retry until the broker accepts its events."""
        return self.handler.work(self, attempt, patient=True)

    async def _with_writer(self, attempt: Attempt, writer: OutcomeWriter) -> Any:
        if self.own_cancellations:
            self.refuse_if_given_up(attempt.number)
        return await self.handler.work_with_writer(self.event, attempt, writer)

    async def run(self) -> Any:
        """Return the new or stored result, like `IdempotencyManager.run`; wait for a concurrent duplicate."""
        if self.handler.outbox is not None:
            return await self.handler.manager.result_of(self.work, self.attempt, self.handler.returns)
        return await self.handler.manager.run_work(self.work, self.call, returns=self.handler.returns)


class EventHandler:
    """A handler with everything it needs to run.  Calling it makes one unguarded attempt."""

    def __init__(
        self,
        function: HandlerFunction,
        *,
        name: str | None = None,
        event: type[BaseEvent] = BaseEvent,
        scope: str = "",
        invoke: Invoke = call_with_event,
        publisher: Publisher | None = None,
        observer: Observer = SILENT,
        timeout: Duration | None = None,
        max_attempts: int = 5,
        batch: BatchSize | None = None,
        failures: FailurePolicy | None = None,
        limit: FieldLimit | None = None,
    ) -> None:
        self.function = async_function(function)
        self.name = name_of(function, name)
        self.scope = scope
        self.observer = observer
        self.max_attempts = max_attempts
        self.failures = failures or FailurePolicy()
        self.limit = limit
        self._registered = RegisteredHandler(event, self.name, function, batch)
        self.returns = self._registered.returns
        """Function whose return annotation is the type of a result."""
        self._collector = BatchCollector(batch, self._call_batch, self.name) if batch is not None else None
        self.invoke = invoke
        self._publisher = publisher
        self._timeout = duration(timeout, "timeout")

    @property
    def event_type(self) -> str:
        """Type of the events that it handles."""
        return self._registered.event_type

    def execution(self, event: BaseEvent, generation: int = 0) -> HandlerExecution:
        """Return an execution of `event`; `generation` is the number of its replays."""
        return HandlerExecution(self, event, generation)

    async def __call__(self, event: BaseEvent) -> Any:
        execution = self.execution(event)
        with logging_as(execution):
            outcome = await execution.attempt()
        if isinstance(outcome, HandlerFailed):
            raise outcome.error
        assert isinstance(outcome, Executed)
        return outcome.value

    def plain_key(self, event: BaseEvent, generation: int = 0) -> str:
        """Return a key made of the event's id, from which ids of outgoing events are derived."""
        key = Key.of_event(self.name, event.event_type, "id", event.event_id)
        return KeySpace("plain", self.scope or "-").full(key.in_generation(generation))

    async def work(self, execution: HandlerExecution, attempt: Attempt, *, patient: bool = False) -> Any:
        """Run the handler, close its scope, and publish its outgoing events."""
        if execution.own_cancellations:
            execution.refuse_if_given_up(attempt.number)
        event, outgoing = execution.event, Outgoing()
        if self._collector is not None:
            member = Member(event, attempt, outgoing, run_of(attempt), execution.note_failed_together)
            result = await self._collector.join(member)
        else:
            call = HandlerCall(event, attempt, outgoing)
            result = await (self._invoke(call) if self._timeout is None else self._invoke_for(call, self._timeout))
        if outgoing.events:
            await self._publish(outgoing.finished(event, attempt.key, self.scope), patient)
        self.observer.count(_HANDLED, event.event_type)
        return result

    async def _call_batch(self, members: Sequence[Member]) -> Any:
        batch = Batch([member.attempt for member in members], [member.outgoing for member in members])
        call = BatchCall([member.event for member in members], batch, [member.run for member in members])
        with self.observer.batch(self.event_type, [member.context for member in members], self.name):
            return await self.call(call)

    def call(self, call: HandlerCall | BatchCall) -> Coroutine[Any, Any, Any]:
        """Call the function of the handler, for at most its timeout, without publishing its events."""
        return self._invoke(call) if self._timeout is None else self._invoke_for(call, self._timeout)

    async def _invoke_for(self, call: HandlerCall | BatchCall, longest: timedelta) -> Any:
        try:
            async with asyncio.timeout(longest.total_seconds()) as limit:
                return await self._invoke(call)
        except TimeoutError as error:
            if limit.expired():
                raise HandlerTimeoutError(self.name, longest) from error
            raise

    async def _invoke(self, call: HandlerCall | BatchCall) -> Any:
        invoked = self.invoke(self._registered, call)
        running = invoked if type(invoked) is CoroutineType else as_coroutine(invoked)
        task, before = None, 0
        try:
            try:
                waiting_for = running.send(None)
            except StopIteration as end:
                result = end.value
            else:
                # Nobody can cancel the handler before it waits, and the lookup takes as long as ten function calls.
                task = asyncio.current_task()
                before = task.cancelling() if task is not None else 0
                result = await rest(running, waiting_for)
            return result if type(result) in PLAIN_CLASSES else returned_by(self._registered, result)
        except asyncio.CancelledError as error:
            if task is not None and task.cancelling() > before:
                raise
            # The handler raised it, nobody cancelled this task: it must not end the caller.
            raise HandlerCancelledError(self.name) from error
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            if _is_close(error):
                raise
            # It would end the process with all of its services, or this service.
            raised = "" if isinstance(error, SystemExit) else describe_error(error)
            raise HandlerExitError(self.name, raised) from error

    async def _publish(self, events: Sequence[BaseEvent], patient: bool) -> None:
        if self._publisher is None:
            raise ApplicationError(
                f"handler {self.name} publishes events, but has no publisher: pass publisher= to the dispatcher"
            )
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._publisher.publish(*events)
            except PublishError:
                # The handler has succeeded, and another run would repeat its side effects.  Retries end with the lease,
                # or when the worker stops.
                if not patient:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)


def _is_close(error: BaseException) -> bool:
    """Whether `error` closes the coroutine that has caught it: then no function called by it has raised the error."""
    trace = error.__traceback__
    return isinstance(error, GeneratorExit) and trace is not None and trace.tb_next is None


class IdempotentEventHandler(EventHandler):
    """A guarded handler.  Calling it returns the new or stored result."""

    def __init__(
        self,
        function: HandlerFunction,
        manager: IdempotencyManager,
        *,
        resolver: KeyResolver | None = None,
        ttl: Duration | None = None,
        name: str | None = None,
        event: type[BaseEvent] = BaseEvent,
        invoke: Invoke = call_with_event,
        publisher: Publisher | None = None,
        timeout: Duration | None = None,
        outbox: OutboxStore | None = None,
        batch: BatchSize | None = None,
        failures: FailurePolicy | None = None,
        limit: FieldLimit | None = None,
    ) -> None:
        """Create a guarded handler.

        Args:
            resolver: Creates the keys; by default, from the event id.
            ttl: How long records are kept.
            outbox: Makes the handler transactional: `invoke` opens a transaction for the handler's writes, its events
                and its outcome.
            failures: Decides what happens after a failed attempt; by default, with `DEFAULT_RULES` only.
            limit: How many of its events a worker handles at a time.

        Raises:
            ApplicationError: The handler takes batches and has an outbox, but a transaction belongs to one event.
        """
        super().__init__(
            function,
            name=name,
            event=event,
            scope=manager.scope,
            invoke=invoke,
            publisher=publisher,
            observer=manager.observer,
            timeout=timeout,
            max_attempts=manager.config.max_attempts,
            batch=batch,
            failures=failures,
            limit=limit,
        )
        if batch is not None and outbox is not None:
            raise ApplicationError(
                f"batch handler {self.name} cannot be transactional, because its events are settled individually. "
                "Remove transaction=…, or handle single events"
            )
        self.manager = manager
        self.resolver = resolver or KeyResolver()
        self.hides_keys = manager.space.hash_keys
        self.ttl = None if ttl is None else manager.checked_ttl(ttl)
        self.outbox = outbox

    async def work_with_writer(self, event: BaseEvent, attempt: Attempt, writer: OutcomeWriter) -> Any:
        """Run the handler in a transaction that also commits its outgoing events and its outcome."""
        outgoing = Outgoing()

        recorded: list[Any] = []

        async def before_commit(result: Any, transaction: Transaction) -> None:
            value = repeatable(result, attempt.label, self.returns)
            events = outgoing.finished(event, attempt.key, self.scope)
            await writer.write(value, [self._message(each) for each in events], transaction)
            recorded[:] = [value]

        result = await self.call(HandlerCall(event, attempt, outgoing, before_commit))
        self.observer.count(_HANDLED, event.event_type)
        # `invoke` may return an iterator, which was already read for the record.
        return recorded[0] if recorded else result

    def _message(self, event: BaseEvent) -> Message:
        if not isinstance(self._publisher, MessageMaker):
            raise ApplicationError(
                f"handler {self.name} publishes events, but has no publisher: pass publisher= to the dispatcher"
            )
        return self._publisher.message(event)

    def execution(self, event: BaseEvent, generation: int = 0) -> GuardedExecution:
        return GuardedExecution(self, event, generation)

    async def __call__(self, event: BaseEvent) -> Any:
        execution = self.execution(event)
        with logging_as(execution):
            return await execution.run()
