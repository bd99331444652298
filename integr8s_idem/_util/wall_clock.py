"""The wall clock of this machine, for stores whose database has no clock."""

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
    """Use `clock` in `loop`, for event loops with simulated time."""
    _clocks[loop] = clock


def wall_time_ns() -> int:
    """Return nanoseconds since 1970 by the clock of the running loop, or of this machine."""
    if _clocks:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # synchronous code, while another simulated loop is still in memory
            return time.time_ns()
        return _clocks.get(loop, time.time_ns)()
    return time.time_ns()
