"""What handles what: a service's handlers as it declares them, and what each run of one is given."""

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
    """Events that a handler leaves behind.  They are sent once the handler and its scope have succeeded."""

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: list[BaseEvent] = []

    def publish(self, event: BaseEvent) -> None:
        """Send `event` after success.  Unless its id was given, it is derived from the incoming key and the
        order of the calls, so that a rerun publishes the same ids and the next service drops them."""
        self._events.append(event)

    def finished(self, incoming: BaseEvent, key: str, service: str) -> list[BaseEvent]:
        """The events as they go out, in the order of the calls.

        They have their final ids, come in the name of `service`, and are correlated with `incoming`.
        """
        if not self._events:
            return self._events
        return [_finish(event, index, incoming, key, service) for index, event in enumerate(self._events)]


def _finish(event: BaseEvent, index: int, incoming: BaseEvent, key: str, service: str) -> BaseEvent:
    told = event.metadata
    metadata = told.model_copy(
        update={
            "correlation_id": told.correlation_id or incoming.metadata.correlation_id or incoming.event_id,
            "service_name": told.service_name or service,
            # Metadata that a handler gave is about somebody; the incoming event's user is only the default.
            "user_id": told.user_id if "metadata" in event.model_fields_set else incoming.metadata.user_id,
        }
    )
    update: dict[str, object] = {"metadata": metadata}
    if "event_id" not in event.model_fields_set:
        update["event_id"] = derived_event_id(key, index)
    return event.model_copy(update=update)


class Publisher(Protocol):
    """Sends events."""

    async def publish(self, *events: BaseEvent) -> None:
        """Return once the broker has confirmed all of them.  Raises `PublishError`."""
        ...


@runtime_checkable
class MessageMaker(Publisher, Protocol):
    """Also makes messages of events, to be sent later."""

    def message(self, event: BaseEvent) -> Message:
        """`event` as it goes to the broker."""
        ...


BeforeCommit = Callable[[Any, Transaction], Awaitable[None]]
"""Called with what the handler returned, inside the transaction that its scope is about to commit."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How many events a batch handler is given at once, and how long the first of them waits for others."""

    most: int
    wait: timedelta


@dataclass(frozen=True, slots=True)
class Batch:
    """What each event of a batch has to itself, in their order."""

    attempts: Sequence[Attempt]
    outgoing: Sequence[Outgoing]


@dataclass(frozen=True, slots=True)
class BatchCall:
    """What one run of a batch handler is given."""

    events: Sequence[BaseEvent]
    batch: Batch

    runs: Sequence[ActiveRun | None] = ()
    """The runs of its events."""

    @property
    def argument(self) -> list[BaseEvent]:
        """What the handler is called with."""
        return list(self.events)

    async def check_start(self) -> None:
        """Refuse to call the handler on a lease that is late.  Await it immediately before the call.

        Raises:
            LateStartError: Too little is left of one of their leases.
        """
        await turn_of_the_loop()
        for run in self.runs:
            check_start(run)


@quick
@dataclass(frozen=True, slots=True)
class HandlerCall:
    """What one run of a handler is given."""

    event: BaseEvent
    attempt: Attempt
    outgoing: Outgoing
    before_commit: BeforeCommit | None = None
    """For handlers whose outcome commits together with what they write; whoever calls the handler awaits it."""

    @property
    def argument(self) -> BaseEvent:
        """What the handler is called with."""
        return self.event

    async def check_start(self) -> None:
        """Refuse to call the handler on a lease that is late.  Await it immediately before the call.

        Raises:
            LateStartError: Too little is left of the lease.
        """
        await turn_of_the_loop()
        check_start(run_of(self.attempt))


@dataclass(frozen=True, slots=True)
class RegisteredHandler:
    """A handler as its service declares it."""

    event: type[BaseEvent]
    name: str
    """Part of its keys: changing it makes old events new."""
    function: HandlerFunction
    batch: BatchSize | None = None
    """Of one that takes many events at once."""

    @property
    def event_type(self) -> str:
        return event_type_of(self.event)

    @property
    def returns(self) -> HandlerFunction | None:
        """The function whose return annotation names the result of one event: not that of a whole batch."""
        return self.function if self.batch is None else None


Invoke = Callable[[RegisteredHandler, Any], Awaitable[Any]]
"""Calls a handler with its `HandlerCall`, or a batch handler with its `BatchCall`, opening and closing whatever it
needs.  `integrations.dishka` has one with a REQUEST scope."""


async def call_with_event(handler: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
    """Call a handler that takes nothing but its event, or its events."""
    await call.check_start()
    return await handler.function(call.argument)


def returned_by(handler: RegisteredHandler, result: Any) -> Any:
    """Read iterators that `handler` returned, as `materialized`; for a batch handler, also those of single events.

    Call it while the handler's dependencies are open, because a lazy iterator may use them.
    """
    result = materialized(result, handler.returns)
    if handler.batch is not None and isinstance(result, list | tuple):
        return [materialized(each) for each in result]
    return result


def name_of(function: HandlerFunction) -> str:
    """What stands in the keys of a handler that was given no name.

    Raises:
        ApplicationError: It has none of its own; all lambdas would share their keys.
    """
    name = getattr(function, "__name__", "<nameless>")
    if not name.isidentifier():
        raise ApplicationError(f"{function!r} has no name that could stand in its keys: give it one (name=…)")
    return str(name)


def async_function(function: HandlerFunction) -> HandlerFunction:
    """`function`, if it is one that can be awaited.

    Raises:
        ApplicationError: It is a plain `def`: its effects would happen, and awaiting its result would fail.  Or it is
            a generator.
    """
    refuse_generator(function)
    inner = inspect.unwrap(getattr(function, "func", function))
    if getattr(inner, "__name__", "") == "<lambda>":
        return function  # nothing tells what it returns
    if not (inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))):  # noqa: B004
        raise ApplicationError(f"handler {getattr(function, '__qualname__', function)!s} is no async function")
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
        """Declare a handler of `events`.

        The event is the handler's first parameter.  Its annotation, if there is one, is the class of the event, a base
        class, or a union that covers all of `events`; mypy checks this for up to four of them.

        Args:
            name: Stands in its keys instead of the function's name, so that the function can be renamed.

        Raises:
            ApplicationError: No event, an event without a type, a second handler of that name for it, or a first
                parameter that is annotated with another type.
        """
        if not events:
            raise ApplicationError("router.on() needs the class of at least one event")
        for event in events:
            if not _is_event_class(event):
                raise ApplicationError(f"{event!r} is no class of events; write @router.on(OrderPlaced)")

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
        """Declare a handler of many events at once: it takes a list of them.

        Each keeps its own key, and comes once.  It returns `None`, or a result for each; `PartialFailureError` says
        that some have failed.  Any other error fails all of them, and each is tried again alone.

        Args:
            max_size: Most events of a call.  A worker has at most `concurrency` of them at hand; with the ordering
                `partition` it is one of each partition, so that `key` or `none` goes with batches.  A worker whose
                settings leave them smaller says so when it starts.
            max_wait: How long the first event waits for others.
            name: As for `on`.

        Raises:
            ApplicationError: No class of events, no size, a second handler of that name for it, or a first parameter
                that is annotated with anything but a list or sequence of these events.
        """
        if not _is_event_class(event):
            raise ApplicationError(f"{event!r} is no class of events; write @router.on_batch(OrderPlaced)")
        if max_size < 1:
            raise ApplicationError(f"a batch has at least one event, not {max_size}")
        longest_wait = duration(max_wait, "max_wait")

        def register(function: FunctionT) -> FunctionT:
            async_function(function)
            check_batch_parameter(function, event)
            batch = BatchSize(max_size, longest_wait)
            self._add(RegisteredHandler(event, name or name_of(function), function, batch))
            return function

        return register

    def include(self, other: EventRouter) -> None:
        """Take over the handlers of `other`."""
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
                    "give one of them a name: @router.on(…, name=…)"
                )
            if known.event is not handler.event:
                raise ApplicationError(
                    f"{known.event.__name__} and {handler.event.__name__} share the event type {handler.event_type}"
                )
        self._handlers.append(handler)

    @property
    def handlers(self) -> tuple[RegisteredHandler, ...]:
        """All handlers, as declared."""
        return tuple(self._handlers)

    @property
    def events(self) -> tuple[type[BaseEvent], ...]:
        """The events that somebody handles, without repetition."""
        return tuple(dict.fromkeys(handler.event for handler in self._handlers))
