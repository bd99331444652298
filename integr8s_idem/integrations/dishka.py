"""Dishka providers for the library, and handlers with `FromDishka[...]` parameters.

    Service(
        "billing",
        providers=[
            IdempotencyProvider(),                                              # store and manager
            KafkaProvider(),                                                    # publisher
            IdempotentDispatcherProvider(router, ttl=timedelta(days=8)),        # runs each handler once per event
            PaymentsProvider(),                                                 # your own provider
        ],
    )

A `Service` makes its container from these providers, a `TelemetryProvider` and an `EventContextProvider`.  If you make
a container yourself, add the latter two, and put `Settings` and `ServiceName` in its context.

The dependencies of handlers are part of the container's graph: making a container with a handler whose dependencies are
missing raises an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterable, Callable, Iterable
from datetime import timedelta
from typing import Any, NewType, ParamSpec, TypeVar, cast

from dishka import AsyncContainer, FromDishka, Provider, Scope, from_context, provide
from dishka.entities.marker import BaseMarker
from dishka.entities.scope import BaseScope
from dishka.integrations.base import wrap_injection

from integr8s_idem._util.context_vars import CURRENT
from integr8s_idem.codecs import Codec
from integr8s_idem.config import IdempotencyConfig, Settings
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.steps import Steps, UnrecordedSteps
from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import ApplicationError, SettingsError
from integr8s_idem.events import BaseEvent
from integr8s_idem.failures import FailureRule
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.failure_settings import check_failures, rules_of
from integr8s_idem.handlers.handler_calls import (
    Batch,
    BatchCall,
    HandlerCall,
    HandlerFunction,
    RegisteredHandler,
    returned_by,
)
from integr8s_idem.handlers.observing_dispatcher import ObservingEventDispatcher
from integr8s_idem.handlers.outgoing import Outgoing
from integr8s_idem.handlers.router import EventRouter, Invoke
from integr8s_idem.integrations.handler_injection import context_of, dependencies_of, invoker, transactional_invoker
from integr8s_idem.integrations.request_scope import scope_of_a_call
from integr8s_idem.integrations.transactions import TransactionResources, Transactions
from integr8s_idem.keys.event_keys import KeyResolver, KeyStrategy
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import open_store
from integr8s_idem.telemetry import Observer
from integr8s_idem.telemetry.setup import observer_for
from integr8s_idem.worker import EventPublisher

__all__ = [
    "DispatcherProvider",
    "EventContextProvider",
    "FromDishka",
    "IdempotencyProvider",
    "IdempotentDispatcherProvider",
    "KafkaProvider",
    "OutboxProvider",
    "ServiceName",
    "TelemetryProvider",
    "inject",
    "setup_dishka",
]

P = ParamSpec("P")
T = TypeVar("T")

ServiceName = NewType("ServiceName", str)
"""Name of the service of a container: the scope in keys, the section in the settings, the name in metrics."""

ServiceMode = NewType("ServiceMode", str)
"""The mode of the service of a container: `enforce` or `observe`.  Read once, for the steps of each handler call."""


class TelemetryProvider(Provider):
    """Provides the `Observer` that the manager, publisher, dispatcher and worker of a service share.

    Needs `Settings` and `ServiceName` in the container's context.
    """

    scope = Scope.APP

    def __init__(
        self,
        *,
        group_id: str | None = None,
        scope: BaseScope | None = None,
        component: str | None = None,
        when: BaseMarker | None = None,
    ) -> None:
        """
        Args:
            group_id: Consumer group that spans name where the settings do not; the service's name if not given.
            scope: As for Dishka's `Provider`.
            component: As for Dishka's `Provider`.
            when: As for Dishka's `Provider`.
        """
        super().__init__(scope=scope, component=component, when=when)
        self._group_id = group_id

    @provide
    def observer(self, settings: Settings, service: ServiceName) -> Observer:
        group = settings.service(service).group_id or self._group_id
        return observer_for(settings.telemetry, service, group=group, kafka=settings.kafka)


class EventContextProvider(Provider):
    """Provides the context of a handler call: `BaseEvent`, `Attempt` and `Outgoing`, or `Batch` for batch handlers."""

    scope = Scope.REQUEST
    event = from_context(BaseEvent)
    attempt = from_context(Attempt)
    outgoing = from_context(Outgoing)
    batch = from_context(Batch)


class IdempotencyProvider(Provider):
    """Provides the configured store and the `IdempotencyManager` of the service.  Opened at first use.

    Needs `Settings` and `ServiceName` in the container's context, and a `TelemetryProvider`.
    """

    scope = Scope.APP

    @provide
    def config(self, settings: Settings, service: ServiceName) -> IdempotencyConfig:
        return settings.idempotency_for(service)

    @provide
    async def repository(self, settings: Settings, config: IdempotencyConfig) -> AsyncIterable[IdempotencyRepository]:
        async with open_store(settings.store, key_prefix=config.key_prefix) as repository:
            yield repository

    @provide
    async def manager(
        self,
        config: IdempotencyConfig,
        service: ServiceName,
        repository: IdempotencyRepository,
        observer: Observer,
    ) -> AsyncIterable[IdempotencyManager]:
        manager = IdempotencyManager(config, repository, observer, scope=service)
        yield manager
        await manager.close()


class KafkaProvider(Provider):
    """Provides the `EventPublisher` of the service.  Needs a `TelemetryProvider`, and `Settings` in the context."""

    scope = Scope.APP

    @provide
    async def publisher(self, settings: Settings, observer: Observer) -> AsyncIterable[EventPublisher]:
        publisher = EventPublisher(settings.kafka, observer)
        yield publisher
        await publisher.close()


class OutboxProvider(Provider):
    """Provides the `Outbox` of `integr8s_idem.integrations.sqlalchemy`, for handlers, endpoints and other plain code.

    Needs `Settings` and `ServiceName` in the container's context, and a `TelemetryProvider`.  Write with a session of
    the REQUEST scope: `async with outbox(session) as out`.
    """

    scope = Scope.APP

    def __init__(
        self, *, scope: BaseScope | None = None, component: str | None = None, when: BaseMarker | None = None
    ) -> None:
        """
        Args:
            scope: As for Dishka's `Provider`.
            component: As for Dishka's `Provider`.
            when: As for Dishka's `Provider`.
        """
        from integr8s_idem.integrations.sqlalchemy import Outbox  # needs an extra

        super().__init__(scope=scope, component=component, when=when)

        def outbox(settings: Settings, service: ServiceName, observer: Observer) -> Any:
            return Outbox(settings, service=service, observer=observer)

        self.provide(outbox, provides=Outbox)


class DispatcherProvider(Provider):
    """Provides a plain `EventDispatcher`, for handlers that may safely run more than once.

    Each handler call has its own REQUEST scope, with the objects of `EventContextProvider`.
    """

    scope = Scope.APP

    def __init__(
        self,
        router: EventRouter,
        *,
        codec: Codec | None = None,
        scope: BaseScope | None = None,
        component: str | None = None,
        when: BaseMarker | None = None,
    ) -> None:
        """
        Args:
            router: The handlers.
            codec: How events lie in messages, if the settings have no name for it.
            scope: As for Dishka's `Provider`.
            component: As for Dishka's `Provider`.
            when: As for Dishka's `Provider`.
        """
        super().__init__(scope=scope, component=component, when=when)
        self.router = router
        self.codec = codec
        functions = dict.fromkeys(function for handler in router.handlers for function in handler.functions)
        self._dependencies = {function: dependencies_of(function) for function in functions}
        for dependencies in self._dependencies.values():
            self.provide(dependencies.make, provides=dependencies.key, scope=Scope.REQUEST)

    @provide
    def dispatcher(
        self,
        settings: Settings,
        service: ServiceName,
        container: AsyncContainer,
        publisher: EventPublisher,
        observer: Observer,
    ) -> EventDispatcher:
        return EventDispatcher(
            self.router,
            scope=service,
            invoke=self.invoker(container),
            publisher=publisher,
            observer=observer,
            timeout=handler_timeout(settings, service),
            max_attempts=settings.idempotency_for(service).max_attempts,
            codec=self.codec,
            failures=failure_rules(settings, service),
        )

    def invoker(self, container: AsyncContainer) -> Invoke:
        """Return a function that calls handlers in a REQUEST scope of `container`.

        Raises:
            ApplicationError: A handler was registered after this provider was made.
        """
        self._check_handlers()
        return invoker(container, self._dependencies)

    def _check_handlers(self) -> None:
        for handler in self.router.handlers:
            if handler.function not in self._dependencies:
                raise ApplicationError(
                    f"handler {handler.name} was registered after {type(self).__name__}(router) was made, so its "
                    "dependencies are unknown: import the modules of all handlers first, or give the service a "
                    "function, providers=lambda settings: […]"
                )


class IdempotentDispatcherProvider(DispatcherProvider):
    """Provides an `IdempotentEventDispatcher`, which runs each handler once per key.  Needs `IdempotencyProvider`.

    The REQUEST scope of a handler also provides `Steps`.
    """

    def __init__(
        self,
        router: EventRouter,
        *,
        key_strategy: KeyStrategy = KeyStrategy.EVENT_BASED,
        fields: Iterable[str] | None = None,
        custom_key: Callable[[Any], str] | None = None,
        ttl: Duration | None = None,
        transaction: type | None = None,
        codec: Codec | None = None,
        scope: BaseScope | None = None,
        component: str | None = None,
        when: BaseMarker | None = None,
    ) -> None:
        """
        Args:
            router: The handlers.
            key_strategy: How keys are made.
            fields: For `content_hash`: the fields to hash.
            custom_key: For `custom`: returns the key of an event.
            ttl: How long outcomes are kept; the settings' ttl if not given.
            transaction: `AsyncSession` or `AsyncConnection`, to make handlers transactional: their writes by that
                object of the REQUEST scope, their outgoing events and their outcome commit together.  Its provider
                must commit after its `yield`.  Needs a store in the same SQL database.
            codec: How events lie in messages, if the settings have no name for it.
            scope: As for Dishka's `Provider`.
            component: As for Dishka's `Provider`.
            when: As for Dishka's `Provider`.

        Raises:
            InvalidKeyError: Strategy, fields and custom key contradict each other or the router's events.
        """
        super().__init__(router, codec=codec, scope=scope, component=component, when=when)
        self._transactions = Transactions(transaction) if transaction is not None else None
        if self._transactions is not None:
            self.provide(self._transactions.make, provides=self._transactions.key, scope=Scope.REQUEST)
        self.resolver = KeyResolver(key_strategy, frozenset(fields) if fields is not None else None, custom_key)
        self.ttl = duration(ttl, "ttl")
        for event in router.events:
            self.resolver.check(event)

    @provide
    def dispatcher(
        self,
        settings: Settings,
        service: ServiceName,
        container: AsyncContainer,
        publisher: EventPublisher,
        manager: IdempotencyManager,
        transactions: TransactionResources,
    ) -> EventDispatcher:
        kind: type[IdempotentEventDispatcher | ObservingEventDispatcher] = IdempotentEventDispatcher
        invoke = self.invoker(container)
        if only_observes(settings, service):
            kind, invoke = ObservingEventDispatcher, super().invoker(container)
        return kind(
            self.router,
            manager,
            resolver=self.resolver,
            ttl=self.ttl,
            invoke=invoke,
            publisher=publisher,
            timeout=handler_timeout(settings, service),
            outbox=transactions.outbox,
            codec=self.codec,
            failures=failure_rules(settings, service),
        )

    @provide
    def transactions(self, manager: IdempotencyManager) -> TransactionResources:
        return self._transactions.open(manager.repository) if self._transactions is not None else TransactionResources()

    @provide
    def mode(self, settings: Settings, service: ServiceName) -> ServiceMode:
        return ServiceMode(settings.service(service).mode)

    @provide(scope=Scope.REQUEST)
    def steps(self, manager: IdempotencyManager, mode: ServiceMode) -> Steps:
        return UnrecordedSteps() if mode == "observe" else manager.steps()

    @property
    def is_transactional(self) -> bool:
        """Whether the handlers are transactional, unless the service only observes."""
        return self._transactions is not None

    def invoker(self, container: AsyncContainer) -> Invoke:
        if self._transactions is None:
            return super().invoker(container)
        self._check_handlers()
        return transactional_invoker(container, self._dependencies, self._transactions)


def handler_timeout(settings: Settings, service: str) -> timedelta | None:
    """Return the time limit of one handler call of `service`; `None` if there is no limit."""
    seconds = settings.service(service).handler_timeout_seconds
    return timedelta(seconds=seconds) if seconds is not None else None


def only_observes(settings: Settings, service: str) -> bool:
    """Whether `service` runs its handlers unguarded, and counts duplicates."""
    return settings.service(service).mode == "observe"


def failure_rules(settings: Settings, service: str) -> tuple[FailureRule, ...]:
    """Return the rules for errors of handlers in the settings of `service`.

    Raises:
        SettingsError: The name of an error is not that of an exception.
    """
    if mistakes := check_failures(settings, [service]):
        raise SettingsError(f"the settings of service {service}", mistakes)
    return rules_of(settings.service(service).failures)


def _current_container(_args: object, _kwargs: object) -> AsyncContainer:
    try:
        return cast("AsyncContainer", CURRENT.get())
    except LookupError:
        raise ApplicationError(
            "no event is being handled, so there is no container for FromDishka[…]: use @inject of "
            "integr8s_idem.integrations.dishka only for functions called by handlers, and elsewhere that of your "
            "framework"
        ) from None


def inject(function: Callable[P, T]) -> Callable[P, T]:
    """Inject the `FromDishka[...]` parameters of an async function that is called while an event is handled.

    Handlers of a router do not need it.
    """
    return wrap_injection(
        func=function,
        is_async=True,
        container_getter=_current_container,
        remove_depends=True,
    )


def setup_dishka(container: AsyncContainer, dispatcher: EventDispatcher) -> None:
    """Inject dependencies from `container` into the handlers of a dispatcher that you made yourself.

    Add an `EventContextProvider` to the container if handlers use `Attempt`, `Outgoing` or `BaseEvent`.
    Dependencies are resolved when a handler is called, and not checked earlier.
    """
    functions = dict.fromkeys(function for handler in dispatcher.router.handlers for function in handler.functions)
    wrapped = {function: _injected(function) for function in functions}

    async def invoke(handler: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        async with scope_of_a_call(container(context_of(call))) as request:
            token = CURRENT.set(request)
            try:
                await call.check_start()
                return returned_by(handler, await wrapped[handler.function](call.argument))
            finally:
                CURRENT.reset(token)

    dispatcher.invoke_with(invoke)


def _injected(function: HandlerFunction) -> HandlerFunction:
    if isinstance(function, functools.partial):
        return functools.partial(_injected(function.func), *function.args, **function.keywords)
    if not inspect.isroutine(function):
        return _injected(cast("Any", function).__call__)  # of a callable object
    injected = inject(function)
    # A function without such parameters is returned unchanged, and must not be said to wrap itself.
    return injected if injected is function else functools.wraps(function)(injected)
