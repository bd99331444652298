"""How many handlers may run at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Slots:
    """A semaphore whose waiters are woken in the order in which they came, each in a moment.

    That of asyncio looks through all that are waking up for the next to wake: with a thousand waiting, that was
    most of a worker's time.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.when_free: Callable[[], None] = lambda: None
        """Called whenever a slot is free that nobody waits for."""

    def take(self) -> bool:
        """One at once, if there is one that nobody waits for."""
        if not self._free:
            return False
        self._free -= 1
        return True

    async def __aenter__(self) -> None:
        if self.take():
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give()  # it was handed to us in this very moment
            raise

    async def __aexit__(self, *_: object) -> None:
        self.give()

    def give(self) -> None:
        """Hand the slot to whoever waits longest; nobody else can take it in between."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
        self.when_free()
