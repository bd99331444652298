"""Services, each with a container of its own, and the platform that they make up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from dishka import AsyncContainer
from dishka.provider import BaseProvider

from integr8s_idem.config import Settings
from integr8s_idem.errors import ApplicationError

Background = Callable[[AsyncContainer], Awaitable[None]]
"""Work beside the handlers, for the life of the service: cancelled when it drains; an error makes the service fail."""


@dataclass(frozen=True)
class Service:
    """One consumer group and what it needs: either Dishka providers, or a function that makes a container.

    Raises:
        ApplicationError: Both are given, or neither.
    """

    name: str
    """Also its section in the settings, and its scope in keys and metrics."""
    _: KW_ONLY
    providers: Sequence[BaseProvider] | Callable[[Any], Sequence[BaseProvider]] | None = None
    """Providers of the container, or a function that returns them for the settings.

    A `TelemetryProvider` and an `EventContextProvider` are added.  The context of the container has the `Settings`,
    also under their own class, and the `ServiceName`.  The container is validated strictly."""
    container: Callable[..., AsyncContainer] | None = None
    """Makes the container from the settings, for full control.  It must provide an `EventDispatcher` and an
    `EventPublisher`.  If it takes `(settings: Settings, *overrides: Provider)`, tests can override providers."""
    topics: Sequence[str] | None = None
    """Topics to read; those of the router's events if not given.  The settings win."""
    group_id: str | None = None
    """Consumer group; the service's name if not given.  The settings win."""
    background: Sequence[Background] = ()
    """Tasks beside the handlers."""
    overrides: Sequence[BaseProvider] = ()
    """Providers that come after all others, and override them.  Set by `with_providers`."""

    def __post_init__(self) -> None:
        if (self.providers is None) == (self.container is None):
            raise ApplicationError(
                f"service {self.name} needs either providers=[…] or container=, a function that makes a container"
            )

    def with_providers(self, *overrides: BaseProvider) -> Service:
        """This service with providers that override its own, for a test: `with_providers(FakePaymentsProvider())`."""
        return replace(self, overrides=(*self.overrides, *overrides))


def check_groups(services: Iterable[Service], settings: Settings) -> None:
    """Refuse services that would take each other's events.

    Raises:
        ApplicationError: Two of them share a consumer group.
    """
    members: dict[str, str] = {}
    for service in services:
        group = settings.service(service.name).group_id or service.group_id or service.name
        other = members.setdefault(group, service.name)
        if other != service.name:
            raise ApplicationError(
                f"services {other} and {service.name} share the consumer group {group}: Kafka gives each event to one "
                "of them, and the other never sees it. Give each a group_id of its own"
            )


class Platform:
    """The services of an application; what `integr8s-idem run module:platform` runs."""

    def __init__(self, *services: Service, settings: type[Settings] = Settings) -> None:
        """`settings`: the class to read the settings with, where the application has sections of its own.

        Raises:
            ApplicationError: Two services share a name.
        """
        if not services:
            raise ApplicationError("a platform needs at least one service")
        self.services: Mapping[str, Service] = {service.name: service for service in services}
        self.settings_type = settings
        if len(self.services) < len(services):
            names = [service.name for service in services]
            twice = next(name for name in names if names.count(name) > 1)
            raise ApplicationError(f"two services are named {twice}: they would share keys and settings")

    def service(self, name: str) -> Service:
        """The service of this name.

        Raises:
            ApplicationError: There is no such service.
        """
        (service,) = self.choose([name])
        return service

    def choose(self, names: Sequence[str] = ()) -> list[Service]:
        """The services named, or all, in the order of the platform.

        Raises:
            ApplicationError: There is none of that name.
        """
        for name in names:
            if name not in self.services:
                raise ApplicationError(f"no service is named {name!r}; there are {', '.join(self.services)}")
        return [service for service in self.services.values() if not names or service.name in names]
