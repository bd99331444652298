"""How a process feels, service by service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """One service."""

    name: str
    live: bool
    """False asks whoever watches for a restart."""
    ready: bool
    """Assigned its partitions, or waiting for its turn, with a store that answers."""
    reason: str = ""
    """Why it is not live or not ready, for people.  No keys, no secrets: whoever asks may read it."""


@dataclass(frozen=True, slots=True)
class Health:
    """All services of a process."""

    services: tuple[ServiceHealth, ...]

    @property
    def live(self) -> bool:
        """Whether every service is."""
        return all(service.live for service in self.services)

    @property
    def ready(self) -> bool:
        """Whether every service is, and there is one: before the first has started nothing is ready."""
        return bool(self.services) and all(service.ready for service in self.services)
