"""Replace dependencies in the containers of services with fakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from dishka import AsyncContainer, Provider, Scope
from dishka.provider import BaseProvider
from dishka.registry import Registry

from integr8s_idem.config import Settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.runtime import Service
from integr8s_idem.runtime.containers import make_container
from integr8s_idem.stores import IdempotencyRepository

Wrap: TypeAlias = Callable[[IdempotencyRepository], IdempotencyRepository]


class Overrides:
    """Replacements for dependencies by type.  Fakes of the test take precedence over objects of the harness."""

    def __init__(self, fakes: Mapping[Any, object], providers: Sequence[BaseProvider]) -> None:
        """
        Args:
            fakes: Objects by the type that they replace.
            providers: Overriding providers, for fakes with their own scope or dependencies.
        """
        self._fakes = fakes
        self._providers = providers
        self._missing = set(fakes)
        self._provided: set[Any] = set()

    def container(
        self, service: Service, settings: Settings, kit: Mapping[Any, object], wrap: Wrap | None = None
    ) -> AsyncContainer:
        """Make the container of `service` with the replacements.

        Args:
            kit: Objects of the harness by type, for types that the container provides.
            wrap: Called with the container's repository; returns its replacement.

        Raises:
            ApplicationError: The container cannot be made, or its factory does not accept providers.
        """
        provided = _provided_by(make_container(service, settings))
        self._provided |= provided
        self._missing -= provided
        added = Provider(scope=Scope.APP)
        for kind, fake in {**kit, **self._fakes}.items():
            if kind in provided:
                added.provide(_constant(fake), provides=kind, override=True)
        if wrap is not None and IdempotencyRepository in provided:
            added.decorate(wrap, provides=IdempotencyRepository)
        return make_container(service.with_providers(added, *self._providers), settings)

    def check(self) -> None:
        """Check that all fakes are used, after all containers have been made.

        Raises:
            ApplicationError: No service provides the type of a fake.
        """
        if self._missing:
            names = ", ".join(sorted(_name(each) for each in self._missing))
            known = ", ".join(sorted(_name(each) for each in self._provided))
            raise ApplicationError(f"no service provides the type of these fakes: {names}; provided: {known}")


def _provided_by(container: AsyncContainer) -> set[Any]:
    """Return the types that a container provides in any scope, without making them."""
    registry: Registry | None = container.registry
    provided: set[Any] = set()
    while registry is not None:
        provided |= {key.type_hint for key in registry.factories}
        registry = registry.child_registry
    return provided


def _constant(fake: object) -> Callable[[], object]:
    def give() -> object:
        return fake

    return give


def _name(kind: Any) -> str:
    return str(getattr(kind, "__qualname__", kind))
