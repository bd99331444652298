"""Dishka: providers for everything the library has, and handlers with `FromDishka[...]` parameters.

    container = make_async_container(
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(router, ttl=timedelta(days=8)),
        context={Settings: settings, ServiceName: ServiceName("billing")},
        validation_settings=STRICT_VALIDATION,
    )

What handlers ask for is part of the container's graph: a handler whose dependency nobody provides is
refused when the container is made, in one sentence that names both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterable, Callable, Iterable
from datetime import timedelta
from typing import Annotated, Any, NewType, ParamSpec, TypeVar, cast, get_type_hints

from dishka import (
    STRICT_VALIDATION,
    AsyncContainer,
    FromComponent,
    FromDishka,
    Provider,
    Scope,
    from_context,
    provide,
)
from dishka import make_async_container as _make_async_container
from dishka.integrations.base import default_parse_dependency, wrap_injection
from redis.asyncio import Redis

from integr8s_idem._util.context_vars import CURRENT, OVERRIDING
from integr8s_idem.codecs import Codec
from integr8s_idem.config import IdempotencyConfig, Settings
from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.steps import Steps
from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import ApplicationError
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.router import (
    Batch,
    BatchCall,
    EventRouter,
    HandlerCall,
    HandlerFunction,
    Invoke,
    Outgoing,
    RegisteredHandler,
    returned_by,
)
from integr8s_idem.integrations.request_scope import scope_of_a_call
from integr8s_idem.integrations.transactions import Transactions
from integr8s_idem.keys import KeyResolver, KeyStrategy
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import open_store
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.telemetry import Observer
from integr8s_idem.telemetry.setup import observer_for
from integr8s_idem.worker import EventPublisher

__all__ = [
    "STRICT_VALIDATION",
    "AsyncContainer",
    "DispatcherProvider",
    "FromDishka",
    "IdempotencyProvider",
    "IdempotencyRedis",
    "IdempotentDispatcherProvider",
    "KafkaProvider",
    "ServiceName",
    "inject",
    "make_async_container",
    "setup_dishka",
]

P = ParamSpec("P")
T = TypeVar("T")

ServiceName = NewType("ServiceName", str)
"""The service a container belongs to: its scope in keys, its section in the settings, its name in metrics."""

IdempotencyRedis = NewType("IdempotencyRedis", Redis)
"""Our own client: a bare `Redis` here would silently replace the application's."""


def _with_overrides(make: Callable[P, AsyncContainer]) -> Callable[P, AsyncContainer]:
    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> AsyncContainer:
        overriding = OVERRIDING.get()
        more = overriding(args) if overriding is not None else ()
        return make(*args, *more, **kwargs)

    return made


make_async_container = _with_overrides(_make_async_container)
"""Dishka's own.  In a test, fakes can take the place of what its providers provide: `WorkerHarness` sees to that."""


class IdempotencyProvider(Provider):
    """The store by settings, and the `IdempotencyManager` of the service.  Opened at first use.

    Needs `Settings` and `ServiceName` in the container's context.
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
    def client(self, repository: IdempotencyRepository) -> IdempotencyRedis:
        if not isinstance(repository, RedisIdempotencyRepository):
            raise ApplicationError(f"there is no Redis client: the records are in {type(repository).__name__}")
        return IdempotencyRedis(repository.client)

    @provide
    async def manager(
        self,
        config: IdempotencyConfig,
        settings: Settings,
        service: ServiceName,
        repository: IdempotencyRepository,
    ) -> AsyncIterable[IdempotencyManager]:
        observer = observer_for(settings.telemetry, service)
        manager = IdempotencyManager(config, repository, observer, scope=service)
        yield manager
        await manager.close()


class KafkaProvider(Provider):
    """The `EventPublisher` of the service.  Needs `Settings` and `ServiceName` in the container's context."""

    scope = Scope.APP

    @provide
    async def publisher(self, settings: Settings, service: ServiceName) -> AsyncIterable[EventPublisher]:
        publisher = EventPublisher(settings.kafka, observer_for(settings.telemetry, service))
        yield publisher
        await publisher.close()


class DispatcherProvider(Provider):
    """A plain `EventDispatcher`: for handlers that are repeatable by nature.

    Handlers run in a REQUEST scope that holds their `BaseEvent`, `Attempt` and `Outgoing`; those of batches in one that
    holds their `Batch`.
    """

    scope = Scope.APP
    event = from_context(BaseEvent, scope=Scope.REQUEST)
    attempt = from_context(Attempt, scope=Scope.REQUEST)
    outgoing = from_context(Outgoing, scope=Scope.REQUEST)
    batch = from_context(Batch, scope=Scope.REQUEST)

    def __init__(self, router: EventRouter, *, codec: Codec | None = None) -> None:
        """`codec`: how events lie in messages, if the settings have no name for it."""
        super().__init__()
        self.router = router
        self.codec = codec
        self._needs = {handler.function: _needs_of(handler.function) for handler in router.handlers}
        for needs in self._needs.values():
            self.provide(needs.make, provides=needs.key, scope=Scope.REQUEST)

    @provide
    def observer(self, settings: Settings, service: ServiceName) -> Observer:
        # Here, since every service has one dispatcher provider, and a type may have one provider only.
        return observer_for(settings.telemetry, service, group=settings.service(service).group_id)

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
        )

    def invoker(self, container: AsyncContainer) -> Invoke:
        """Calls handlers in a REQUEST scope of `container`."""
        return _invoker(container, self._needs)


class IdempotentDispatcherProvider(DispatcherProvider):
    """An `IdempotentEventDispatcher`: each handler runs once per key.  Needs `IdempotencyProvider` beside it.

    Handlers run in a REQUEST scope that holds their `Steps` besides.
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
    ) -> None:
        """How keys are made, and how long outcomes are remembered: the settings' ttl if not given.

        Args:
            fields: For `content_hash`: only these fields count.
            custom_key: For `custom`: makes the key from the event.
            transaction: Makes handlers transactional: what they write by the `AsyncSession` or `AsyncConnection`
                of their REQUEST scope, their outgoing events and their outcome commit together.  Which of the two
                it is; its provider commits behind its `yield`.  Needs a store in the same SQL database.
            codec: How events lie in messages, if the settings have no name for it.

        Raises:
            InvalidKeyError: Strategy, fields and custom key contradict each other or the router's events.
        """
        super().__init__(router, codec=codec)
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
    ) -> EventDispatcher:
        return IdempotentEventDispatcher(
            self.router,
            manager,
            resolver=self.resolver,
            ttl=self.ttl,
            invoke=self.invoker(container),
            publisher=publisher,
            timeout=handler_timeout(settings, service),
            outbox=self._transactions.open(manager.repository) if self._transactions is not None else None,
            codec=self.codec,
        )

    @provide(scope=Scope.REQUEST)
    def steps(self, manager: IdempotencyManager) -> Steps:
        return manager.steps()

    def invoker(self, container: AsyncContainer) -> Invoke:
        if self._transactions is None:
            return super().invoker(container)
        return _transactional_invoker(container, self._needs, self._transactions)


def handler_timeout(settings: Settings, service: str) -> timedelta | None:
    """The longest run of one handler of `service`; `None` if there is no limit."""
    seconds = settings.service(service).handler_timeout_seconds
    return timedelta(seconds=seconds) if seconds is not None else None


def name_of_needs(function: HandlerFunction) -> str:
    """What the entry of a handler is called in the graph of its container."""
    return f"what {function.__qualname__} asks for"


class _Needs:
    """What a handler asks its container for, as one entry of the graph: checked once, fetched at once."""

    def __init__(self, function: HandlerFunction, parameters: dict[str, Any]) -> None:
        self.key = type(name_of_needs(function), (dict,), {"__module__": function.__module__})

        def make(**found: Any) -> Any:
            return self.key(found)

        make.__name__ = make.__qualname__ = function.__qualname__
        make.__module__ = function.__module__
        make.__annotations__ = {**parameters, "return": self.key}
        make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint)
                for name, hint in parameters.items()
            ]
        )
        self.make = make


def _needs_of(function: HandlerFunction) -> _Needs:
    hints = _hints_of(function)
    parameters: dict[str, Any] = {}
    plain: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        key = default_parse_dependency(parameter, hints.get(name, Any))
        if key is None:
            plain.append(name)
        else:
            hint = key.type_hint
            parameters[name] = Annotated[hint, FromComponent(key.component)] if key.component else hint
    if len(plain) != 1:
        raise ApplicationError(
            f"handler {function.__qualname__} takes its event and FromDishka[...] parameters; "
            f"these are neither: {', '.join(plain[1:]) or '(there is no parameter for the event)'}"
        )
    return _Needs(function, parameters)


def _hints_of(function: HandlerFunction) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ApplicationError(
            f'handler {function.__qualname__}: its annotations name "{error.name}", which module '
            f"{function.__module__} does not define at run time; import it there, not only under TYPE_CHECKING"
        ) from None


def _context(call: HandlerCall | BatchCall) -> dict[Any, Any]:
    if isinstance(call, BatchCall):
        return {Batch: call.batch}
    return {BaseEvent: call.event, Attempt: call.attempt, Outgoing: call.outgoing}


def _invoker(container: AsyncContainer, needs: dict[HandlerFunction, _Needs]) -> Invoke:
    async def invoke(handler: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        async with scope_of_a_call(container(_context(call))) as request:
            return await _call(request, needs, handler, call)

    return invoke


def _transactional_invoker(
    container: AsyncContainer, needs: dict[HandlerFunction, _Needs], transactions: Transactions
) -> Invoke:
    async def invoke(handler: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        assert isinstance(call, HandlerCall), "a batch handler has no transaction: it is refused when it is made"
        async with transactions.scope(container(_context(call)), call) as begun:
            result = await _call(begun.request, needs, handler, call)
            await begun.writer(result)
        return result

    return invoke


async def _call(
    request: AsyncContainer,
    needs: dict[HandlerFunction, _Needs],
    handler: RegisteredHandler,
    call: HandlerCall | BatchCall,
) -> Any:
    token = CURRENT.set(request)
    try:
        found: dict[str, Any] = await request.get(needs[handler.function].key)
        await call.check_start()
        return returned_by(handler, await handler.function(call.argument, **found))
    finally:
        CURRENT.reset(token)


def _current_container(_args: object, _kwargs: object) -> AsyncContainer:
    try:
        return cast("AsyncContainer", CURRENT.get())
    except LookupError:
        raise ApplicationError(
            "no event is being handled here, whose container could fill in FromDishka[…]: @inject of "
            "integr8s_idem.integrations.dishka is for what a handler calls; elsewhere take the one of your framework"
        ) from None


def inject(function: Callable[P, T]) -> Callable[P, T]:
    """Fill the `FromDishka[...]` parameters of an async function that is called while an event is handled.

    Handlers of a router need it not.
    """
    return wrap_injection(
        func=function,
        is_async=True,
        container_getter=_current_container,
        remove_depends=True,
    )


def setup_dishka(container: AsyncContainer, dispatcher: EventDispatcher) -> None:
    """Let handlers of a dispatcher made by hand have their dependencies from `container`.

    The container must know `Attempt`, `Outgoing` and `BaseEvent` from the context of its REQUEST scope, where
    handlers ask for them; what handlers need is fetched one by one and not checked beforehand.
    """
    wrapped = {handler.function: _filled(handler.function) for handler in dispatcher.router.handlers}

    async def invoke(handler: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        async with scope_of_a_call(container(_context(call))) as request:
            token = CURRENT.set(request)
            try:
                await call.check_start()
                return returned_by(handler, await wrapped[handler.function](call.argument))
            finally:
                CURRENT.reset(token)

    dispatcher.invoke_with(invoke)


def _filled(function: HandlerFunction) -> HandlerFunction:
    return functools.wraps(function)(inject(function))
