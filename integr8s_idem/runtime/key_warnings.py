"""Warnings about keys that are hashes of all fields, which change with the class of an event."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from integr8s_idem.config import Settings
from integr8s_idem.errors import ApplicationError, SettingsMistake
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.integrations.dishka import DispatcherProvider, IdempotentDispatcherProvider
from integr8s_idem.keys.event_keys import KeyResolver, KeyStrategy
from integr8s_idem.runtime.containers import NOT_CREATED, explained
from integr8s_idem.runtime.service import Platform, Service

HASHED: Final = "key_strategy content_hash without fields covers all fields of {events}"
COST: Final = "an optional field that is added later changes the keys, and redeliveries of earlier events run again"
REMEDY: Final = 'name the fields that identify the work: fields=["order_id"]'


def key_warnings(platform: Platform, settings: Settings) -> list[SettingsMistake]:
    """Return a warning for each service whose keys are hashes of all fields.

    Services that create their own container are not examined, since that may open connections.
    """
    return [warning for service in platform.services.values() for warning in _service_warnings(service, settings)]


def hashed_events(resolver: KeyResolver, router: EventRouter) -> str:
    """Return the names of the events whose keys are hashes of all their fields; empty if there are none."""
    if resolver.strategy is not KeyStrategy.CONTENT_HASH or resolver.fields is not None:
        return ""
    return ", ".join(event.__name__ for event in router.events)


def _service_warnings(service: Service, settings: Settings) -> Iterator[SettingsMistake]:
    path = f"services.{service.name}"
    try:
        dispatcher = dispatcher_provider(service, settings)
    except ApplicationError as error:
        yield SettingsMistake(path, f"its keys are not checked: {error.reason}")
        return
    if isinstance(dispatcher, IdempotentDispatcherProvider):
        events = hashed_events(dispatcher.resolver, dispatcher.router)
        if events:
            yield SettingsMistake(path, f"{HASHED.format(events=events)}: {COST}; {REMEDY}")


def dispatcher_provider(service: Service, settings: Settings) -> DispatcherProvider | None:
    """Return the provider of the dispatcher: the last one, which overrides others."""
    with explained(service.name, NOT_CREATED):
        found = service.providers(settings) if callable(service.providers) else service.providers or ()
    providers = [one for one in (*found, *service.overrides) if isinstance(one, DispatcherProvider)]
    return providers[-1] if providers else None
