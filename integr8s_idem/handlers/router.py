"""Routers, on which a service registers its handlers, and the arguments of each call of a handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar, get_args, overload

from integr8s_idem._util.counts import is_count
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.errors import ApplicationError
from integr8s_idem.events import BaseEvent
from integr8s_idem.failures import FailureRule, checked_rules
from integr8s_idem.handlers.annotations import check_batch_parameter, check_event_parameter
from integr8s_idem.handlers.handler_calls import (
    BatchSize,
    FieldLimit,
    HandlerFunction,
    RegisteredHandler,
    async_function,
    check_reconcile_function,
    checked_name,
    name_of,
)
from integr8s_idem.reconciliation import ReconcileFunction

FunctionT = TypeVar("FunctionT", bound=HandlerFunction)
P = ParamSpec("P")
ResultT = TypeVar("ResultT", bound=Awaitable[Any])
A = TypeVar("A", bound=BaseEvent)
B = TypeVar("B", bound=BaseEvent)
C = TypeVar("C", bound=BaseEvent)
D = TypeVar("D", bound=BaseEvent)


Invoke = Callable[[RegisteredHandler, Any], Awaitable[Any]]
"""Calls a handler with its `HandlerCall`, or a batch handler with its `BatchCall`, and opens and closes its
dependencies.  It awaits `check_start()` of the call immediately before the handler: opening dependencies takes time,
and the lease may expire meanwhile.  `integrations.dishka` has one with a REQUEST scope."""


DelayedRetries: TypeAlias = Literal["block", "overtake"]
"""What happens to later events while one waits for a retry with a delay."""


def _overtakes(delayed_retries: DelayedRetries) -> bool:
    if delayed_retries not in get_args(DelayedRetries):
        raise ApplicationError(f"delayed_retries is {delayed_retries!r}, but must be 'block' or 'overtake'")
    return delayed_retries == "overtake"


def _is_event_class(candidate: object) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseEvent)


class EventRouter:
    """Collects the handlers of a service."""

    def __init__(self, *, failures: Iterable[FailureRule] = ()) -> None:
        """Create an empty router.

        Args:
            failures: Rules for errors of its handlers, after the handler's own; see `integr8s_idem.failures`.

        Raises:
            ApplicationError: `failures` contains something else.
        """
        self._handlers: list[RegisteredHandler] = []
        self._failures = checked_rules(failures)

    @overload
    def on(
        self,
        a: type[A],
        /,
        *,
        name: str | None = None,
        failures: Iterable[FailureRule] = (),
        limit_by: str | None = None,
        at_most: int | None = None,
        reconcile: ReconcileFunction | None = None,
        delayed_retries: DelayedRetries = ...,
    ) -> Callable[[Callable[Concatenate[A, P], ResultT]], Callable[Concatenate[A, P], ResultT]]: ...

    @overload
    def on(
        self,
        a: type[A],
        b: type[B],
        /,
        *,
        name: str | None = None,
        failures: Iterable[FailureRule] = (),
        limit_by: str | None = None,
        at_most: int | None = None,
        reconcile: ReconcileFunction | None = None,
        delayed_retries: DelayedRetries = ...,
    ) -> Callable[[Callable[Concatenate[A | B, P], ResultT]], Callable[Concatenate[A | B, P], ResultT]]: ...

    @overload
    def on(
        self,
        a: type[A],
        b: type[B],
        c: type[C],
        /,
        *,
        name: str | None = None,
        failures: Iterable[FailureRule] = (),
        limit_by: str | None = None,
        at_most: int | None = None,
        reconcile: ReconcileFunction | None = None,
        delayed_retries: DelayedRetries = ...,
    ) -> Callable[[Callable[Concatenate[A | B | C, P], ResultT]], Callable[Concatenate[A | B | C, P], ResultT]]: ...

    @overload
    def on(
        self,
        a: type[A],
        b: type[B],
        c: type[C],
        d: type[D],
        /,
        *,
        name: str | None = None,
        failures: Iterable[FailureRule] = (),
        limit_by: str | None = None,
        at_most: int | None = None,
        reconcile: ReconcileFunction | None = None,
        delayed_retries: DelayedRetries = ...,
    ) -> Callable[
        [Callable[Concatenate[A | B | C | D, P], ResultT]], Callable[Concatenate[A | B | C | D, P], ResultT]
    ]: ...

    @overload
    def on(
        self,
        *events: type[BaseEvent],
        name: str | None = None,
        failures: Iterable[FailureRule] = (),
        limit_by: str | None = None,
        at_most: int | None = None,
        reconcile: ReconcileFunction | None = None,
        delayed_retries: DelayedRetries = ...,
    ) -> Callable[[FunctionT], FunctionT]: ...

    def on(
        self,
        *events: type[BaseEvent],
        name: str | None = None,
        failures: Iterable[FailureRule] = (),
        limit_by: str | None = None,
        at_most: int | None = None,
        reconcile: ReconcileFunction | None = None,
        delayed_retries: DelayedRetries = "block",
    ) -> Callable[[FunctionT], FunctionT]:
        """Register a handler of `events`.

        The event is the handler's first parameter.  Its annotation, if there is one, is the class of the event, a base
        class, or a union that covers all of `events`; mypy checks this for up to four events.

        Args:
            name: Name of the handler in its keys; by default, the function's name.  With it, you can rename the
                function without changing its keys.
            failures: Rules for errors of the handler, before those of the router; see `integr8s_idem.failures`.
            limit_by: Name of a field of the events.  A worker handles at most `at_most` events with the same value of
                it at a time; the others wait, without a slot and without a lease.  Events whose value is `None` are
                not limited.
            at_most: That number, for this handler in each worker process.
            reconcile: Async function that finds out whether an earlier attempt has had its effect.  It takes the event
                and dependencies like the handler, and is asked before each run that may repeat the effect; see
                `integr8s_idem.reconciliation`.
            delayed_retries: What happens to later events while one waits for a retry with a delay (`retry_later`,
                `RetryAfter`).  With `block`, those of its lane wait.  With `overtake`, they are handled: the event
                waits in a retry topic of the service (`retry_topics`), and is handled after events that came later.

        Raises:
            ApplicationError: There is no event, an event has no type, another handler of an event has the same name,
                the first parameter is annotated with another type, or the name or the limit is invalid.
        """
        if not events:
            raise ApplicationError("router.on() requires at least one event class")
        for event in events:
            if not _is_event_class(event):
                raise ApplicationError(f"{event!r} is not an event class; write @router.on(OrderPlaced)")

        checked_name(name)
        rules, limit = checked_rules(failures), FieldLimit.of(limit_by, at_most, events)
        overtakes = _overtakes(delayed_retries)
        if reconcile is not None:
            check_reconcile_function(reconcile)
            check_event_parameter(reconcile, events, "reconcile function")

        def register(function: FunctionT) -> FunctionT:
            async_function(function)
            check_event_parameter(function, events)
            known_as = name_of(function, name)
            for event in events:
                self._add(
                    RegisteredHandler(
                        event,
                        known_as,
                        function,
                        failures=rules,
                        limit=limit,
                        reconcile=reconcile,
                        overtakes=overtakes,
                    )
                )
            return function

        return register

    def on_batch(
        self,
        event: type[BaseEvent],
        *,
        max_size: int = 100,
        max_wait: Duration = timedelta(milliseconds=20),
        name: str | None = None,
        failures: Iterable[FailureRule] = (),
        delayed_retries: DelayedRetries = "block",
    ) -> Callable[[FunctionT], FunctionT]:
        """Register a batch handler, which takes a list of events.

        Each event keeps its own key and is handled once.  The handler returns `None`, or a list with a result for each
        event.  It raises `PartialFailureError` if only some events have failed.  After any other error, all events have
        failed, and each is retried alone before a rule dead-letters or discards it.

        Args:
            max_size: Maximum events of a call.  A worker handles at most `concurrency` events at a time, and with the
                ordering `partition` only one of each partition: use `key` or `none` for batches.  A worker logs a
                warning at startup if its settings keep batches smaller.
            max_wait: How long the first event waits for others.
            name: Name of the handler in its keys; by default, the function's name.
            failures: Rules for errors of the handler, before those of the router; see `integr8s_idem.failures`.
            delayed_retries: What happens to later events while one waits for a retry with a delay (`retry_later`,
                `RetryAfter`).  With `block`, those of its lane wait.  With `overtake`, they are handled: the event
                waits in a retry topic of the service (`retry_topics`), and is handled after events that came later.

        Raises:
            ApplicationError: `event` is not an event class, `max_size` is not an integer of at least 1, another handler
                of the event has the same name, the name is invalid, or the first parameter is not annotated with a list
                or sequence of these events.
        """
        if not _is_event_class(event):
            raise ApplicationError(f"{event!r} is not an event class; write @router.on_batch(OrderPlaced)")
        if not is_count(max_size):
            raise ApplicationError(f"max_size is {max_size!r}, but must be an integer of at least 1")
        longest_wait = duration(max_wait, "max_wait")
        checked_name(name)
        rules, overtakes = checked_rules(failures), _overtakes(delayed_retries)

        def register(function: FunctionT) -> FunctionT:
            async_function(function)
            check_batch_parameter(function, event)
            batch = BatchSize(max_size, longest_wait)
            known_as = name_of(function, name)
            self._add(RegisteredHandler(event, known_as, function, batch, rules, overtakes=overtakes))
            return function

        return register

    def include(self, other: EventRouter) -> None:
        """Add the handlers of `other`, with its rules for errors before those of this router."""
        for handler in other.handlers:
            self._add(handler)

    def _add(self, handler: RegisteredHandler) -> None:
        event_type = handler.event_type
        for known in self._handlers:
            if known.event_type != event_type:
                continue
            if known.name == handler.name:
                raise ApplicationError(
                    f"{handler.event_type} has two handlers named {handler.name}, which would share a key; "
                    "set a different name for one of them: @router.on(…, name=…)"
                )
            if known.event is not handler.event:
                raise ApplicationError(
                    f"{known.event.__name__} and {handler.event.__name__} share the event type {handler.event_type}"
                )
        self._handlers.append(replace(handler, failures=(*handler.failures, *self._failures)))

    @property
    def handlers(self) -> tuple[RegisteredHandler, ...]:
        """All handlers, in the order of their registration."""
        return tuple(self._handlers)

    @property
    def events(self) -> tuple[type[BaseEvent], ...]:
        """Classes of the events that have handlers, without duplicates."""
        return tuple(dict.fromkeys(handler.event for handler in self._handlers))
