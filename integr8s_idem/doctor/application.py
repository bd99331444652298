"""What the services of an application read, for how long they remember it, and where they keep what they send."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from dishka import AsyncContainer

from integr8s_idem.config import Settings
from integr8s_idem.dispatcher import EventDispatcher
from integr8s_idem.doctor.store import is_to_be_made, refusal
from integr8s_idem.errors import StoreError
from integr8s_idem.findings import Code, Finding, Severity
from integr8s_idem.stores.opening import as_it_is
from integr8s_idem.worker import EventPublisher, Platform, Service
from integr8s_idem.worker.clients import bounded
from integr8s_idem.worker.consumer import topics_read
from integr8s_idem.worker.retention import TTL, Reading
from integr8s_idem.worker.running import CLOSE_SECONDS, reading_of, section_of

OUTBOX: Final = "outbox"


@dataclass
class ApplicationLook:
    """What its services read, and what was found in them."""

    readings: list[Reading] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


async def look_at_application(platform: Platform | None, settings: Settings) -> ApplicationLook:
    """At all its services, by their containers; without an application, at what the settings say."""
    if platform is None:
        ttl = settings.idempotency.default_ttl_seconds
        sections = settings.services.values()
        return ApplicationLook([Reading(section.topics, ttl, TTL) for section in sections if section.topics])
    look = ApplicationLook()
    for service in platform.services.values():
        try:
            await _look_at_service(service, settings, look)
        except Exception as error:  # noqa: BLE001  # whatever an application raises is a finding about it
            look.findings.append(_broken(service.name, error))
    return look


async def _look_at_service(service: Service, settings: Settings, look: ApplicationLook) -> None:
    async with _container(service, settings) as container:
        dispatcher = await container.get(EventDispatcher)
        publisher = await container.get(EventPublisher)
        topics = topics_read(section_of(service, settings), dispatcher, publisher)
        look.readings.append(reading_of(dispatcher, topics))
        look.findings += await _outbox_findings(dispatcher, settings)


@asynccontextmanager
async def _container(service: Service, settings: Settings) -> AsyncIterator[AsyncContainer]:
    """As the worker makes it, but that its store stays as it is: nothing is made or migrated."""
    with as_it_is():
        container = service.container(settings)
        try:
            yield container
        finally:
            await bounded(container.close(), CLOSE_SECONDS)


async def _outbox_findings(dispatcher: EventDispatcher, settings: Settings) -> list[Finding]:
    if dispatcher.outbox is None or await is_to_be_made(settings):
        return []
    try:
        await dispatcher.outbox.tried()
    except StoreError as error:
        return [refusal(error, settings, where=OUTBOX)]
    return []


def _broken(service: str, error: Exception) -> Finding:
    told = f"its container gives no dispatcher: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    cost = "it does not start; its topics were not looked at"
    return Finding(Code.APPLICATION_BROKEN, Severity.ERROR, f"service {service}", told, cost, "run it and read more")
