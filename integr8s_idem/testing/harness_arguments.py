"""Check what tests pass to harnesses: tests are seldom type-checked."""

from __future__ import annotations

from integr8s_idem.errors import ApplicationError
from integr8s_idem.events import BaseEvent
from integr8s_idem.runtime import Platform, Service


def platform_of(application: object, harness: str) -> Platform:
    """Return `application`, or a platform of this one service.

    Args:
        harness: Name of the class that got it, for the error.

    Raises:
        ApplicationError: It is neither a platform nor a service.
    """
    if isinstance(application, Platform):
        return application
    if isinstance(application, Service):
        return Platform(application)
    raise ApplicationError(
        f"{harness} takes a Platform or a Service, not {type(application).__name__}; names of services follow it, as "
        f'in {harness}(platform, "billing")'
    )


def check_events(*events: object) -> None:
    """Raise an error unless all are events.

    Raises:
        ApplicationError: One is not an event.
    """
    for event in events:
        if not isinstance(event, BaseEvent):
            raise ApplicationError(
                "a harness takes events, instances of subclasses of BaseEvent such as OrderPlaced(...), not "
                f"{type(event).__name__}"
            )
