"""Open the services of an application to compute their keys.  No handler runs, and nothing is consumed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from dishka import AsyncContainer

from integr8s_idem.config import IdempotencyConfig, Settings
from integr8s_idem.events import EventDecoder
from integr8s_idem.failures import FailureRule
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventHandler
from integr8s_idem.handlers.observing_dispatcher import ObservingEventHandler
from integr8s_idem.handlers.reconciliation import ReconcilingEventHandler
from integr8s_idem.keys import Key, KeySpace
from integr8s_idem.keys.event_keys import KeyStrategy
from integr8s_idem.operations.keys.key_parser import ParsedKey, split_generation
from integr8s_idem.runtime import Platform, Service
from integr8s_idem.runtime.containers import get_dispatcher, get_publisher, make_container
from integr8s_idem.runtime.service_group import CLOSE_SECONDS, section_of
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import as_it_is
from integr8s_idem.worker.client_options import bounded
from integr8s_idem.worker.consumer import codec_for, topics_read


@dataclass(frozen=True)
class RecordPlace:
    """Where a handler would store its record."""

    service: str
    handler: str
    event_type: str
    key: str
    """The full key."""
    expected: bool = True
    """Whether a missing record is worth reporting; false for keys that are only guesses."""


@dataclass(frozen=True)
class OpenService:
    """A service and the objects of its container."""

    name: str
    group: str
    topics: tuple[str, ...]
    dispatcher: EventDispatcher
    decoder: EventDecoder

    @property
    def repository(self) -> IdempotencyRepository | None:
        """The store; `None` if no handler is guarded."""
        return self.dispatcher.manager.repository if self.dispatcher.manager is not None else None

    @property
    def space(self) -> KeySpace | None:
        return self.dispatcher.manager.space if self.dispatcher.manager is not None else None

    @property
    def config(self) -> IdempotencyConfig | None:
        """The configuration of its manager."""
        return self.dispatcher.manager.config if self.dispatcher.manager is not None else None

    @property
    def guarded(self) -> list[IdempotentEventHandler | ObservingEventHandler]:
        """The handlers with records."""
        return [
            handler
            for handler in self.dispatcher.handlers
            if isinstance(handler, IdempotentEventHandler | ObservingEventHandler)
        ]

    def rules(self, handler: str, event_type: str) -> tuple[FailureRule, ...] | None:
        """Return the rules for errors of a handler, before the default ones; `None` if there is no such handler."""
        found = (each for each in self.dispatcher.handlers if (each.name, each.event_type) == (handler, event_type))
        return next((each.failures.rules for each in found), None)

    def reconciles(self, key: ParsedKey) -> bool:
        """Whether `key` belongs to a handler of this service that has a reconcile function."""
        return self.name == key.scope and any(
            isinstance(handler, ReconcilingEventHandler)
            and (handler.name, handler.event_type) == (key.handler, key.event_type)
            for handler in self.guarded
        )

    def places(self, text: str) -> Iterator[RecordPlace]:
        """Yield where records named `text` can be: an event's id, its label or a caller's key, or a generation."""
        name, generation = split_generation(text)
        yield from self._places(name, generation or 0)
        if generation is not None:  # which an id may only seem to end with
            yield from (replace(place, expected=False) for place in self._places(text, 0))

    def _places(self, name: str, generation: int) -> Iterator[RecordPlace]:
        space = self.space
        if space is None:
            return
        for handler in self.guarded:
            event_id = name.removeprefix(f"{handler.event_type}:")
            for value in dict.fromkeys((event_id, name)):
                strategy = handler.resolver.strategy
                key = Key.of_event(handler.name, handler.event_type, _SOURCES[strategy], value).in_generation(
                    generation
                )
                expected = strategy is KeyStrategy.EVENT_BASED and value == event_id
                yield RecordPlace(self.name, handler.name, handler.event_type, space.full(space.key(key)), expected)
        given = Key.of(name).in_generation(generation)
        yield RecordPlace(self.name, "", "", space.full(space.key(given)), expected=False)


_SOURCES = {KeyStrategy.EVENT_BASED: "id", KeyStrategy.CONTENT_HASH: "content", KeyStrategy.CUSTOM: "custom"}


@asynccontextmanager
async def open_services(platform: Platform, settings: Settings) -> AsyncIterator[list[OpenService]]:
    """Open the containers of all services of an application, and close them at the end of the block.

    The store is not modified.

    Raises:
        ApplicationError: A container lacks an object that its service needs.
        StoreError: The store refuses the connection.
    """
    async with AsyncExitStack() as stack:
        with as_it_is():
            services = [await _open(stack, service, settings) for service in platform.services.values()]
        yield services


async def _open(stack: AsyncExitStack, service: Service, settings: Settings) -> OpenService:
    container = make_container(service, settings)
    stack.push_async_callback(_close, container)
    dispatcher = await get_dispatcher(container, service.name)
    publisher = await get_publisher(container, service.name)
    section = section_of(service, settings)
    return OpenService(
        service.name,
        section.group_id or service.group_id or service.name,
        topics_read(section, dispatcher, publisher),
        dispatcher,
        EventDecoder(dispatcher.router.events, codec_for(section, dispatcher)),
    )


async def _close(container: AsyncContainer) -> None:
    await bounded(container.close(), CLOSE_SECONDS)
