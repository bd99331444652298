"""Lets the event loop run between guarded functions that do not await.

Functions that become ready in the same turn of the event loop run one after another.  Until the last of them has
ended, no lease is renewed and no outcome is written: other processes take the work over though nobody has stalled.  So
once functions have kept the loop for `LONGEST_TURN`, the next ones wait until it has taken a few turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from integr8s_idem.deadlines import GRACE_TURNS
from integr8s_idem.lease_clock import clock_of
from integr8s_idem.per_loop import PerLoop

LONGEST_TURN: Final = 0.01
"""Seconds for which functions may keep the event loop before the next one waits."""


class Pace:
    """How long functions have kept one event loop in its present turn, and who waits for the next."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._clock = clock_of(loop)
        self._turn_ends: float | None = None
        """Until when functions may start in this turn of the event loop; `None` if none has asked."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    def is_turn_over(self) -> bool:
        """Whether the next function has to wait."""
        if self._waiting:
            return True
        return self._is_long()

    async def wait(self) -> None:
        """Return when the next function may start, in the order of the callers."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _is_long(self) -> bool:
        now = self._clock()
        if self._turn_ends is None:
            self._turn_ends = now + LONGEST_TURN
            asyncio.get_running_loop().call_soon(self._end_turn)
        return now > self._turn_ends

    def _end_turn(self) -> None:
        assert self._turn_ends is not None
        self._rest(GRACE_TURNS if self._clock() > self._turn_ends else 0)

    def _rest(self, turns: int) -> None:
        # An answer of the store is read in one turn of the event loop, and leads to the next question in another.
        if turns:
            asyncio.get_running_loop().call_soon(self._rest, turns - 1)
            return
        self._turn_ends = None
        self._wake_next()

    def _wake_next(self) -> None:
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if self._waiting and not self._is_long():
            self._waiting.popleft().set_result(None)


pace_of = PerLoop(Pace)
"""The pace of an event loop, which all guarded functions in it share."""


async def turn_of_the_loop() -> None:
    """Let the running event loop go on first, if functions have kept it for long.  Await it before a start."""
    pace = pace_of(asyncio.get_running_loop())
    if pace.is_turn_over():
        await pace.wait()
