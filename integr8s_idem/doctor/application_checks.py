"""Check the services of an application: their topics, retention, stores and outboxes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from dishka import AsyncContainer

from integr8s_idem.config import Settings
from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.doctor.failure_rules import rule_findings
from integr8s_idem.doctor.sqlite_file import is_missing
from integr8s_idem.doctor.store_checks import OUTBOX, STORE, check_repository, refusal
from integr8s_idem.errors import ApplicationError, StoreError
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.observing_dispatcher import ObservingEventDispatcher
from integr8s_idem.runtime import Platform, Service
from integr8s_idem.runtime.containers import get_dispatcher, get_publisher, make_container
from integr8s_idem.runtime.key_warnings import COST, HASHED, REMEDY, hashed_events
from integr8s_idem.runtime.observe_mode import why_not_observing
from integr8s_idem.runtime.service_group import CLOSE_SECONDS, reading_of, section_of
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import as_it_is
from integr8s_idem.worker.client_options import bounded
from integr8s_idem.worker.consumer import topics_read
from integr8s_idem.worker.retention import TTL, Reading
from integr8s_idem.worker.retry_topics import RetryTopics


@dataclass
class ApplicationReport:
    """The topics that the services read, and the findings about them."""

    readings: list[Reading] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    uses_store: bool = True
    """Whether a service uses `[store]`; false if the application provides all stores itself."""


async def check_application(
    platform: Platform | None, settings: Settings, now: Callable[[], float] = time.time
) -> ApplicationReport:
    """Check all services by their containers; without an application, use the topics in the settings."""
    if platform is None:
        ttl = settings.idempotency.default_ttl_seconds
        return ApplicationReport(
            [
                Reading(
                    section.topics,
                    ttl,
                    TTL,
                    RetryTopics(section.group_id or name, section.retry_topics, section.topics),
                )
                for name, section in settings.services.items()
                if section.topics
            ]
        )
    report = ApplicationReport(uses_store=False)
    has_own = False
    for service in platform.services.values():
        try:
            has_own |= await _check_service(service, settings, now, report)
        except Exception as error:  # noqa: BLE001  # an application can raise anything
            report.findings.append(_broken(service.name, error))
            report.uses_store = True
    report.uses_store |= not has_own
    return report


async def _check_service(
    service: Service, settings: Settings, now: Callable[[], float], report: ApplicationReport
) -> bool:
    """Check a service, and return whether the application provides its store."""
    async with _container(service, settings) as (container, opened):
        dispatcher = await get_dispatcher(container, service.name)
        publisher = await get_publisher(container, service.name)
        topics = topics_read(section_of(service, settings), dispatcher, publisher)
        section = section_of(service, settings)
        retries = RetryTopics(section.group_id or service.group_id or service.name, section.retry_topics, topics)
        report.readings.append(replace(reading_of(dispatcher, topics), retries=retries))
        report.findings += _key_findings(service.name, dispatcher)
        report.findings += _mode_findings(service.name, settings, dispatcher)
        report.findings += rule_findings(service.name, dispatcher)
        report.findings += await _outbox_findings(dispatcher, settings)
        report.uses_store |= bool(opened)
        own = dispatcher.manager.repository if dispatcher.manager is not None else None
        if own is None or any(own is one for one in opened):
            return False
        report.findings += await _own_store_findings(service.name, own, settings, now)
        return True


@asynccontextmanager
async def _container(
    service: Service, settings: Settings
) -> AsyncIterator[tuple[AsyncContainer, list[IdempotencyRepository]]]:
    """Create the container as a worker does, without modifying `[store]`; yield it and the repositories it opened."""
    with as_it_is() as opened:
        container = make_container(service, settings)
        try:
            yield container, opened
        finally:
            await bounded(container.close(), CLOSE_SECONDS)


async def _own_store_findings(
    service: str, repository: IdempotencyRepository, settings: Settings, now: Callable[[], float]
) -> list[Finding]:
    """Check a store that the application implements or wraps."""
    where = f"store of service {service}"
    try:
        found = await check_repository(repository, settings, now)
    except Exception as error:  # noqa: BLE001  # a custom store can raise anything
        what = f"{type(repository).__name__} raises {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        remedy = "test it with integr8s_idem.testing.RepositoryContract"
        return [Finding(Code.APPLICATION_BROKEN, Severity.ERROR, where, what, "its service cannot use it", remedy)]
    return [replace(finding, where=where) if finding.where == STORE else finding for finding in found]


def _key_findings(service: str, dispatcher: EventDispatcher) -> list[Finding]:
    """Check whether the keys of a service change when the class of an event gets another field."""
    events = ""
    if isinstance(dispatcher, IdempotentEventDispatcher | ObservingEventDispatcher):
        events = hashed_events(dispatcher.resolver, dispatcher.router)
    if not events:
        return []
    what = HASHED.format(events=events)
    return [Finding(Code.KEY_FIELDS, Severity.WARNING, f"service {service}", what, COST, REMEDY)]


def _mode_findings(service: str, settings: Settings, dispatcher: EventDispatcher) -> list[Finding]:
    """Check whether mode = "observe" applies to a service; that it observes is a finding of the settings."""
    what = why_not_observing(settings, service, dispatcher)
    if not what:
        return []
    remedy = f"use IdempotentDispatcherProvider, or remove mode from [services.{service}]"
    return [Finding(Code.SETTINGS_WARNING, Severity.WARNING, f"services.{service}.mode", what, "", remedy)]


async def _outbox_findings(dispatcher: EventDispatcher, settings: Settings) -> list[Finding]:
    if dispatcher.outbox is None or await is_missing(settings):
        return []
    try:
        await dispatcher.outbox.tried()
    except StoreError as error:
        return [refusal(error, settings, where=OUTBOX)]
    return []


def _broken(service: str, error: Exception) -> Finding:
    what = error.reason if isinstance(error, ApplicationError) else f"{type(error).__name__}: {error}"
    cost = "the service cannot start; its topics were not checked"
    remedy = "run the service to see the whole error"
    return Finding(Code.APPLICATION_BROKEN, Severity.ERROR, f"service {service}", what, cost, remedy)
