"""What the container of each service holds, and which dispatcher it gets: looked at, and closed again.

The graph is that of Dishka's own plotter, from the outermost scope on.  Nothing is connected: stores are opened as they
are, brokers are not asked.
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
from integr8s_idem.integrations.handler_injection import name_of_dependencies
from integr8s_idem.runtime import Platform, Service
from integr8s_idem.runtime.containers import NO_DISPATCHER, build, explained, not_a_container
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import as_it_is
from integr8s_idem.worker.client_options import bounded

MAKE_SECONDS: Final = 15.0
"""Longest time for a dispatcher to be made, and for a container to close."""
DISPATCHER: Final = EventDispatcher.__name__
"""Name of the part that is the dispatcher."""
HANDLER: Final = "handler"
"""Kind of a part that is what a handler asks for."""
_KINDS: Final = {
    NodeType.CONTEXT: "context",
    NodeType.FACTORY: "factory",
    NodeType.DECORATOR: "decorator",
    NodeType.SELECTOR: "selector",
    NodeType.COLLECTION: "collection",
    NodeType.ALIAS: "alias",
}
_OF_DISHKA: Final = "HasProvider"
"""Answers Dishka's own questions about its context; of no interest where nobody asks."""
_CONTAINERS: Final = frozenset({"AsyncContainer", "Container"})
_WITHIN: Final = re.compile(r"[\w.]+\.<locals>\.")
"""Where a class or a function is defined within another function: of no use to readers."""


@dataclass(frozen=True)
class Part:
    """One thing that a container can give."""

    id: str
    """Unique among all parts of all services that are drawn together."""
    name: str
    kind: str
    """`factory`, `context` (put in from outside), `alias`, `decorator`, `selector`, `collection`, or `handler`."""
    provider: str
    """The class of Dishka's providers that makes it; empty where it is another thing."""
    source: str
    """What makes it: a method of its provider, a class, a function; empty for what is put in from outside."""
    component: str
    """Dishka's component, empty for the usual one."""
    needs: tuple[str, ...]
    """Ids of the parts that it is made of."""
    is_protocol: bool = False


@dataclass(frozen=True)
class Scope:
    """Parts that live as long as each other."""

    name: str
    """Dishka's: `RUNTIME`, `APP`, `SESSION`, `REQUEST`, or one of the application's own."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Handler:
    """A handler of the router."""

    event_type: str
    name: str
    takes_batches: bool


@dataclass(frozen=True)
class Dispatcher:
    """The dispatcher that the container of a service gives."""

    type: str
    is_idempotent: bool
    strategy: str | None = None
    """How keys are made, as `event_based`; with the fields that count, if they were named; `None` if it is plain."""
    ttl_seconds: float | None = None
    """How long outcomes are remembered; `None` if they are not."""
    is_transactional: bool = False
    """Whether outcomes commit together with what handlers write."""
    store: str | None = None
    """The kind of `[store]`, or the class of a store of the application's own; `None` if it is plain."""


@dataclass(frozen=True)
class ServiceGraph:
    """One service: what it runs, and what its container holds."""

    name: str
    group_id: str
    dispatcher: Dispatcher
    handlers: tuple[Handler, ...]
    scopes: tuple[Scope, ...]
    is_synchronous: bool = False
    """Whether its container is one that the worker refuses."""

    @property
    def parts(self) -> dict[str, Part]:
        """All of them, by id."""
        return {part.id: part for scope in self.scopes for part in scope.parts}


async def make_graphs(platform: Platform, settings: Settings, names: Sequence[str] = ()) -> list[ServiceGraph]:
    """The services named, or all.

    Raises:
        ApplicationError: A container cannot be made, or gives no dispatcher; the error says why.
    """
    services = enumerate(platform.choose(names), start=1)
    return [await _drawn(service, settings, f"s{number}") for number, service in services]


async def _drawn(service: Service, settings: Settings, prefix: str) -> ServiceGraph:
    with as_it_is() as opened:
        container = build(service, settings)
        if not isinstance(container, AsyncContainer | Container):
            raise not_a_container(service.name, container)
        try:
            with explained(service.name, NO_DISPATCHER):
                dispatcher = await _dispatcher_of(container)
            scopes = _scopes(container, dispatcher, prefix)
            told = _told(dispatcher, settings, opened)
        finally:
            await _close(container)
    handlers = tuple(
        Handler(handler.event_type, handler.name, handler.batch is not None) for handler in dispatcher.router.handlers
    )
    group = settings.service(service.name).group_id or service.group_id or service.name
    return ServiceGraph(service.name, group, told, handlers, scopes, isinstance(container, Container))


async def _dispatcher_of(container: AsyncContainer | Container) -> EventDispatcher:
    """The very one that the worker would get: only that tells what it is."""
    if isinstance(container, AsyncContainer):
        found: object = await bounded(container.get(EventDispatcher), MAKE_SECONDS)
    else:
        found = container.get(EventDispatcher)
    if not isinstance(found, EventDispatcher):
        raise ApplicationError(f"what it gives as EventDispatcher is a {type(found).__name__}")
    return found


async def _close(container: AsyncContainer | Container) -> None:
    if isinstance(container, AsyncContainer):
        await bounded(container.close(), MAKE_SECONDS)
    else:
        container.close()


def _told(dispatcher: EventDispatcher, settings: Settings, opened: Sequence[IdempotencyRepository]) -> Dispatcher:
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
        needed for group in groups for _, node in _nodes(group) if not _is_dishkas(node) for needed in node.dependencies
    }
    scopes = []
    for group in groups:
        found = [(component, node) for component, node in _nodes(group) if not _is_dishkas(node) or node.id in used]
        parts = tuple(_part(node, component, handlers, prefix) for component, node in found)
        if parts:
            scopes.append(Scope(group.name.rpartition(".")[2], parts))
    return tuple(scopes)


def _outermost(container: Any) -> AsyncContainer | Container:
    """Containers begin with the scope APP; what is put in from outside lies in the one before."""
    while container.parent_container is not None:
        container = container.parent_container
    found: AsyncContainer | Container = container
    return found


def _nodes(group: Group) -> Iterator[tuple[str, Node]]:
    """All nodes of a scope, with their components."""
    for component in group.children:
        for node in component.nodes:
            yield component.name, node


def _is_dishkas(node: Node) -> bool:
    return node.source_name.startswith(f"{_OF_DISHKA}.") or node.name in _CONTAINERS


def _part(node: Node, component: str, handlers: dict[str, str], prefix: str) -> Part:
    source = _WITHIN.sub("", node.source_name)
    is_handler = node.name in handlers
    return Part(
        id=f"{prefix}-{node.id}",
        name=handlers[node.name] if is_handler else _WITHIN.sub("", node.name),
        kind=HANDLER if is_handler else _KINDS[node.type],
        provider="" if is_handler else source.rpartition(".")[0],
        source=source,
        component=component,
        needs=tuple(f"{prefix}-{needed}" for needed in dict.fromkeys(node.dependencies)),
        is_protocol=node.is_protocol,
    )
