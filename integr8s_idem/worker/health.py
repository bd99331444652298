"""Liveness and readiness of a process and its services."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceHealth:
    """Health of one service."""

    name: str
    live: bool
    """Whether it works without a restart."""
    ready: bool
    """Whether it has joined its group and its store responds."""
    reason: str = ""
    """Why it is not live or not ready.  Contains no keys and no secrets, since it is served without authentication."""


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """Health of one worker process of a supervisor."""

    worker_process: int
    """Its number, from 1."""
    pid: int | None
    """Its process id, or `None` while it does not run."""
    live: bool
    ready: bool
    reason: str = ""
    """Why it is not live or not ready, apart from its services."""


@dataclass(frozen=True, slots=True)
class Health:
    """Health of all services of a process, or of several processes with the same services."""

    services: tuple[ServiceHealth, ...]
    processes: tuple[ProcessHealth, ...] = ()
    """The worker processes of a supervisor."""

    @property
    def live(self) -> bool:
        """Whether all services are live."""
        return all(service.live for service in self.services)

    @property
    def ready(self) -> bool:
        """Whether all services are ready; `False` before the first one has started."""
        return bool(self.services) and all(service.ready for service in self.services)
