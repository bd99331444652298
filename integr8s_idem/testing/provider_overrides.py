"""Fakes in the containers of services, in place of what their providers provide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from dishka import AsyncContainer, Provider, Scope
from dishka.provider import BaseProvider

from integr8s_idem._util.context_vars import OVERRIDING
from integr8s_idem.config import Settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.runtime import Service
from integr8s_idem.runtime.containers import make_container
from integr8s_idem.stores import IdempotencyRepository

Wrap: TypeAlias = Callable[[IdempotencyRepository], IdempotencyRepository]


class Overrides:
    """What takes the place of what, by type.  The test's own goes before the kit's."""

    def __init__(self, fakes: Mapping[Any, object], providers: Sequence[BaseProvider]) -> None:
        """
        Args:
            fakes: Objects by the type that handlers ask for.
            providers: Providers that override, where a fake needs a scope or dependencies of its own.
        """
        self._fakes = fakes
        self._providers = providers
        self._missing = set(fakes)
        self._provided: set[Any] = set()

    def container(
        self, service: Service, settings: Settings, ours: Mapping[Any, object], wrap: Wrap | None = None
    ) -> AsyncContainer:
        """That of `service`.

        Args:
            ours: What the kit puts in, where the container has it at all.
            wrap: Called with the repository that the container makes; returns the one that it gives.

        Raises:
            ApplicationError: The service makes it past us.
        """
        used: list[bool] = []

        def overriding(given: Sequence[Any]) -> Sequence[Any]:
            used.append(True)
            return self._more(given, ours, wrap)

        with _overriding(overriding):
            container = make_container(service, settings)
        if not used:
            raise ApplicationError(
                f"the container of service {service.name} cannot be given a store in memory, nor fakes: make it with "
                "make_async_container of integr8s_idem.integrations.dishka instead of Dishka's own, which is the same "
                "outside of tests"
            )
        return container

    def check(self) -> None:
        """Once all containers are made.

        Raises:
            ApplicationError: A fake is for something that no service has.
        """
        if self._missing:
            names = ", ".join(sorted(_name(each) for each in self._missing))
            known = ", ".join(sorted(_name(each) for each in self._provided))
            raise ApplicationError(f"a fake takes the place of what no service provides: {names}; provided: {known}")

    def _more(self, given: Sequence[BaseProvider], ours: Mapping[Any, object], wrap: Wrap | None) -> list[BaseProvider]:
        provided = {factory.provides.type_hint for provider in given for factory in provider.factories}
        provided |= {alias.provides.type_hint for provider in given for alias in provider.aliases}
        self._provided |= provided
        self._missing -= provided
        fakes = {**ours, **self._fakes}
        added = Provider(scope=Scope.APP)
        for kind, fake in fakes.items():
            if kind in provided:
                added.provide(_giving(fake), provides=kind, override=True)
        if wrap is not None and IdempotencyRepository in provided:
            added.decorate(wrap, provides=IdempotencyRepository)
        return [added, *self._providers]


def _giving(fake: object) -> Callable[[], object]:
    def give() -> object:
        return fake

    return give


def _name(kind: Any) -> str:
    return str(getattr(kind, "__qualname__", kind))


@contextmanager
def _overriding(overriding: Callable[[Sequence[Any]], Sequence[Any]]) -> Iterator[None]:
    before = OVERRIDING.set(overriding)
    try:
        yield
    finally:
        OVERRIDING.reset(before)
