"""Make the clock of a running event loop jump forward, so that leases and pauses end immediately.

Unlike `virtual_time`, which needs its own loop, this allows real waits: sockets, threads and timers work as usual
between jumps.
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
"""Maximum number of event loop iterations without idling, after which a busy loop is assumed."""


class FastForward:
    """The clock of one event loop: real time plus all jumps.  It never goes back."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop: Any = loop
        self._offset = 0.0
        self._resting = 0
        real = loop.time
        loop.time = lambda: real() + self._offset  # type: ignore[method-assign]
        set_clock(loop, loop.time)
        set_wall_clock(loop, lambda: real_time.time_ns() + round(self._offset * 1e9))
        # In debug mode asyncio would report the step that jumps as slow.
        loop.slow_callback_duration = float("inf")

    def leap(self, seconds: float) -> None:
        """Move the clock forward by `seconds`."""
        self._offset += max(seconds, 0.0)

    def next_timer(self) -> float | None:
        """Return when the next timer is due, by the loop's clock; `None` if there is none."""
        timers: Sequence[asyncio.TimerHandle] = self._loop._scheduled  # noqa: SLF001 -- asyncio has no public API for this
        return min((timer.when() for timer in timers if not timer.cancelled()), default=None)

    async def rest(self) -> None:
        """Wait until nothing can run without a timer or an event from outside the loop."""
        self._resting += 1
        try:
            for _ in range(MOST_TURNS):
                await asyncio.sleep(0)
                # Each other task that rests has one step waiting: those must not keep each other busy.
                if len(self._loop._ready) < self._resting:  # noqa: SLF001 -- the same
                    return
        finally:
            self._resting -= 1
        raise ApplicationError(
            f"the event loop is still busy after {MOST_TURNS} iterations: a task runs without waiting"
        )


_of_loop: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, FastForward]] = WeakKeyDictionary()


def fast_forward() -> FastForward:
    """Return the clock of the running loop.

    Raises:
        ApplicationError: The loop is not one of asyncio's own.
    """
    loop = asyncio.get_running_loop()
    time = _of_loop.get(loop)
    if time is None:
        if not isinstance(loop, asyncio.BaseEventLoop):
            raise ApplicationError(
                f"a WorkerHarness changes the clock of the event loop, which {type(loop).__module__} does not allow: "
                "run its tests on asyncio's own event loop"
            )
        time = _of_loop[loop] = FastForward(loop)
    return time
