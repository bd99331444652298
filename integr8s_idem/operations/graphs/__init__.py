"""Dependency graphs of the services' containers.

The graph comes from Dishka's plotter, starting at the outermost scope.  No connections are opened: stores are not
modified, and brokers are not contacted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dishka import AsyncContainer, Container
from dishka.plotter.model import Group, Node, NodeType
from dishka.plotter.transform import Transformer

from integr8s_idem.config import Settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.handler_calls import RegisteredHandler
from integr8s_idem.integrations.handler_injection import name_of_dependencies
from integr8s_idem.runtime import Platform, Service
from integr8s_idem.runtime.containers import NO_DISPATCHER, build, explained, not_a_container
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import as_it_is
from integr8s_idem.worker.client_options import bounded

MAKE_SECONDS: Final = 15.0
"""Timeout for creating a dispatcher, and for closing a container."""
DISPATCHER: Final = EventDispatcher.__name__
"""Name of the dispatcher's part."""
HANDLER: Final = "handler"
"""Kind of a part that represents the dependencies of a handler."""
_KINDS: Final = {
    NodeType.CONTEXT: "context",
    NodeType.FACTORY: "factory",
    NodeType.DECORATOR: "decorator",
    NodeType.SELECTOR: "selector",
    NodeType.COLLECTION: "collection",
    NodeType.ALIAS: "alias",
}
_INTERNAL_PROVIDER: Final = "HasProvider"
"""Dishka's internal provider; hidden unless another part depends on it."""
_CONTAINERS: Final = frozenset({"AsyncContainer", "Container"})
_LOCAL_PREFIX: Final = re.compile(r"[\w.]+\.<locals>\.")
"""Prefix of classes and functions that are defined in another function."""


@dataclass(frozen=True)
class Part:
    """An object that a container provides."""

    id: str
    """Unique among all parts of all services."""
    name: str
    kind: str
    """`factory`, `context` (passed from outside), `alias`, `decorator`, `selector`, `collection` or `handler`."""
    provider: str
    """The provider class that creates it; empty if it has none."""
    source: str
    """The method, class or function that creates it; empty for context."""
    component: str
    """Dishka's component; empty for the default component."""
    needs: tuple[str, ...]
    """Ids of its dependencies."""
    is_protocol: bool = False


@dataclass(frozen=True)
class Scope:
    """Parts with the same lifetime."""

    name: str
    """Dishka's scope: `RUNTIME`, `APP`, `SESSION`, `REQUEST`, or a custom scope."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Handler:
    """A handler of the router."""

    event_type: str
    name: str
    takes_batches: bool
    failures: tuple[str, ...] = ()
    """Its rules for errors, in order, without the default ones: `retry(TransportError, attempts=20)`."""


@dataclass(frozen=True)
class Dispatcher:
    """The dispatcher that a container provides."""

    type: str
    is_idempotent: bool
    strategy: str | None = None
    """The key strategy, such as `event_based`, with its fields if they were named; `None` if not idempotent."""
    ttl_seconds: float | None = None
    """How long outcomes are kept; `None` if not idempotent."""
    is_transactional: bool = False
    """Whether outcomes are committed in the handlers' transactions."""
    store: str | None = None
    """The kind of `[store]`, or the class of the application's store; `None` if not idempotent."""


@dataclass(frozen=True)
class ServiceGraph:
    """A service with its dispatcher, its handlers and the parts of its container."""

    name: str
    group_id: str
    dispatcher: Dispatcher
    handlers: tuple[Handler, ...]
    scopes: tuple[Scope, ...]
    is_synchronous: bool = False
    """Whether its container is synchronous, which the worker refuses."""

    @property
    def parts(self) -> dict[str, Part]:
        """All parts by id."""
        return {part.id: part for scope in self.scopes for part in scope.parts}


async def make_graphs(platform: Platform, settings: Settings, names: Sequence[str] = ()) -> list[ServiceGraph]:
    """Return the graphs of the named services, or of all services.

    Raises:
        ApplicationError: A container cannot be created, or provides no dispatcher.
    """
    services = enumerate(platform.choose(names), start=1)
    return [await _make_graph(service, settings, f"s{number}") for number, service in services]


async def _make_graph(service: Service, settings: Settings, prefix: str) -> ServiceGraph:
    with as_it_is() as opened:
        container = build(service, settings)
        if not isinstance(container, AsyncContainer | Container):
            raise not_a_container(service.name, container)
        try:
            with explained(service.name, NO_DISPATCHER):
                dispatcher = await _dispatcher_of(container)
            scopes = _scopes(container, dispatcher, prefix)
            description = _describe(dispatcher, settings, opened)
            handlers = tuple(_handler(handler, dispatcher) for handler in dispatcher.router.handlers)
        finally:
            await _close(container)
    group = settings.service(service.name).group_id or service.group_id or service.name
    return ServiceGraph(service.name, group, description, handlers, scopes, isinstance(container, Container))


def _handler(handler: RegisteredHandler, dispatcher: EventDispatcher) -> Handler:
    rules = tuple(str(rule) for rule in dispatcher.policy(handler).rules)
    return Handler(handler.event_type, handler.name, handler.batch is not None, rules)


async def _dispatcher_of(container: AsyncContainer | Container) -> EventDispatcher:
    """Return the dispatcher that the worker would get."""
    if isinstance(container, AsyncContainer):
        found: object = await bounded(container.get(EventDispatcher), MAKE_SECONDS)
    else:
        found = container.get(EventDispatcher)
    if not isinstance(found, EventDispatcher):
        raise ApplicationError(f"its EventDispatcher is a {type(found).__name__}")
    return found


async def _close(container: AsyncContainer | Container) -> None:
    if isinstance(container, AsyncContainer):
        await bounded(container.close(), MAKE_SECONDS)
    else:
        container.close()


def _describe(dispatcher: EventDispatcher, settings: Settings, opened: Sequence[IdempotencyRepository]) -> Dispatcher:
    name = type(dispatcher).__name__
    if not isinstance(dispatcher, IdempotentEventDispatcher):
        return Dispatcher(name, is_idempotent=False)
    resolver, repository = dispatcher.resolver, dispatcher.manager.repository
    fields = f" of {', '.join(sorted(resolver.fields))}" if resolver.fields is not None else ""
    is_set = any(repository is one for one in opened)
    return Dispatcher(
        name,
        is_idempotent=True,
        strategy=f"{resolver.strategy.value}{fields}",
        ttl_seconds=dispatcher.ttl.total_seconds(),
        is_transactional=dispatcher.outbox is not None,
        store=settings.store.kind if is_set else type(repository).__name__,
    )


def _scopes(container: AsyncContainer | Container, dispatcher: EventDispatcher, prefix: str) -> tuple[Scope, ...]:
    handlers = {name_of_dependencies(handler.function): handler.name for handler in dispatcher.router.handlers}
    groups = Transformer().transform(_outermost(container))
    used = {
        needed
        for group in groups
        for _, node in _nodes(group)
        if not _is_internal(node)
        for needed in node.dependencies
    }
    scopes = []
    for group in groups:
        found = [(component, node) for component, node in _nodes(group) if not _is_internal(node) or node.id in used]
        parts = tuple(_part(node, component, handlers, prefix) for component, node in found)
        if parts:
            scopes.append(Scope(group.name.rpartition(".")[2], parts))
    return tuple(scopes)


def _outermost(container: Any) -> AsyncContainer | Container:
    """Return the outermost container.  Containers start in scope APP; context is in the scope above."""
    while container.parent_container is not None:
        container = container.parent_container
    found: AsyncContainer | Container = container
    return found


def _nodes(group: Group) -> Iterator[tuple[str, Node]]:
    """Yield all nodes of a scope with their components."""
    for component in group.children:
        for node in component.nodes:
            yield component.name, node


def _is_internal(node: Node) -> bool:
    return node.source_name.startswith(f"{_INTERNAL_PROVIDER}.") or node.name in _CONTAINERS


def _part(node: Node, component: str, handlers: dict[str, str], prefix: str) -> Part:
    source = _LOCAL_PREFIX.sub("", node.source_name)
    is_handler = node.name in handlers
    return Part(
        id=f"{prefix}-{node.id}",
        name=handlers[node.name] if is_handler else _LOCAL_PREFIX.sub("", node.name),
        kind=HANDLER if is_handler else _KINDS[node.type],
        provider="" if is_handler else source.rpartition(".")[0],
        source=source,
        component=component,
        needs=tuple(f"{prefix}-{needed}" for needed in dict.fromkeys(node.dependencies)),
        is_protocol=node.is_protocol,
    )
