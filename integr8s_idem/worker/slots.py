"""Limit the number of handlers that run concurrently."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

SHARE: Final = 4
"""Few slots are free if fewer than one in four is."""

ENOUGH: Final = 64
"""As many free slots are not few, however many there are."""


class Slots:
    """A semaphore that wakes its waiters in order, in constant time.

    `asyncio.Semaphore` searches all waiters for the next one to wake.  With a thousand waiters, this took most of a
    worker's time.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.free = number
        """How many can be acquired."""
        self._few = min(number // SHARE, ENOUGH)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._notify: Callable[[], None] = lambda: None

    def on_free(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever slots are released that nobody waits for."""
        self._notify = callback

    def try_acquire(self) -> bool:
        """Acquire a slot without waiting; return `False` if none is free."""
        if not self.free:
            return False
        self.free -= 1
        return True

    def are_few(self, wanted: int) -> bool:
        """Whether few slots are free, and more are wanted."""
        return self.free < self._few and self.free < wanted

    async def __aenter__(self) -> None:
        if self.try_acquire():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()  # the slot was passed to this task just before it was cancelled
            raise

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def release(self, number: int = 1) -> None:
        """Pass slots directly to the first waiters, so that nobody else can acquire them in between."""
        while number and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                number -= 1
        if number:
            self.free += number
            self._notify()
