"""Limit the number of handlers that run concurrently."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Slots:
    """A semaphore whose free slots the runners take themselves; a suspect that runs with others waits for one.

    It wakes its waiters in order, in constant time: `asyncio.Semaphore` searches all of them for the next one to wake.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.free = number
        """How many can be acquired."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._notify: Callable[[], None] = lambda: None

    def on_free(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever slots are released that nobody waits for."""
        self._notify = callback

    def take(self) -> None:
        """Take one of the free slots; there must be one."""
        self.free -= 1

    async def acquire(self, *, unless: asyncio.Future[None]) -> bool:
        """Acquire a slot, after those that waited before; return `False` if `unless` is done first."""
        if unless.done():
            return False
        if self.free:
            self.take()
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        is_acquired = False
        try:
            await asyncio.wait({turn, unless}, return_when=asyncio.FIRST_COMPLETED)
            is_acquired = turn.done() and not unless.done()
        finally:
            if not is_acquired and not turn.cancel():
                self.release()  # the slot was passed to this task in the meantime
        return is_acquired

    def release(self) -> None:
        """Pass a slot directly to the first waiter, so that nobody else can acquire it in between."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1
        self._notify()
