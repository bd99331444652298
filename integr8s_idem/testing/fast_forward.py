"""The clock of a running event loop, made to leap: leases and pauses end at once, on the loop that a test has anyway.

Unlike `virtual_time`, whose loop knows no time but its own, real waits stay possible: sockets, threads and timers work
while nobody leaps.
"""

from __future__ import annotations

import asyncio
import time as real_time
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from integr8s_idem._util.lease_clock import set_clock
from integr8s_idem._util.wall_clock import set_wall_clock
from integr8s_idem.errors import ApplicationError

MOST_TURNS: Final = 100_000
"""Turns of the event loop without rest before something is taken to run for ever."""


class FastForward:
    """The time of one event loop: real seconds, and all leaps so far.  It never goes back, and ends with the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop: Any = loop
        self._leapt = 0.0
        real = loop.time
        loop.time = lambda: real() + self._leapt  # type: ignore[method-assign]
        set_clock(loop, loop.time)
        set_wall_clock(loop, lambda: real_time.time_ns() + round(self._leapt * 1e9))
        # In debug mode the step that leaps would be taken for one that took so long.
        loop.slow_callback_duration = float("inf")

    def leap(self, seconds: float) -> None:
        """Be so much later at once."""
        self._leapt += max(seconds, 0.0)

    def next_timer(self) -> float | None:
        """When the next timer is due, by the loop's clock; `None` if none is set."""
        timers: Sequence[asyncio.TimerHandle] = self._loop._scheduled  # noqa: SLF001 -- asyncio tells in no other way
        return min((timer.when() for timer in timers if not timer.cancelled()), default=None)

    async def rest(self) -> None:
        """Return once nothing can go on without a timer, or something from outside of the loop."""
        for _ in range(MOST_TURNS):
            await asyncio.sleep(0)
            if not self._loop._ready:  # noqa: SLF001 -- the same
                return
        raise ApplicationError(f"the event loop does not come to rest within {MOST_TURNS} turns: something spins")


_of_loop: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, FastForward]] = WeakKeyDictionary()


def fast_forward() -> FastForward:
    """That of the running loop.

    Raises:
        ApplicationError: The loop is none of asyncio's own.
    """
    loop = asyncio.get_running_loop()
    time = _of_loop.get(loop)
    if time is None:
        if not isinstance(loop, asyncio.BaseEventLoop):
            raise ApplicationError(
                f"a WorkerHarness lets time leap, which {type(loop).__module__} does not allow: "
                "run its tests on asyncio's own event loop"
            )
        time = _of_loop[loop] = FastForward(loop)
    return time
