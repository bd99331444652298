"""The dependency container that the current code runs under, for what is called without one."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol


class Container(Protocol):
    """What we need of a Dishka `AsyncContainer`."""

    async def get(self, dependency_type: type[Any], /) -> Any:
        """The one object of that type."""
        ...


CURRENT: ContextVar[Container] = ContextVar("integr8s_idem_request_container")
"""Set while an event is handled."""
