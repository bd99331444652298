"""Lets the event loop run between guarded functions that do not await.

Functions that become ready in the same turn of the event loop run one after another.  Until the last of them has
ended, no lease is renewed and no outcome is written: other processes take the work over though nobody has stalled.  So
once functions have kept the loop for `LONGEST_TURN`, the next ones wait until it has taken a few turns.

A call of a store that takes many turns, as a transaction does, would last as long as many functions, and hold its
locks against other processes meanwhile.  Functions wait for those that are under way, for `LONGEST_REST` at most.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from integr8s_idem._util.deadlines import GRACE_TURNS
from integr8s_idem._util.lease_clock import clock_of
from integr8s_idem._util.per_loop import PerLoop

LONGEST_TURN: Final = 0.01
"""Seconds for which functions may keep the event loop before the next one waits."""

LONGEST_REST: Final = 0.1
"""Seconds for which functions wait for calls of a store that are under way."""

_LOOK_AGAIN: Final = 0.0005
"""Seconds between two looks whether these calls have ended."""


class Pace:
    """How long functions have kept one event loop in its present turn, and who waits for the next."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._clock = clock_of(loop)
        self._turn_ends: float | None = None
        """Until when functions may start in this turn of the event loop; `None` if none has asked."""
        self._rest_ends = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._calls: dict[int, None] = {}
        """Calls of stores that are under way, by number, the oldest first."""
        self._last_call = 0
        self._last_awaited = 0

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

    @contextmanager
    def call_of_a_store(self) -> Iterator[None]:
        """Let functions wait for what happens inside, because it takes more turns than `GRACE_TURNS`."""
        self._last_call = call = self._last_call + 1
        self._calls[call] = None
        try:
            yield
        finally:
            del self._calls[call]

    def _end_turn(self) -> None:
        assert self._turn_ends is not None
        now = self._clock()
        if now <= self._turn_ends:
            self._go_on()
            return
        self._rest_ends, self._last_awaited = now + LONGEST_REST, self._last_call
        self._rest(GRACE_TURNS)

    def _rest(self, turns: int) -> None:
        # An answer of the store is read in one turn of the event loop, and leads to the next question in another.
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._rest, turns - 1)
        elif self._is_call_under_way() and self._clock() < self._rest_ends:
            loop.call_later(_LOOK_AGAIN, self._rest, 0)
        else:
            self._go_on()

    def _is_call_under_way(self) -> bool:
        """Whether a call has not ended that began before the functions had to wait."""
        return next(iter(self._calls), self._last_awaited + 1) <= self._last_awaited

    def _go_on(self) -> None:
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
