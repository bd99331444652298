"""Events to handlers.

`EventRouter` collects handlers; `EventDispatcher` runs them; `IdempotentEventDispatcher` runs each of
them once per key.  Handlers know nothing of either: which one a service gets is decided where it is wired.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from integr8s_idem.codecs import Codec
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.work import Outcome
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.handler import EventHandler, HandlerExecution, IdempotentEventHandler
from integr8s_idem.handlers.router import (
    EventRouter,
    HandlerFunction,
    Invoke,
    Outgoing,
    Publisher,
    RegisteredHandler,
    call_with_event,
)
from integr8s_idem.keys import KeyResolver, KeyStrategy
from integr8s_idem.stores.outbox import Outbox
from integr8s_idem.telemetry import SILENT, Observer

__all__ = [
    "EventDispatcher",
    "EventHandler",
    "EventRouter",
    "HandlerExecution",
    "IdempotentEventDispatcher",
    "IdempotentEventHandler",
    "Outgoing",
    "with_idempotency",
]


class EventDispatcher:
    """Runs the handlers of a router.  Handlers of one event are independent of each other."""

    manager: IdempotencyManager | None = None
    outbox: Outbox | None = None
    """Where transactions leave the events that a relay is to publish."""
    ttl: timedelta | None = None
    """How long outcomes are remembered; `None`: not at all."""

    def __init__(
        self,
        router: EventRouter,
        *,
        scope: str = "",
        invoke: Invoke = call_with_event,
        publisher: Publisher | None = None,
        observer: Observer = SILENT,
        timeout: Duration | None = None,
        max_attempts: int = 5,
        codec: Codec | None = None,
    ) -> None:
        """`timeout`: longest run of one handler; `max_attempts`: tries before an event is given up;
        `codec`: how events lie in messages, if the settings have no name for it."""
        self.router = router
        self.codec = codec
        self.observer = observer
        self._scope = scope
        self._invoke = invoke
        self._publisher = publisher
        self._timeout = duration(timeout, "timeout")
        self._max_attempts = max_attempts
        self._handlers: dict[str, list[EventHandler]] = {}
        for registered in router.handlers:
            self._handlers.setdefault(registered.event_type, []).append(self.wrap(registered))

    @property
    def invoke(self) -> Invoke:
        """How handlers are called."""
        return self._invoke

    def invoke_with(self, invoke: Invoke) -> None:
        """Call handlers by `invoke` from now on."""
        self._invoke = invoke
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
            batch=registered.batch,
        )

    @property
    def handlers(self) -> tuple[EventHandler, ...]:
        """All of them, ready to run."""
        return tuple(handler for handlers in self._handlers.values() for handler in handlers)

    @property
    def scope(self) -> str:
        """The service it works for."""
        return self._scope

    def executions(self, event: BaseEvent, generation: int = 0, only: str | None = None) -> list[HandlerExecution]:
        """Begin to handle `event`: one handling for each of its handlers.

        Args:
            generation: How often the event was replayed on purpose; each generation is work of its own.
            only: The name of the one handler that is meant, if it is not all of them.

        Raises:
            InvalidKeyError: The event offers nothing to make a key of.
        """
        handlers = self._handlers.get(event.event_type, ())
        return [handler.execution(event, generation) for handler in handlers if only is None or only == handler.name]

    async def dispatch(self, event: BaseEvent) -> list[Outcome[Any]]:
        """One try with every handler of `event`, at the same time; for callers without a worker.

        Each comes to its end; then the first error is raised, if there was one.
        """
        tries = (execution.attempt() for execution in self.executions(event))
        ends = await asyncio.gather(*tries, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return [end for end in ends if not isinstance(end, BaseException)]


class IdempotentEventDispatcher(EventDispatcher):
    """Runs each handler of a router once per key."""

    manager: IdempotencyManager
    ttl: timedelta
    resolver: KeyResolver
    """How keys are made."""

    def __init__(
        self,
        router: EventRouter,
        manager: IdempotencyManager,
        *,
        resolver: KeyResolver | None = None,
        ttl: Duration | None = None,
        invoke: Invoke = call_with_event,
        publisher: Publisher | None = None,
        timeout: Duration | None = None,
        outbox: Outbox | None = None,
        codec: Codec | None = None,
    ) -> None:
        """`resolver`: how keys are made, by event id if not given; `ttl`: how long outcomes are remembered;
        `codec`: how events lie in messages, if the settings have no name for it.

        Args:
            outbox: Makes the handlers transactional.  `invoke` runs each in a database transaction and awaits
                `before_commit` of its call in there: what the handler writes, its outgoing events (as rows of this
                outbox, for a relay to publish) and its outcome commit together.

        Raises:
            InvalidKeyError: The resolver can make no key of some event of the router.
        """
        self.manager = manager
        self.resolver = resolver or KeyResolver()
        self._ttl = duration(ttl, "ttl")
        self.outbox = outbox
        self.ttl = manager.config.ttl if self._ttl is None else self._ttl
        for event in router.events:
            self.resolver.check(event)
        super().__init__(
            router,
            scope=manager.scope,
            invoke=invoke,
            publisher=publisher,
            observer=manager.observer,
            timeout=timeout,
            max_attempts=manager.config.max_attempts,
            codec=codec,
        )

    def wrap(self, registered: RegisteredHandler) -> IdempotentEventHandler:
        return IdempotentEventHandler(
            registered.function,
            self.manager,
            resolver=self.resolver,
            ttl=self.ttl,
            name=registered.name,
            event=registered.event,
            invoke=self._invoke,
            publisher=self._publisher,
            timeout=self._timeout,
            outbox=self.outbox,
            batch=registered.batch,
        )


async def with_idempotency(
    event: BaseEvent,
    handler: HandlerFunction,
    manager: IdempotencyManager,
    *,
    key_strategy: KeyStrategy = KeyStrategy.EVENT_BASED,
    fields: set[str] | None = None,
    custom_key: str | None = None,
    ttl: Duration | None = None,
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
