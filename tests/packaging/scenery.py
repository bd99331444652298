"""Helpers that hidden code on documentation pages imports: see `tests/packaging/snippets.py`."""

from __future__ import annotations

from typing import Any

from aiokafka import AIOKafkaProducer
from dishka import AsyncContainer, Provider, make_async_container

from integr8s_idem import BaseEvent, EventDispatcher, EventRouter, Settings
from integr8s_idem.config import MemoryStoreSettings
from integr8s_idem.engine.work import Outcome
from integr8s_idem.integrations.dishka import (
    EventContextProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    TelemetryProvider,
)
from tests.support.conditions import eventually
from tests.support.http_server import serving

__all__ = ["MEMORY", "container_of", "delivered", "eventually", "produce", "serving"]

MEMORY = Settings(store=MemoryStoreSettings(kind="memory"))


def container_of(
    router: EventRouter, *providers: Provider, settings: Settings = MEMORY, transaction: type | None = None
) -> AsyncContainer:
    """Create the container of a guarded service."""
    return make_async_container(
        TelemetryProvider(),
        EventContextProvider(),
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(router, transaction=transaction),
        *providers,
        context={Settings: settings, ServiceName: ServiceName("shop")},
    )


async def delivered(container: AsyncContainer, event: BaseEvent) -> list[Outcome[Any]]:
    """Deliver an event once, and return the outcome of each handler."""
    return await (await container.get(EventDispatcher)).dispatch(event)


async def produce(servers: str, topic: str, *bodies: str) -> None:
    """Produce messages to one partition; the header `event_id` of each is its body."""
    producer = AIOKafkaProducer(bootstrap_servers=servers)
    await producer.start()
    for body in bodies:
        await producer.send_and_wait(topic, body.encode(), key=b"1", headers=[("event_id", body.encode())])
    await producer.stop()
