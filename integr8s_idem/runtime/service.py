"""Services, each with its own container, and the platform that consists of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, cast

from dishka import AsyncContainer
from dishka.provider import BaseProvider

from integr8s_idem.config import Settings
from integr8s_idem.errors import ApplicationError

Background = Callable[[AsyncContainer], Awaitable[None]]
"""A task that runs as long as the service: it is cancelled when the service drains, and its errors fail the service."""


@dataclass(frozen=True)
class Service:
    """A service, which has a consumer group and either Dishka providers or a function that creates a container.

    Raises:
        ApplicationError: Both are given, or neither.
    """

    name: str
    """Name of the service, of its section in the settings, and of its scope in keys and metrics."""
    _: KW_ONLY
    providers: Sequence[BaseProvider] | Callable[[Any], Sequence[BaseProvider]] | None = None
    """Providers of the container, or a function that returns them for the settings.

    A `TelemetryProvider` and an `EventContextProvider` are added.  The context of the container has the `Settings`,
    also under their own class, and the `ServiceName`.  The container is validated strictly."""
    container: Callable[..., AsyncContainer] | None = None
    """Function that creates the container from the settings, for full control.  The container must provide an
    `EventDispatcher` and an `EventPublisher`.  If the function takes `(settings: Settings, *overrides: Provider)`,
    tests can override providers."""
    topics: Sequence[str] | None = None
    """Topics to read; by default, those of the router's events.  The settings take precedence."""
    group_id: str | None = None
    """Consumer group; by default, the service's name.  The settings take precedence."""
    background: Sequence[Background] = ()
    """Tasks that run concurrently with the handlers."""
    overrides: Sequence[BaseProvider] = ()
    """Providers that override all others.  Set by `with_providers`."""

    def __post_init__(self) -> None:
        if (self.providers is None) == (self.container is None):
            raise ApplicationError(
                f"service {self.name} needs either providers=[…] or container=, a function that creates a container"
            )

    def with_providers(self, *overrides: BaseProvider) -> Service:
        """Return this service with overriding providers, for tests: `with_providers(FakePaymentsProvider())`."""
        return replace(self, overrides=(*self.overrides, *overrides))


def check_groups(services: Iterable[Service], settings: Settings) -> None:
    """Check that no two services share a consumer group.

    Raises:
        ApplicationError: Two services share a group, so that each event would reach only one of them.
    """
    members: dict[str, str] = {}
    for service in services:
        group = settings.service(service.name).group_id or service.group_id or service.name
        other = members.setdefault(group, service.name)
        if other != service.name:
            raise ApplicationError(
                f"services {other} and {service.name} share the consumer group {group}: Kafka would deliver each event "
                "to only one of them. Set a different group_id for each service"
            )


class Platform:
    """The services of an application, for `integr8s-idem run module:platform`."""

    def __init__(self, *services: Service, settings: type[Settings] = Settings) -> None:
        """Create a platform.

        Args:
            services: The services.
            settings: Class of the settings, if the application has its own sections.

        Raises:
            ApplicationError: There are no services, one is of another type, or two services share a name.
        """
        if not services:
            raise ApplicationError("a platform needs at least one service")
        for given in cast("tuple[object, ...]", services):
            if not isinstance(given, Service):
                raise ApplicationError(
                    f'a platform takes services, as in Platform(Service("billing", …)), not {type(given).__name__}'
                )
        self.services: Mapping[str, Service] = {service.name: service for service in services}
        self.settings_type = settings
        if len(self.services) < len(services):
            names = [service.name for service in services]
            twice = next(name for name in names if names.count(name) > 1)
            raise ApplicationError(f"two services are named {twice}: they would share keys and settings")

    def service(self, name: str) -> Service:
        """Return the service named `name`.

        Raises:
            ApplicationError: There is no such service.
        """
        (service,) = self.choose([name])
        return service

    def choose(self, names: Sequence[str] = ()) -> list[Service]:
        """Return the services with these names, or all services, in the order of the platform.

        Raises:
            ApplicationError: There is no service with one of the names.
        """
        for name in names:
            if name not in self.services:
                raise ApplicationError(f"unknown service {name!r}; the services are {', '.join(self.services)}")
        return [service for service in self.services.values() if not names or service.name in names]
