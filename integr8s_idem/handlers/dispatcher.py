"""Dispatch events to handlers.

`EventRouter` collects handlers, `EventDispatcher` runs them, and `IdempotentEventDispatcher` runs each of them once per
key.  Handlers do not depend on the dispatcher, which is chosen in the providers of a service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

from integr8s_idem.codecs import Codec
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.failure_policy import FailurePolicy
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.work import Outcome
from integr8s_idem.errors import ApplicationError
from integr8s_idem.events import BaseEvent
from integr8s_idem.failures import FailureRule, checked_rules
from integr8s_idem.handlers.handler import EventHandler, HandlerExecution, IdempotentEventHandler
from integr8s_idem.handlers.handler_calls import HandlerFunction, RegisteredHandler, call_with_event
from integr8s_idem.handlers.outgoing import Outgoing, Publisher
from integr8s_idem.handlers.reconciliation import ReconcilingEventHandler
from integr8s_idem.handlers.router import EventRouter, Invoke
from integr8s_idem.keys.event_keys import KeyResolver, KeyStrategy
from integr8s_idem.stores.outbox import OutboxStore
from integr8s_idem.telemetry import SILENT, Observer
from integr8s_idem.telemetry.log_fields import logging_as

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
    outbox: OutboxStore | None = None
    """Contains events of transactions, for a relay to publish."""
    ttl: timedelta | None = None
    """How long records are kept; `None` without records."""
    waits_for_store: bool = True
    """Whether a worker handles nothing while the store is unavailable."""

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
        failures: Iterable[FailureRule] = (),
    ) -> None:
        """Create a dispatcher for the handlers of `router`.

        Args:
            timeout: Maximum duration of a handler's run.
            max_attempts: Maximum attempts before an event fails for good.
            codec: Decodes messages, if the settings do not name a codec for them.
            failures: Rules for errors of handlers, after those of the handlers and their routers.
        """
        self.router = router
        self.codec = codec
        self.observer = observer
        self._scope = scope
        self._invoke = invoke
        self._publisher = publisher
        self._timeout = duration(timeout, "timeout")
        self._max_attempts = max_attempts
        self._failures = checked_rules(failures)
        self._handlers: dict[str, list[EventHandler]] = {}
        for registered in router.handlers:
            self._handlers.setdefault(registered.event_type, []).append(self.wrap(registered))

    @property
    def invoke(self) -> Invoke:
        """The function that calls handlers."""
        return self._invoke

    def invoke_with(self, invoke: Invoke) -> None:
        """Call handlers with `invoke` from now on."""
        self._invoke = invoke
        for handlers in self._handlers.values():
            for handler in handlers:
                handler.invoke = invoke

    def wrap(self, registered: RegisteredHandler) -> EventHandler:
        """Create the runnable handler; `IdempotentEventDispatcher` creates a guarded one.

        Raises:
            ApplicationError: The handler has a reconcile function, which needs the attempts of a guarded handler.
        """
        if registered.reconcile is not None:
            raise ApplicationError(
                f"handler {registered.name} has a reconcile function, which is asked only if the handler is guarded, "
                "because a plain dispatcher does not know of earlier attempts: use IdempotentDispatcherProvider, or "
                "remove reconcile=…"
            )
        return EventHandler(
            registered.function,
            scope=self._scope,
            observer=self.observer,
            max_attempts=self._max_attempts,
            **self._options_of(registered),
        )

    def _options_of(self, registered: RegisteredHandler) -> dict[str, Any]:
        """Return the options that all kinds of handlers take."""
        return {
            "name": registered.name,
            "event": registered.event,
            "invoke": self._invoke,
            "publisher": self._publisher,
            "timeout": self._timeout,
            "batch": registered.batch,
            "failures": self.policy(registered),
            "limit": registered.limit,
        }

    def policy(self, registered: RegisteredHandler) -> FailurePolicy:
        """Return all rules for errors of a handler."""
        return FailurePolicy((*registered.failures, *self._failures), schedules=registered.overtakes)

    @property
    def handlers(self) -> tuple[EventHandler, ...]:
        """All handlers."""
        return tuple(handler for handlers in self._handlers.values() for handler in handlers)

    @property
    def scope(self) -> str:
        """Name of the service."""
        return self._scope

    def executions(self, event: BaseEvent, generation: int = 0, only: str | None = None) -> list[HandlerExecution]:
        """Return an execution of `event` for each of its handlers.

        Args:
            generation: How many times the event was replayed; each generation has its own records.
            only: Name of the only handler to run; all handlers by default.

        Raises:
            InvalidKeyError: No key can be created for the event.
        """
        handlers = self._handlers.get(event.event_type, ())
        return [handler.execution(event, generation) for handler in handlers if only is None or only == handler.name]

    async def dispatch(self, event: BaseEvent) -> list[Outcome[Any]]:
        """Make one attempt with each handler of `event`, concurrently; for callers without a worker.

        If attempts raise errors, the first error is raised after all attempts have ended.
        """
        attempts = (_attempt(execution) for execution in self.executions(event))
        outcomes = await asyncio.gather(*attempts, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


async def _attempt(execution: HandlerExecution) -> Outcome[Any]:
    with logging_as(execution):
        return await execution.attempt()


class IdempotentEventDispatcher(EventDispatcher):
    """Runs each handler of a router once per key."""

    manager: IdempotencyManager
    ttl: timedelta
    resolver: KeyResolver
    """Creates the keys."""

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
        outbox: OutboxStore | None = None,
        codec: Codec | None = None,
        failures: Iterable[FailureRule] = (),
    ) -> None:
        """Create a dispatcher that guards the handlers of `router`.

        Args:
            resolver: Creates the keys; by default, from the event id.
            ttl: How long records are kept; by default, that of the manager's configuration.
            outbox: Makes the handlers transactional.  `invoke` runs each handler in a database transaction, in which it
                awaits `before_commit` of the call.  The handler's writes, its outgoing events (as rows of this outbox,
                for a relay to publish) and its outcome are committed together.
            codec: Decodes messages, if the settings do not name a codec for them.
            failures: Rules for errors of handlers, after those of the handlers and their routers.

        Raises:
            InvalidKeyError: The resolver cannot create a key for an event of the router.
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
            failures=failures,
        )

    def wrap(self, registered: RegisteredHandler) -> IdempotentEventHandler:
        make: Callable[..., IdempotentEventHandler] = IdempotentEventHandler
        if registered.reconcile is not None:
            make = partial(ReconcilingEventHandler, reconcile=registered.reconcile)
        return make(
            registered.function,
            self.manager,
            resolver=self.resolver,
            ttl=self.ttl,
            outbox=self.outbox,
            **self._options_of(registered),
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
    """Run `handler(event)` once; later calls with the same key return the first result.

    Args:
        fields: Fields that count for `content_hash`; all fields by default.
        custom_key: The key for `custom`.
        name: Name of the handler in its keys; by default, the function's name.

    Raises:
        IdempotencyError: The same errors as `IdempotencyManager.run`.
    """
    resolver = KeyResolver(
        key_strategy,
        frozenset(fields) if fields is not None else None,
        (lambda _: custom_key) if custom_key is not None else None,
    )
    resolver.check(type(event))
    return await IdempotentEventHandler(handler, manager, resolver=resolver, ttl=ttl, name=name)(event)
