"""Warnings about services that only observe, which are as loud as the absence of all guarantees deserves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from integr8s_idem.config import Settings
from integr8s_idem.errors import ApplicationError, SettingsMistake
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.handlers.observing_dispatcher import ObservingEventDispatcher
from integr8s_idem.integrations.dishka import IdempotentDispatcherProvider, only_observes
from integr8s_idem.runtime.key_warnings import dispatcher_provider
from integr8s_idem.runtime.service import Platform, Service

logger = logging.getLogger(__name__)

_OVERRIDDEN: Final = '= "observe" has no effect: '


def log_mode(settings: Settings, service: str, dispatcher: EventDispatcher) -> None:
    """Log that a service starts without a guard, because of the setting `mode`, or that the setting has no effect."""
    if isinstance(dispatcher, ObservingEventDispatcher):
        logger.warning(
            "service %s only observes: every delivery is handled, duplicates included, and nothing is guaranteed "
            '(services.%s.mode = "observe"). See what it observes: integr8s-idem observe',
            service,
            service,
        )
    elif why := why_not_observing(settings, service, dispatcher):
        logger.warning("services.%s.mode %s", service, why)


def why_not_observing(settings: Settings, service: str, dispatcher: EventDispatcher) -> str:
    """Return why a service does not observe although its settings say so; empty if it does as they say."""
    if not only_observes(settings, service) or isinstance(dispatcher, ObservingEventDispatcher):
        return ""
    return f"{_OVERRIDDEN}the dispatcher in its container is of type {type(dispatcher).__name__}"


def mode_warnings(platform: Platform, settings: Settings) -> list[SettingsMistake]:
    """Return a warning for each service that observes, if the mode does not apply, or changes more than the guard.

    Services that create their own container are not examined, since that may open connections.
    """
    services = [each for each in platform.services.values() if only_observes(settings, each.name)]
    return [warning for service in services for warning in _service_warnings(service, settings)]


def _service_warnings(service: Service, settings: Settings) -> Iterator[SettingsMistake]:
    path = f"services.{service.name}.mode"
    if service.container is not None:
        what = '= "observe" may have no effect: its container must use IdempotentDispatcherProvider'
        yield SettingsMistake(path, f"{what}; doctor checks whether it does")
        return
    try:
        provider = dispatcher_provider(service, settings)
    except ApplicationError:
        return  # reported with its keys
    if not isinstance(provider, IdempotentDispatcherProvider):
        what = f"{_OVERRIDDEN}its handlers are not guarded"
        yield SettingsMistake(path, f"{what}; use IdempotentDispatcherProvider")
    elif provider.is_transactional:
        yield SettingsMistake(
            path,
            '= "observe" ignores transaction=: the handlers commit without a record, and publish their events after '
            "the commit instead of through the outbox; a crash between the two loses those events until the event is "
            "redelivered",
        )
