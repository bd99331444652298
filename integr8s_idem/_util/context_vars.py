"""What is so for the current code alone: its dependency container, and what a test puts in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol


class Container(Protocol):
    """What we need of a Dishka `AsyncContainer`."""

    async def get(self, dependency_type: type[Any], /) -> Any:
        """The one object of that type."""
        ...


CURRENT: ContextVar[Container] = ContextVar("integr8s_idem_request_container")
"""Set while an event is handled."""

OVERRIDING: ContextVar[Callable[[Sequence[Any]], Sequence[Any]] | None] = ContextVar(
    "integr8s_idem_overriding", default=None
)
"""Gives the providers to add to those that a container is made of.  Set where a test has a container made."""

SIMULATED_PROCESS: ContextVar[object | None] = ContextVar("integr8s_idem_process", default=None)
"""The simulated process whose code runs, in a test that has several in one event loop; `None` everywhere else."""
