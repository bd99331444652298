"""What the services of an application read, and for how long they remember it."""

from __future__ import annotations

from integr8s_idem.config import MemoryStoreSettings, Settings
from integr8s_idem.dispatcher import EventDispatcher
from integr8s_idem.findings import Code, Finding, Severity
from integr8s_idem.worker import EventPublisher, Platform, Service
from integr8s_idem.worker.clients import bounded
from integr8s_idem.worker.consumer import topics_read
from integr8s_idem.worker.retention import TTL, Reading
from integr8s_idem.worker.running import CLOSE_SECONDS, reading_of, section_of


async def readings_of(platform: Platform | None, settings: Settings) -> tuple[list[Reading], list[Finding]]:
    """Of all its services, by their containers; without an application, what the settings say."""
    if platform is None:
        ttl = settings.idempotency.default_ttl_seconds
        sections = settings.services.values()
        return [Reading(section.topics, ttl, TTL) for section in sections if section.topics], []
    # What a container opens for its dispatcher must not touch the real store: it would make a SQLite file.
    aside = settings.model_copy(update={"store": MemoryStoreSettings(kind="memory")})
    readings, found = [], []
    for service in platform.services.values():
        try:
            readings.append(await _reading(service, aside))
        except Exception as error:  # noqa: BLE001  # whatever an application raises is a finding about it
            found.append(_broken(service.name, error))
    return readings, found


async def _reading(service: Service, settings: Settings) -> Reading:
    container = service.container(settings)
    try:
        dispatcher = await container.get(EventDispatcher)
        publisher = await container.get(EventPublisher)
        return reading_of(dispatcher, topics_read(section_of(service, settings), dispatcher, publisher))
    finally:
        await bounded(container.close(), CLOSE_SECONDS)


def _broken(service: str, error: Exception) -> Finding:
    told = f"its container gives no dispatcher: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    cost = "it does not start; its topics were not looked at"
    return Finding(Code.APPLICATION_BROKEN, Severity.ERROR, f"service {service}", told, cost, "run it and read more")
