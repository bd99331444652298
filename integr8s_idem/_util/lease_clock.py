"""The clock by which this process measures its leases.

It advances while the event loop is blocked, and it counts the time that the machine was suspended:
`CLOCK_BOOTTIME` on Linux (clock_gettime(2)), `CLOCK_MONOTONIC` on macOS, whose manual says that it continues while
the system sleeps, and the monotonic clock on Windows.  An event loop's own `time()` does neither: uvloop caches it for
a whole iteration, and Linux stops `CLOCK_MONOTONIC` during a suspend.

It does not count the time of a guest whose hypervisor stops all of its clocks.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias
from weakref import WeakKeyDictionary

Clock: TypeAlias = Callable[[], float]
"""Returns seconds; only differences between readings are meaningful."""


if sys.platform == "linux":
    system_clock: Clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    """The clock of this machine."""
    system_clock_ns: Callable[[], int] = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)
    """The same clock in nanoseconds."""
elif sys.platform == "darwin":
    system_clock = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
    system_clock_ns = partial(time.clock_gettime_ns, time.CLOCK_MONOTONIC)
else:
    system_clock = time.monotonic
    system_clock_ns = time.monotonic_ns

_clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, Clock] = WeakKeyDictionary()


def set_clock(loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
    """Measure the leases in `loop` by `clock`, for event loops with simulated time."""
    _clocks[loop] = clock


def clock_of(loop: asyncio.AbstractEventLoop) -> Clock:
    """Return the clock of `loop`: the one set for it, or the clock of this machine."""
    return _clocks.get(loop, system_clock) if _clocks else system_clock
