"""Lets the event loop run between guarded functions that do not await.

Functions that become ready in the same iteration of the event loop run one after another.  Until the last of them
has ended, no lease is renewed and no outcome is written, so that other processes take the work over.  Therefore,
once functions have occupied the loop for `LONGEST_TURN`, the next ones wait for a few iterations.

A store call that needs many iterations, such as a transaction, would take as long as many functions, and hold its
locks for that time.  Functions therefore wait for store calls in progress, for `LONGEST_REST` at most.
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
"""Seconds for which functions may occupy the event loop before the next one waits."""

LONGEST_REST: Final = 0.1
"""Seconds for which functions wait for store calls in progress."""

_POLL_INTERVAL: Final = 0.0005
"""Seconds between checks whether these calls have ended."""


class Pace:
    """The time that functions have occupied an event loop in the current turn, and the functions that wait."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._clock = clock_of(loop)
        self._turn_ends: float | None = None
        """Until when functions may start in this turn; `None` before the first one."""
        self._rest_ends = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._first_again = 0
        """How many of them, at the front, were resumed once and had to wait again."""
        self._are_resuming = False
        """Whether the loop has not yet run the tasks of all functions that were resumed."""
        self._calls: dict[int, None] = {}
        """Numbers of store calls in progress, oldest first."""
        self._last_call = 0
        self._last_awaited = 0

    def is_turn_over(self) -> bool:
        """Return whether the next function has to wait."""
        if self._waiting:
            return True
        if self._turn_ends is None:
            return self._are_resuming or self._is_long()  # those that were resumed begin the turn
        return self._clock() > self._turn_ends

    async def wait(self) -> None:
        """Wait until the function may start; callers are served in order."""
        await self._wait_at(len(self._waiting))
        while self._is_long():  # those that were resumed together with this one took the whole turn
            self._first_again += 1
            await self._wait_at(self._first_again - 1)

    async def _wait_at(self, place: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.insert(place, turn)
        await turn

    def _is_long(self) -> bool:
        now = self._clock()
        if self._turn_ends is None:
            self._turn_ends = now + LONGEST_TURN
            asyncio.get_running_loop().call_soon(self._end_turn)
        return now > self._turn_ends

    @contextmanager
    def call_of_a_store(self) -> Iterator[None]:
        """Let functions wait for this block, which needs more iterations than `GRACE_TURNS`."""
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
            self._resume()
            return
        self._rest_ends, self._last_awaited = now + LONGEST_REST, self._last_call
        self._rest(GRACE_TURNS)

    def _rest(self, turns: int) -> None:
        # An answer of the store is read in one iteration, and leads to the next request in another.
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._rest, turns - 1)
        elif self._is_call_in_progress() and self._clock() < self._rest_ends:
            loop.call_later(_POLL_INTERVAL, self._rest, 0)
        else:
            self._resume()

    def _is_call_in_progress(self) -> bool:
        """Return whether a call that began before the functions had to wait is still in progress."""
        return next(iter(self._calls), self._last_awaited + 1) <= self._last_awaited

    def _resume(self) -> None:
        self._turn_ends = None
        waiting, self._waiting, self._first_again = self._waiting, deque(), 0
        resumed = [turn for turn in waiting if not turn.done()]
        for turn in resumed:
            turn.set_result(None)
        if resumed:
            self._are_resuming = True
            asyncio.get_running_loop().call_soon(self._have_resumed)  # after a step of each of their tasks

    def _have_resumed(self) -> None:
        self._are_resuming = False
        if self._waiting and self._turn_ends is None:
            self._is_long()  # none of them has begun a turn, as when all were cancelled, and others wait for its end


pace_of = PerLoop(Pace)
"""Returns the pace of an event loop, shared by all guarded functions in it."""


async def turn_of_the_loop() -> None:
    """Yield to the event loop if functions have occupied it for long.  Await this before a function starts."""
    pace = pace_of(asyncio.get_running_loop())
    if pace.is_turn_over():
        await pace.wait()
