"""The services of an application, made to be asked for their keys; no handler runs, and nothing is consumed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from dishka import AsyncContainer

from integr8s_idem.config import IdempotencyConfig, Settings
from integr8s_idem.events import EventDecoder
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventHandler
from integr8s_idem.keys import Key, KeySpace, KeyStrategy
from integr8s_idem.runtime import Platform, Service
from integr8s_idem.runtime.containers import get_dispatcher, get_publisher, make_container
from integr8s_idem.runtime.service_group import CLOSE_SECONDS, section_of
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import as_it_is
from integr8s_idem.worker.client_options import bounded
from integr8s_idem.worker.consumer import codec_for, topics_read


@dataclass(frozen=True)
class Place:
    """Where a handler keeps its record of some work, if it has one."""

    service: str
    handler: str
    event_type: str
    key: str
    """The full key."""
    expected: bool = True
    """Whether that there is no record says something; not so where the key was only guessed."""


@dataclass(frozen=True)
class OpenService:
    """A service, by what its container gives."""

    name: str
    group: str
    topics: tuple[str, ...]
    dispatcher: EventDispatcher
    decoder: EventDecoder

    @property
    def repository(self) -> IdempotencyRepository | None:
        """`None`: its handlers are not guarded."""
        return self.dispatcher.manager.repository if self.dispatcher.manager is not None else None

    @property
    def space(self) -> KeySpace | None:
        return self.dispatcher.manager.space if self.dispatcher.manager is not None else None

    @property
    def config(self) -> IdempotencyConfig | None:
        """As its manager has it."""
        return self.dispatcher.manager.config if self.dispatcher.manager is not None else None

    @property
    def guarded(self) -> list[IdempotentEventHandler]:
        return [handler for handler in self.dispatcher.handlers if isinstance(handler, IdempotentEventHandler)]

    def places(self, words: str, generation: int) -> Iterator[Place]:
        """Where the work that people call by these words can be: an event's id, its label, a caller's key."""
        space = self.space
        if space is None:
            return
        for handler in self.guarded:
            own = words.removeprefix(f"{handler.event_type}:")
            for value in dict.fromkeys((own, words)):
                strategy = handler.resolver.strategy
                key = Key.of_event(handler.name, handler.event_type, _HOW[strategy], value).in_generation(generation)
                expected = strategy is KeyStrategy.EVENT_BASED and value == own
                yield Place(self.name, handler.name, handler.event_type, space.full(space.key(key)), expected)
        given = Key.of(words).in_generation(generation)
        yield Place(self.name, "", "", space.full(space.key(given)), expected=False)


_HOW = {KeyStrategy.EVENT_BASED: "id", KeyStrategy.CONTENT_HASH: "content", KeyStrategy.CUSTOM: "custom"}


@asynccontextmanager
async def open_services(platform: Platform, settings: Settings) -> AsyncIterator[list[OpenService]]:
    """All services of an application, by their containers, closed at the end of the block.

    The store stays as it is, as for the doctor.

    Raises:
        ApplicationError: A container does not give what its service needs.
        StoreError: The store refuses us.
    """
    async with AsyncExitStack() as stack:
        with as_it_is():
            services = [await _opened(stack, service, settings) for service in platform.services.values()]
        yield services


async def _opened(stack: AsyncExitStack, service: Service, settings: Settings) -> OpenService:
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
