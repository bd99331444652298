"""Registered handlers, and the calls of them with an event or a batch."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from msgspec import Struct

from integr8s_idem._util.counts import is_count
from integr8s_idem._util.loop_fairness import pace_of, turn_of_the_loop
from integr8s_idem.engine.active_runs import ActiveRun, check_start, run_of
from integr8s_idem.engine.iterators import PLAIN_CLASSES, refuse_awaitable
from integr8s_idem.engine.results import materialized, refuse_call, refuse_generator
from integr8s_idem.engine.work import Attempt, Transaction
from integr8s_idem.errors import ApplicationError
from integr8s_idem.events import BaseEvent, event_type_of
from integr8s_idem.failures import FailureRule
from integr8s_idem.handlers.outgoing import Outgoing
from integr8s_idem.reconciliation import ReconcileFunction

HandlerFunction = Callable[..., Awaitable[Any]]


BeforeCommit = Callable[[Any, Transaction], Awaitable[None]]
"""Called with the handler's result, in the transaction that its scope is about to commit."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Maximum number of events of a batch, and how long the first event waits for others."""

    most: int
    wait: timedelta


@dataclass(frozen=True, slots=True)
class FieldLimit:
    """How many events with the same value of a field a worker handles at a time."""

    field: str
    at_most: int

    @staticmethod
    def of(field: str | None, at_most: int | None, events: Sequence[type[BaseEvent]]) -> FieldLimit | None:
        """Return the limit, or `None` if neither argument is given.

        Raises:
            ApplicationError: Only one is given, an event has no such field, or `at_most` is not an integer of
                at least 1.
        """
        if field is None and at_most is None:
            return None
        if field is None or at_most is None:
            raise ApplicationError(
                'limit_by and at_most belong together: @router.on(Order, limit_by="customer_id", at_most=2)'
            )
        if not isinstance(field, str):
            raise ApplicationError(f"limit_by is {field!r}, but must be the name of a field")
        for event in events:
            if field not in event.model_fields:
                raise ApplicationError(
                    f"limit_by names {field!r}, but {event.__name__} has no such field; "
                    f"its fields are {', '.join(event.model_fields)}"
                )
        if not is_count(at_most):
            raise ApplicationError(f"at_most is {at_most!r}, but must be an integer of at least 1")
        return FieldLimit(field, at_most)


@dataclass(frozen=True, slots=True)
class Batch:
    """Attempts and outgoing events of a batch, in the order of its events."""

    attempts: Sequence[Attempt]
    outgoing: Sequence[Outgoing]


@dataclass(frozen=True, slots=True)
class BatchCall:
    """Arguments of a call of a batch handler."""

    events: Sequence[BaseEvent]
    batch: Batch

    runs: Sequence[ActiveRun | None] = ()
    """The runs of its events."""

    @property
    def argument(self) -> list[BaseEvent]:
        """First argument of the handler."""
        return list(self.events)

    async def check_start(self) -> None:
        """Check that enough of the leases is left.  Await this immediately before the handler is called.

        Raises:
            LateStartError: Too little of a lease is left.
        """
        await turn_of_the_loop()
        for run in self.runs:
            check_start(run)


class HandlerCall(Struct, frozen=True):
    """Arguments of a call of a handler."""

    event: BaseEvent
    attempt: Attempt
    outgoing: Outgoing
    before_commit: BeforeCommit | None = None
    """Set for transactional handlers; `Invoke` awaits it after the handler, in the handler's transaction."""

    @property
    def argument(self) -> BaseEvent:
        """First argument of the handler."""
        return self.event

    async def check_start(self) -> None:
        """Check that enough of the lease is left.  Await this immediately before the handler is called.

        Raises:
            LateStartError: Too little of the lease is left.
        """
        run = run_of(self.attempt)
        pace = pace_of(asyncio.get_running_loop()) if run is None else run.among.pace
        if pace.is_turn_over():
            await pace.wait()
        if run is not None:
            check_start(run)


@dataclass(frozen=True, slots=True)
class RegisteredHandler:
    """A handler that was registered on a router."""

    event: type[BaseEvent]
    name: str
    """Part of its keys: if it changes, events that were handled before are handled again when redelivered."""
    function: HandlerFunction
    batch: BatchSize | None = None
    """Set for batch handlers."""
    failures: tuple[FailureRule, ...] = ()
    """The rules of the handler, then those of its router."""
    limit: FieldLimit | None = None
    """How many of its events a worker handles at a time."""
    reconcile: ReconcileFunction | None = None
    """Finds out whether an earlier attempt has had its effect; see `integr8s_idem.reconciliation`."""
    is_reconcile: bool = False
    """Whether `function` is the reconcile function of the handler with this name."""
    overtakes: bool = False
    """Whether later events are handled while one waits for a delayed retry."""

    @property
    def event_type(self) -> str:
        return event_type_of(self.event)

    @property
    def label(self) -> str:
        """Name of its function in errors."""
        return f"the reconcile function of handler {self.name}" if self.is_reconcile else f"handler {self.name}"

    @property
    def functions(self) -> Iterator[HandlerFunction]:
        """The functions that are called with dependencies."""
        yield self.function
        if self.reconcile is not None:
            yield self.reconcile

    @property
    def returns(self) -> HandlerFunction | None:
        """Function whose return annotation is the type of an event's result; `None` for batch handlers."""
        return self.function if self.batch is None else None


async def call_with_event(handler: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
    """Call a handler whose only argument is its event, or its list of events."""
    await call.check_start()
    return await handler.function(call.event if isinstance(call, HandlerCall) else call.argument)


def returned_by(handler: RegisteredHandler, result: Any) -> Any:
    """Read iterators in the result of `handler`; for a batch handler, also in the results of single events.

    Call this while the handler's dependencies are open, because a lazy iterator may use them, and because they may
    commit when they are closed.

    Raises:
        ApplicationError: The result, or that of an event, is an awaitable, whose work is not done.
        Exception: Any error of the code that a lazy iterator runs.
    """
    if type(result) not in PLAIN_CLASSES:
        result = materialized(result, handler.returns)
        refuse_awaitable(result, handler.label)
    if handler.batch is not None and isinstance(result, list | tuple):
        for each in result:
            refuse_awaitable(each, handler.label)
        return [materialized(each) for each in result]
    return result


def checked_name(name: str | None) -> str | None:
    """Return the name that was given to a handler, if there is one.

    Raises:
        ApplicationError: It is not a string, is empty, or contains a control character.
    """
    given: object = name
    if given is None:
        return None
    if not isinstance(given, str) or not given.strip() or not given.isprintable():
        raise ApplicationError(
            f"name is {given!r}, but must be a string that is not empty and contains no control characters, because it "
            'is part of keys, as in name="charge"'
        )
    return name


def name_of(function: HandlerFunction, name: str | None = None) -> str:
    """Return the name of a handler in its keys: `name`, or that of its function.

    Raises:
        ApplicationError: `name` is invalid, or the function has no name, for example since it is a lambda.
    """
    if (given := checked_name(name)) is not None:
        return given
    name = getattr(function, "__name__", "<nameless>")
    if not name.isidentifier():
        raise ApplicationError(f"{function!r} has no name to use in its keys: set name=…")
    return str(name)


def check_reconcile_function(function: ReconcileFunction) -> None:
    """Check a reconcile function now: a call would only fail after a failure, when its answer matters.

    Raises:
        ApplicationError: It is not an async function.
    """
    refuse_call(function, "@router.on(…, reconcile=find)")
    if _is_lambda(function):
        raise ApplicationError(
            "the reconcile function is a lambda, which is known to be async only after its first call: define it with "
            "async def"
        )
    async_function(function, "reconcile function")


def async_function(function: HandlerFunction, kind: str = "handler") -> HandlerFunction:
    """Return `function` if it is async; `kind` is what it is called in errors.

    Raises:
        ApplicationError: It is a plain function, whose result cannot be awaited, or a generator.
    """
    refuse_generator(function)
    if _is_lambda(function):
        return function  # a lambda may return a coroutine
    inner = inspect.unwrap(getattr(function, "func", function))
    if not (inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))):  # noqa: B004
        name = getattr(function, "__qualname__", function)
        raise ApplicationError(f"{kind} {name!s} is not an async function: define it with async def")
    return function


def _is_lambda(function: HandlerFunction) -> bool:
    return getattr(inspect.unwrap(getattr(function, "func", function)), "__name__", "") == "<lambda>"
