"""Routers, on which a service registers its handlers, and the arguments of each call of a handler."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload, runtime_checkable

from integr8s_idem._util.fast_dataclass import quick
from integr8s_idem._util.loop_fairness import turn_of_the_loop
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.active_runs import ActiveRun, check_start, run_of
from integr8s_idem.engine.results import materialized, refuse_generator
from integr8s_idem.engine.work import Attempt, Transaction
from integr8s_idem.errors import ApplicationError
from integr8s_idem.events import BaseEvent, Message, derived_event_id, event_type_of
from integr8s_idem.handlers.annotations import check_batch_parameter, check_event_parameter

HandlerFunction = Callable[..., Awaitable[Any]]
FunctionT = TypeVar("FunctionT", bound=HandlerFunction)
P = ParamSpec("P")
ResultT = TypeVar("ResultT", bound=Awaitable[Any])
A = TypeVar("A", bound=BaseEvent)
B = TypeVar("B", bound=BaseEvent)
C = TypeVar("C", bound=BaseEvent)
D = TypeVar("D", bound=BaseEvent)


class Outgoing:
    """Outgoing events of a handler, which are published after the handler and its scope have succeeded."""

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: list[BaseEvent] = []

    def publish(self, event: BaseEvent) -> None:
        """Publish `event` after the handler has succeeded.

        Unless its id is set, it is derived from the key of the incoming event and the order of the calls.  So another
        run publishes the same ids, and consumers recognize the duplicates.
        """
        self._events.append(event)

    def finished(self, incoming: BaseEvent, key: str, service: str) -> list[BaseEvent]:
        """Return the events to publish, in the order of the calls.

        They have their final ids, the name of `service`, and the correlation id of `incoming`.
        """
        if not self._events:
            return self._events
        return [_finish(event, index, incoming, key, service) for index, event in enumerate(self._events)]


def _finish(event: BaseEvent, index: int, incoming: BaseEvent, key: str, service: str) -> BaseEvent:
    own = event.metadata
    metadata = own.model_copy(
        update={
            "correlation_id": own.correlation_id or incoming.metadata.correlation_id or incoming.event_id,
            "service_name": own.service_name or service,
            # The user of the incoming event is used only if the handler did not set metadata.
            "user_id": own.user_id if "metadata" in event.model_fields_set else incoming.metadata.user_id,
        }
    )
    update: dict[str, object] = {"metadata": metadata}
    if "event_id" not in event.model_fields_set:
        update["event_id"] = derived_event_id(key, index)
    return event.model_copy(update=update)


class Publisher(Protocol):
    """Publishes events."""

    async def publish(self, *events: BaseEvent) -> None:
        """Publish events, and return when the broker has confirmed all of them.

        Raises:
            PublishError: An event was not confirmed.
        """
        ...


@runtime_checkable
class MessageMaker(Publisher, Protocol):
    """A publisher that can also encode events as messages, to be sent later."""

    def message(self, event: BaseEvent) -> Message:
        """Encode `event` as a message."""
        ...


BeforeCommit = Callable[[Any, Transaction], Awaitable[None]]
"""Called with the handler's result, in the transaction that its scope is about to commit."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Maximum number of events of a batch, and how long the first event waits for others."""

    most: int
    wait: timedelta


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


@quick
@dataclass(frozen=True, slots=True)
class HandlerCall:
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
        await turn_of_the_loop()
        check_start(run_of(self.attempt))


@dataclass(frozen=True, slots=True)
class RegisteredHandler:
    """A handler that was registered on a router."""

    event: type[BaseEvent]
    name: str
    """Part of its keys: if it changes, events that were handled before are handled again when redelivered."""
    function: HandlerFunction
    batch: BatchSize | None = None
    """Set for batch handlers."""

    @property
    def event_type(self) -> str:
        return event_type_of(self.event)

    @property
    def returns(self) -> HandlerFunction | None:
        """Function whose return annotation is the type of an event's result; `None` for batch handlers."""
        return self.function if self.batch is None else None


Invoke = Callable[[RegisteredHandler, Any], Awaitable[Any]]
"""Calls a handler with its `HandlerCall`, or a batch handler with its `BatchCall`, and opens and closes its
dependencies.  `integrations.dishka` has one with a REQUEST scope."""


async def call_with_event(handler: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
    """Call a handler whose only argument is its event, or its list of events."""
    await call.check_start()
    return await handler.function(call.argument)


def returned_by(handler: RegisteredHandler, result: Any) -> Any:
    """Read iterators in the result of `handler`; for a batch handler, also in the results of single events.

    Call this while the handler's dependencies are open, because a lazy iterator may use them.
    """
    result = materialized(result, handler.returns)
    if handler.batch is not None and isinstance(result, list | tuple):
        return [materialized(each) for each in result]
    return result


def name_of(function: HandlerFunction) -> str:
    """Return the name of a function, to use in its keys.

    Raises:
        ApplicationError: The function has no name, for example since it is a lambda.
    """
    name = getattr(function, "__name__", "<nameless>")
    if not name.isidentifier():
        raise ApplicationError(f"{function!r} has no name to use in its keys: set name=…")
    return str(name)


def async_function(function: HandlerFunction) -> HandlerFunction:
    """Return `function` if it is async.

    Raises:
        ApplicationError: It is a plain function, whose result cannot be awaited, or a generator.
    """
    refuse_generator(function)
    inner = inspect.unwrap(getattr(function, "func", function))
    if getattr(inner, "__name__", "") == "<lambda>":
        return function  # a lambda may return a coroutine
    if not (inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))):  # noqa: B004
        name = getattr(function, "__qualname__", function)
        raise ApplicationError(f"handler {name!s} is not an async function: define it with async def")
    return function


def _is_event_class(candidate: object) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, BaseEvent)


class EventRouter:
    """Collects the handlers of a service."""

    def __init__(self) -> None:
        self._handlers: list[RegisteredHandler] = []

    @overload
    def on(
        self, a: type[A], /, *, name: str | None = None
    ) -> Callable[[Callable[Concatenate[A, P], ResultT]], Callable[Concatenate[A, P], ResultT]]: ...

    @overload
    def on(
        self, a: type[A], b: type[B], /, *, name: str | None = None
    ) -> Callable[[Callable[Concatenate[A | B, P], ResultT]], Callable[Concatenate[A | B, P], ResultT]]: ...

    @overload
    def on(
        self, a: type[A], b: type[B], c: type[C], /, *, name: str | None = None
    ) -> Callable[[Callable[Concatenate[A | B | C, P], ResultT]], Callable[Concatenate[A | B | C, P], ResultT]]: ...

    @overload
    def on(
        self, a: type[A], b: type[B], c: type[C], d: type[D], /, *, name: str | None = None
    ) -> Callable[
        [Callable[Concatenate[A | B | C | D, P], ResultT]], Callable[Concatenate[A | B | C | D, P], ResultT]
    ]: ...

    @overload
    def on(self, *events: type[BaseEvent], name: str | None = None) -> Callable[[FunctionT], FunctionT]: ...

    def on(self, *events: type[BaseEvent], name: str | None = None) -> Callable[[FunctionT], FunctionT]:
        """Register a handler of `events`.

        The event is the handler's first parameter.  Its annotation, if there is one, is the class of the event, a base
        class, or a union that covers all of `events`; mypy checks this for up to four events.

        Args:
            name: Name of the handler in its keys; by default, the function's name.  With it, you can rename the
                function without changing its keys.

        Raises:
            ApplicationError: There is no event, an event has no type, another handler of an event has the same name, or
                the first parameter is annotated with another type.
        """
        if not events:
            raise ApplicationError("router.on() requires at least one event class")
        for event in events:
            if not _is_event_class(event):
                raise ApplicationError(f"{event!r} is not an event class; write @router.on(OrderPlaced)")

        def register(function: FunctionT) -> FunctionT:
            async_function(function)
            check_event_parameter(function, events)
            for event in events:
                self._add(RegisteredHandler(event, name or name_of(function), function))
            return function

        return register

    def on_batch(
        self,
        event: type[BaseEvent],
        *,
        max_size: int = 100,
        max_wait: Duration = timedelta(milliseconds=20),
        name: str | None = None,
    ) -> Callable[[FunctionT], FunctionT]:
        """Register a batch handler, which takes a list of events.

        Each event keeps its own key and is handled once.  The handler returns `None`, or a list with a result for each
        event.  It raises `PartialFailureError` if only some events have failed.  After any other error, all events have
        failed, and each is retried alone.

        Args:
            max_size: Maximum events of a call.  A worker handles at most `concurrency` events at a time, and with the
                ordering `partition` only one of each partition: use `key` or `none` for batches.  A worker logs a
                warning at startup if its settings keep batches smaller.
            max_wait: How long the first event waits for others.
            name: Name of the handler in its keys; by default, the function's name.

        Raises:
            ApplicationError: `event` is not an event class, `max_size` is less than 1, another handler of the event has
                the same name, or the first parameter is not annotated with a list or sequence of these events.
        """
        if not _is_event_class(event):
            raise ApplicationError(f"{event!r} is not an event class; write @router.on_batch(OrderPlaced)")
        if max_size < 1:
            raise ApplicationError(f"max_size is {max_size}, but must be at least 1")
        longest_wait = duration(max_wait, "max_wait")

        def register(function: FunctionT) -> FunctionT:
            async_function(function)
            check_batch_parameter(function, event)
            batch = BatchSize(max_size, longest_wait)
            self._add(RegisteredHandler(event, name or name_of(function), function, batch))
            return function

        return register

    def include(self, other: EventRouter) -> None:
        """Add the handlers of `other`."""
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
        self._handlers.append(handler)

    @property
    def handlers(self) -> tuple[RegisteredHandler, ...]:
        """All handlers, in the order of their registration."""
        return tuple(self._handlers)

    @property
    def events(self) -> tuple[type[BaseEvent], ...]:
        """Classes of the events that have handlers, without duplicates."""
        return tuple(dict.fromkeys(handler.event for handler in self._handlers))
