"""Context variables of the current task."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol


class Container(Protocol):
    """The part of a Dishka `AsyncContainer` that the library uses below its integration."""

    async def get(self, dependency_type: type[Any], /) -> Any:
        """Get the object of that type."""
        ...


CURRENT: ContextVar[Container] = ContextVar("integr8s_idem_request_container")
"""Set while an event is handled."""

RUN: ContextVar[Any] = ContextVar("innermost run of the current code", default=None)
"""The `engine.active_runs.ActiveRun`, or `None`; inherited by tasks.  The engine sets it, and log fields read it."""

SIMULATED_PROCESS: ContextVar[object | None] = ContextVar("integr8s_idem_process", default=None)
"""The simulated process that the task belongs to, in a test with several in one event loop; `None` otherwise."""
