"""What the services of an application read, for how long they remember it, and where they keep what they send."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from dishka import AsyncContainer

from integr8s_idem.config import Settings
from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.doctor.sqlite_file import is_to_be_made
from integr8s_idem.doctor.store_checks import OUTBOX, STORE, look_at_repository, refusal
from integr8s_idem.errors import ApplicationError, StoreError
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.runtime import Platform, Service
from integr8s_idem.runtime.containers import get_dispatcher, get_publisher, make_container
from integr8s_idem.runtime.service_group import CLOSE_SECONDS, reading_of, section_of
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import as_it_is
from integr8s_idem.worker.client_options import bounded
from integr8s_idem.worker.consumer import topics_read
from integr8s_idem.worker.retention import TTL, Reading


@dataclass
class ApplicationLook:
    """What its services read, and what was found in them."""

    readings: list[Reading] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    uses_store: bool = True
    """Whether anything is known to use `[store]`; not so if all stores are the application's own."""


async def look_at_application(
    platform: Platform | None, settings: Settings, now: Callable[[], float] = time.time
) -> ApplicationLook:
    """At all its services, by their containers; without an application, at what the settings say."""
    if platform is None:
        ttl = settings.idempotency.default_ttl_seconds
        sections = settings.services.values()
        return ApplicationLook([Reading(section.topics, ttl, TTL) for section in sections if section.topics])
    look = ApplicationLook(uses_store=False)
    has_own = False
    for service in platform.services.values():
        try:
            has_own |= await _look_at_service(service, settings, now, look)
        except Exception as error:  # noqa: BLE001  # whatever an application raises is a finding about it
            look.findings.append(_broken(service.name, error))
            look.uses_store = True
    look.uses_store |= not has_own
    return look


async def _look_at_service(
    service: Service, settings: Settings, now: Callable[[], float], look: ApplicationLook
) -> bool:
    """Whether it has a store of its own."""
    async with _container(service, settings) as (container, opened):
        dispatcher = await get_dispatcher(container, service.name)
        publisher = await get_publisher(container, service.name)
        topics = topics_read(section_of(service, settings), dispatcher, publisher)
        look.readings.append(reading_of(dispatcher, topics))
        look.findings += await _outbox_findings(dispatcher, settings)
        look.uses_store |= bool(opened)
        own = dispatcher.manager.repository if dispatcher.manager is not None else None
        if own is None or any(own is one for one in opened):
            return False
        look.findings += await _own_store_findings(service.name, own, settings, now)
        return True


@asynccontextmanager
async def _container(
    service: Service, settings: Settings
) -> AsyncIterator[tuple[AsyncContainer, list[IdempotencyRepository]]]:
    """As the worker makes it, but that `[store]` stays as it is; and what was opened of that."""
    with as_it_is() as opened:
        container = make_container(service, settings)
        try:
            yield container, opened
        finally:
            await bounded(container.close(), CLOSE_SECONDS)


async def _own_store_findings(
    service: str, repository: IdempotencyRepository, settings: Settings, now: Callable[[], float]
) -> list[Finding]:
    """About a store that the application has written, or wrapped, itself."""
    where = f"store of service {service}"
    try:
        found = await look_at_repository(repository, settings, now)
    except Exception as error:  # noqa: BLE001  # whatever a store of others raises is a finding about it
        told = f"{type(repository).__name__} fails by {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        mend = "hold it to integr8s_idem.testing.RepositoryContract"
        return [Finding(Code.APPLICATION_BROKEN, Severity.ERROR, where, told, "its service cannot rely on it", mend)]
    return [replace(finding, where=where) if finding.where == STORE else finding for finding in found]


async def _outbox_findings(dispatcher: EventDispatcher, settings: Settings) -> list[Finding]:
    if dispatcher.outbox is None or await is_to_be_made(settings):
        return []
    try:
        await dispatcher.outbox.tried()
    except StoreError as error:
        return [refusal(error, settings, where=OUTBOX)]
    return []


def _broken(service: str, error: Exception) -> Finding:
    told = error.reason if isinstance(error, ApplicationError) else f"{type(error).__name__}: {error}"
    cost = "it does not start; its topics were not looked at"
    return Finding(Code.APPLICATION_BROKEN, Severity.ERROR, f"service {service}", told, cost, "run it and read more")
