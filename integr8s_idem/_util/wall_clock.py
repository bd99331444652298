"""This machine's wall clock, for stores whose database has none of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeAlias
from weakref import WeakKeyDictionary

Clock: TypeAlias = Callable[[], int]
"""Returns nanoseconds since 1970."""

_clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, Clock] = WeakKeyDictionary()


def set_wall_clock(loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
    """Read `clock` in `loop` from now on: for event loops whose time is simulated."""
    _clocks[loop] = clock


def wall_time_ns() -> int:
    """Return nanoseconds since 1970 by the clock of the running loop, or by this machine's."""
    if _clocks:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # plain code, while a simulated loop of somebody else is still in memory
            return time.time_ns()
        return _clocks.get(loop, time.time_ns)()
    return time.time_ns()
