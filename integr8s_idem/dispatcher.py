"""Events to handlers.

`EventRouter` collects handlers; `EventDispatcher` runs them; `IdempotentEventDispatcher` runs each of
them once per key.  Handlers know nothing of either: which one a service gets is decided where it is wired.

Order of one run: the handler returns, what it opened is closed (the business commit), its outgoing
events are published, the record is completed.  Only then may the offset move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

from integr8s_idem.config import OnInProgress
from integr8s_idem.errors import (
    ApplicationError,
    HandlerCancelledError,
    HandlerTimeoutError,
    PermanentError,
    PublishError,
)
from integr8s_idem.events import BaseEvent, derived_event_id, event_type_of
from integr8s_idem.keys import Key, KeyResolver, KeySpace, KeyStrategy
from integr8s_idem.manager import (
    Attempt,
    Executed,
    HandlerFailed,
    IdempotencyManager,
    Outcome,
    WaitForStore,
    Work,
)
from integr8s_idem.records import InProgress
from integr8s_idem.telemetry import SILENT, Observer, Phase, Signal

HandlerFunction = Callable[..., Awaitable[Any]]
FunctionT = TypeVar("FunctionT", bound=HandlerFunction)

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""Seconds between tries to publish what a handler has left behind."""


class Outgoing:
    """Events that a handler leaves behind.  They are sent once the handler and its scope have succeeded."""

    def __init__(self) -> None:
        self._events: list[BaseEvent] = []

    def publish(self, event: BaseEvent) -> None:
        """Send `event` after success.  Unless its id was given, it is derived from the incoming key and the
        order of the calls, so that a rerun publishes the same ids and the next service drops them."""
        self._events.append(event)

    def finished(self, incoming: BaseEvent, key: str, service: str) -> list[BaseEvent]:
        """The events as they go out: with their final ids, in the name of `service`, correlated with `incoming`."""
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


@dataclass(frozen=True, slots=True)
class HandlerCall:
    """What one run of a handler is given."""

    event: BaseEvent
    attempt: Attempt
    outgoing: Outgoing


@dataclass(frozen=True, slots=True)
class RegisteredHandler:
    """A handler as its service declares it."""

    event: type[BaseEvent]
    name: str
    """Part of its keys: changing it makes old events new."""
    function: HandlerFunction

    @property
    def event_type(self) -> str:
        return event_type_of(self.event)


Invoke = Callable[[RegisteredHandler, HandlerCall], Awaitable[Any]]
"""Calls a handler, opening and closing whatever it needs.  `integrations.dishka` has one with a REQUEST scope."""


async def call_with_event(handler: RegisteredHandler, call: HandlerCall) -> Any:
    """Call a handler that takes nothing but its event."""
    return await handler.function(call.event)


def name_of(function: HandlerFunction) -> str:
    """What stands in the keys of a handler that was given no name.

    Raises:
        ApplicationError: It has none of its own; all lambdas would share their keys.
    """
    name = getattr(function, "__name__", "<nameless>")
    if not name.isidentifier():
        raise ApplicationError(f"{function!r} has no name that could stand in its keys: give it one (name=…)")
    return str(name)


class EventRouter:
    """Collects the handlers of a service."""

    def __init__(self) -> None:
        self._handlers: list[RegisteredHandler] = []

    def on(self, *events: type[BaseEvent], name: str | None = None) -> Callable[[FunctionT], FunctionT]:
        """Declare a handler of `events`.

        Args:
            name: Stands in its keys instead of the function's name, so that the function can be renamed.

        Raises:
            ApplicationError: No event, an event without a type, or a second handler of that name for it.
        """
        if not events:
            raise ApplicationError("router.on() needs the class of at least one event")

        def register(function: FunctionT) -> FunctionT:
            for event in events:
                self._add(RegisteredHandler(event, name or name_of(function), function))
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


class Handling:
    """One event on its way through one handler; lives until that is settled, over all tries.

    This one is unguarded and counts its tries in memory.
    """

    on_in_progress = OnInProgress.WAIT

    def __init__(self, handler: EventHandler, event: BaseEvent) -> None:
        self.handler = handler
        self.event = event
        self._tries = 0

    @property
    def label(self) -> str:
        """What people read: type and id of the event."""
        return f"{self.event.event_type}:{self.event.event_id}"

    async def attempt(self, *, wait_for_store: WaitForStore | None = None) -> Outcome[Any]:
        """One try.  Arguments and errors as those of `IdempotencyManager.execute`; a caller that waits for
        the store also waits for the broker to take what the handler publishes."""
        self._tries += 1
        handler = self.handler
        attempt = Attempt(handler.plain_key(self.event), self._tries, 0, float("inf"), self.label)
        try:
            with handler.observer.phase(Phase.HANDLE, self.event.event_type):
                value = await handler.work(self.event, attempt, patient=wait_for_store is not None)
        except Exception as error:  # noqa: BLE001  # handed on as the outcome
            handler.observer.count(Signal.HANDLER_FAILED, self.event.event_type)
            given_up = isinstance(error, PermanentError) or self._tries >= handler.max_attempts
            return HandlerFailed(error, self._tries, given_up)
        return Executed(value, self._tries)

    async def wait(self, found: InProgress, looks: int) -> None:
        """Return when another try makes sense."""
        raise AssertionError("an unguarded handler is never in progress elsewhere")


class GuardedHandling(Handling):
    """The same behind a manager.  The key is computed here, once, before the handler can touch the event."""

    def __init__(self, handler: IdempotentEventHandler, event: BaseEvent) -> None:
        super().__init__(handler, event)
        self._manager = handler.manager
        self.on_in_progress = handler.manager.config.on_in_progress
        keyed = handler.resolver.resolve(handler.name, event)
        self._work = Work(keyed.key, keyed.fingerprint, handler.ttl, event.event_type)

    @property
    def label(self) -> str:
        return self._work.key.label

    async def attempt(self, *, wait_for_store: WaitForStore | None = None) -> Outcome[Any]:
        async def work(attempt: Attempt) -> Any:
            return await self.handler.work(self.event, attempt, patient=wait_for_store is not None)

        return await self._manager.execute(self._work, work, wait_for_store=wait_for_store)

    async def wait(self, found: InProgress, looks: int) -> None:
        await self._manager.wait_for_change(found, looks=looks)

    async def run(self) -> Any:
        """The value, new or remembered; waits for a twin and raises as `IdempotencyManager.run` does."""

        async def work(attempt: Attempt) -> Any:
            return await self.handler.work(self.event, attempt)

        return await self._manager.run_work(self._work, work, returns=self.handler.function)


class EventHandler:
    """One handler with all it needs to run.  Awaiting a call of it makes one unguarded try."""

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
        timeout: timedelta | None = None,
        max_attempts: int = 5,
    ) -> None:
        self.function = function
        self.name = name or name_of(function)
        self.scope = scope
        self.observer = observer
        self.max_attempts = max_attempts
        self._registered = RegisteredHandler(event, self.name, function)
        self.invoke = invoke
        self._publisher = publisher
        self._timeout = timeout

    def handling(self, event: BaseEvent) -> Handling:
        """Begin to handle `event`."""
        return Handling(self, event)

    async def __call__(self, event: BaseEvent) -> Any:
        outcome = await self.handling(event).attempt()
        if isinstance(outcome, HandlerFailed):
            raise outcome.error
        assert isinstance(outcome, Executed)
        return outcome.value

    def plain_key(self, event: BaseEvent) -> str:
        """A key made of the event's id, for ids derived from it."""
        return KeySpace("plain", self.scope or "-").full(
            Key.of_event(self.name, event.event_type, "id", event.event_id)
        )

    async def work(self, event: BaseEvent, attempt: Attempt, *, patient: bool = False) -> Any:
        """The handler, the closing of its scope, the publishing of what it leaves behind."""
        outgoing = Outgoing()
        result = await self._call(HandlerCall(event, attempt, outgoing))
        events = outgoing.finished(event, attempt.key, self.scope)
        if events:
            await self._publish(events, patient)
        self.observer.count(Signal.HANDLED, event.event_type)
        return result

    async def _call(self, call: HandlerCall) -> Any:
        if self._timeout is None:
            return await self._invoke(call)
        try:
            async with asyncio.timeout(self._timeout.total_seconds()) as limit:
                return await self._invoke(call)
        except TimeoutError as error:
            if limit.expired():
                raise HandlerTimeoutError(self.name, self._timeout) from error
            raise

    async def _invoke(self, call: HandlerCall) -> Any:
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0
        try:
            return await self.invoke(self._registered, call)
        except asyncio.CancelledError as error:
            if task is None or task.cancelling() > before:
                raise
            # Of the handler's own making: as a cancellation it would end our caller, who was not meant.
            raise HandlerCancelledError(self.name) from error

    async def _publish(self, events: Sequence[BaseEvent], patient: bool) -> None:
        if self._publisher is None:
            raise ApplicationError(f"handler {self.name} publishes events, but nobody gave it a publisher")
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._publisher.publish(*events)
            except PublishError:
                # The handler has succeeded: running it again because of the broker would repeat its
                # effects.  Patience ends with the lease, or when the worker is told to stop.
                if not patient:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)


class IdempotentEventHandler(EventHandler):
    """One handler behind a manager.  Awaiting a call of it gives the result, new or remembered."""

    def __init__(
        self,
        function: HandlerFunction,
        manager: IdempotencyManager,
        *,
        resolver: KeyResolver | None = None,
        ttl: timedelta | None = None,
        name: str | None = None,
        event: type[BaseEvent] = BaseEvent,
        invoke: Invoke = call_with_event,
        publisher: Publisher | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """`resolver`: how keys are made, by event id if not given; `ttl`: how long outcomes are remembered."""
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
        )
        self.manager = manager
        self.resolver = resolver or KeyResolver()
        self.ttl = ttl

    def handling(self, event: BaseEvent) -> GuardedHandling:
        return GuardedHandling(self, event)

    async def __call__(self, event: BaseEvent) -> Any:
        return await self.handling(event).run()


class EventDispatcher:
    """Runs the handlers of a router.  Handlers of one event are independent of each other."""

    manager: IdempotencyManager | None = None

    def __init__(
        self,
        router: EventRouter,
        *,
        scope: str = "",
        invoke: Invoke = call_with_event,
        publisher: Publisher | None = None,
        observer: Observer = SILENT,
        timeout: timedelta | None = None,
        max_attempts: int = 5,
    ) -> None:
        """`timeout`: longest run of one handler; `max_attempts`: tries before an event is given up."""
        self.router = router
        self.observer = observer
        self._scope = scope
        self._invoke = invoke
        self._publisher = publisher
        self._timeout = timeout
        self._max_attempts = max_attempts
        self._handlers: dict[str, list[EventHandler]] = {}
        for registered in router.handlers:
            self._handlers.setdefault(registered.event_type, []).append(self.wrap(registered))

    def invoke_with(self, invoke: Invoke) -> None:
        """Call handlers by `invoke` from now on."""
        for handlers in self._handlers.values():
            for handler in handlers:
                handler.invoke = invoke

    def wrap(self, registered: RegisteredHandler) -> EventHandler:
        """Make a handler ready to run; the idempotent dispatcher puts its guard around it here."""
        return EventHandler(
            registered.function,
            name=registered.name,
            event=registered.event,
            scope=self._scope,
            invoke=self._invoke,
            publisher=self._publisher,
            observer=self.observer,
            timeout=self._timeout,
            max_attempts=self._max_attempts,
        )

    def handlings(self, event: BaseEvent) -> list[Handling]:
        """Begin to handle `event`: one handling for each of its handlers.

        Raises:
            InvalidKeyError: The event offers nothing to make a key of.
        """
        return [handler.handling(event) for handler in self._handlers.get(event.event_type, ())]

    async def dispatch(self, event: BaseEvent) -> list[Outcome[Any]]:
        """One try with every handler of `event`, at the same time; for callers without a worker.

        Each comes to its end; then the first error is raised, if there was one.
        """
        tries = (handling.attempt() for handling in self.handlings(event))
        ends = await asyncio.gather(*tries, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return [end for end in ends if not isinstance(end, BaseException)]


class IdempotentEventDispatcher(EventDispatcher):
    """Runs each handler of a router once per key."""

    manager: IdempotencyManager

    def __init__(
        self,
        router: EventRouter,
        manager: IdempotencyManager,
        *,
        resolver: KeyResolver | None = None,
        ttl: timedelta | None = None,
        invoke: Invoke = call_with_event,
        publisher: Publisher | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """`resolver`: how keys are made, by event id if not given; `ttl`: how long outcomes are remembered.

        Raises:
            InvalidKeyError: The resolver can make no key of some event of the router.
        """
        self.manager = manager
        self._resolver = resolver or KeyResolver()
        self._ttl = ttl
        for event in router.events:
            self._resolver.check(event)
        super().__init__(
            router,
            scope=manager.scope,
            invoke=invoke,
            publisher=publisher,
            observer=manager.observer,
            timeout=timeout,
            max_attempts=manager.config.max_attempts,
        )

    def wrap(self, registered: RegisteredHandler) -> IdempotentEventHandler:
        return IdempotentEventHandler(
            registered.function,
            self.manager,
            resolver=self._resolver,
            ttl=self._ttl,
            name=registered.name,
            event=registered.event,
            invoke=self._invoke,
            publisher=self._publisher,
            timeout=self._timeout,
        )


async def with_idempotency(
    event: BaseEvent,
    handler: HandlerFunction,
    manager: IdempotencyManager,
    *,
    key_strategy: KeyStrategy = KeyStrategy.EVENT_BASED,
    fields: set[str] | None = None,
    custom_key: str | None = None,
    ttl: timedelta | None = None,
    name: str | None = None,
) -> Any:
    """Run `handler(event)` once; a later call with the same work returns the first one's result.

    Args:
        fields: For `content_hash`: only these fields count.
        custom_key: For `custom`: the key itself.
        name: Stands in the key instead of the handler's name.

    Raises:
        As `IdempotencyManager.run`.
    """
    resolver = KeyResolver(
        key_strategy,
        frozenset(fields) if fields is not None else None,
        (lambda _: custom_key) if custom_key is not None else None,
    )
    resolver.check(type(event))
    return await IdempotentEventHandler(handler, manager, resolver=resolver, ttl=ttl, name=name)(event)
