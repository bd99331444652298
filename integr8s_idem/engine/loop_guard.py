"""Detects the use of a manager in a second event loop while the first one is still running.

Its pending requests, timers and tasks belong to one loop: futures of one loop cannot be awaited in another, and a loop
of another thread must not be called from this one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final
from weakref import WeakSet

from integr8s_idem.errors import ApplicationError

LIBRARY_LOOPS: Final = WeakSet[asyncio.AbstractEventLoop]()
"""Loops that the library has started for plain functions.  They never stop."""

LOOK_EVERY: Final = 0.25
"""Seconds between checks whether another event loop is still running."""


class LoopGuard:
    """Remembers the event loop in which a manager, including its other scopes, was last used."""

    def __init__(self, scope: str) -> None:
        self._scope = scope
        self._entering = threading.Lock()
        self._idle: list[Callable[[], bool]] = []
        self.loop: asyncio.AbstractEventLoop | None = None

    def add(self, is_idle: Callable[[], bool]) -> None:
        """Add a scope.  `is_idle`: whether nothing of it is pending."""
        self._idle.append(is_idle)

    def enter(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use the manager in `loop` from now on.  Thread-safe.

        Raises:
            ApplicationError: It is in use in another loop that is still running.
        """
        with self._entering:
            if self.loop is not None and self.loop is not loop and not self._may_leave(self.loop):
                raise ApplicationError(
                    f"the manager of {self._scope} was used in another event loop, which is still running, and works "
                    "in one event loop at a time: make a manager and a store for each event loop. They may have the "
                    "same scope. Plain functions that were called before your event loop used the manager may still be "
                    "running, in a loop of the library: wait for them"
                )
            self.loop = loop

    def _may_leave(self, loop: asyncio.AbstractEventLoop) -> bool:
        if not loop.is_running():
            return True
        return loop in LIBRARY_LOOPS and all(is_idle() for is_idle in self._idle)


async def finish_in(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Await `work` in another event loop; return early if that loop stops, since `work` does not end then."""
    if not loop.is_running():
        return
    ending = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), loop))
    while loop.is_running() and not ending.done():
        await asyncio.wait({ending}, timeout=LOOK_EVERY)
    if ending.done():
        ending.result()
