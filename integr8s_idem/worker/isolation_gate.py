"""Run events that may have crashed the process alone, so that the next crash identifies the event that caused it.

If a process crashes, all of its running handlers die, and it is unknown which one caused the crash.  An event whose
lease has lapsed twice is a suspect (`work.SUSPECT_AFTER`).  It runs while no other handler of the process runs, and
only a crash during such a turn counts toward its limit.

All other handlers wait during a turn.  A turn is therefore limited in time, even if its handler runs on, and between
two turns the other handlers get their share of the time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

DRAW_TURNS: Final = 4
"""Event loop iterations in which suspects of the same batch may enter the draw for the first turn."""


@dataclass(slots=True, eq=False)
class Turn:
    """The turn of one suspect."""

    is_alone: bool
    """Whether no other handler runs in the process."""
    ended: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when other handlers may start again."""


class IsolationGate:
    """Lets one suspect at a time run alone.  All services of a process share one gate."""

    def __init__(self) -> None:
        self._running = 0
        self._idle: asyncio.Future[None] | None = None
        self._opened: asyncio.Future[None] | None = None
        self.is_closed = False
        """Whether a suspect runs alone or is about to: no other handler may start."""
        self._has_turn = False
        self._waiting: list[asyncio.Future[None]] = []
        self._overdue = 0
        """Suspects that are still running after their turns."""
        self._rest_until = 0.0
        """Earliest start of the next turn, by the event loop's clock."""
        self.when_opened: list[Callable[[], None]] = []
        """Callbacks for when handlers may start again."""

    def enter(self) -> None:
        """Count a handler that starts; allowed only while the gate is open."""
        self._running += 1

    def leave(self) -> None:
        """Stop counting a handler that has ended."""
        self._running -= 1
        if not self._running and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def wait_until_open(self, *, unless: asyncio.Future[None]) -> None:
        """Return when handlers may start, or when `unless` is done."""
        while self._opened is not None and not unless.done():
            await asyncio.wait({self._opened, unless}, return_when=asyncio.FIRST_COMPLETED)

    @asynccontextmanager
    async def turn(self, share: float, longest: float, *, unless: asyncio.Future[None]) -> AsyncIterator[Turn | None]:
        """Run a suspect in the block, alone if possible.

        Args:
            share: Fraction of the time for turns, between 0 and 1.
            longest: Maximum seconds, both of waiting for running handlers and of the turn itself.
            unless: A future that ends the wait; the turn is `None` then.
        """
        turn: Turn | None = None
        try:
            if await self._get_turn(unless):
                turn = await self._begin(share, longest, unless)
                if not turn.is_alone:
                    self._call_next()
            yield None if unless.done() else turn
        finally:
            if turn is not None and turn.is_alone:
                if turn.ended.done():
                    self._overdue -= 1
                    self.leave()
                else:
                    turn.ended.set_result(None)

    async def _get_turn(self, unless: asyncio.Future[None]) -> bool:
        loop = asyncio.get_running_loop()
        called: asyncio.Future[None] = loop.create_future()
        self._waiting.append(called)
        if not self._has_turn:
            self._has_turn = True
            if loop.time() >= self._rest_until and not self._overdue:
                self._close()
            self._draw(DRAW_TURNS)
        try:
            await asyncio.wait({called, unless}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if called.done():
                self._call_next()
            raise
        finally:
            if called in self._waiting:
                self._waiting.remove(called)
        return called.done()

    def _draw(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._draw, turns - 1)
        else:
            self._call_next()

    def _close(self) -> None:
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            self.is_closed = True

    def _call_next(self) -> None:
        """Give the turn to a random suspect, so that one that crashes the process does not block others forever."""
        if not self._waiting:
            self._has_turn = False
            self._open()
            return
        called = self._waiting.pop(random.randrange(len(self._waiting)))  # noqa: S311  # not a secret
        called.set_result(None)

    async def _begin(self, share: float, longest: float, unless: asyncio.Future[None]) -> Turn:
        loop = asyncio.get_running_loop()
        try:
            if (rest := self._rest_until - loop.time()) > 0:
                await asyncio.wait({unless}, timeout=rest)
            if unless.done() or self._overdue:
                # While another suspect is still running, this one cannot run alone.
                self._open()
                return Turn(is_alone=False)
            began = loop.time()
            self._close()
            if self._running:
                self._idle = loop.create_future()
                await asyncio.wait({self._idle, unless}, timeout=longest, return_when=asyncio.FIRST_COMPLETED)
                self._idle = None
        except asyncio.CancelledError:
            self._open()
            self._call_next()
            raise
        turn = Turn(is_alone=not self._running and not unless.done())
        if not turn.is_alone:
            self._end(began, share)
            return turn
        timer = loop.call_later(longest, self._end_early, turn)

        def ended(_: asyncio.Future[None]) -> None:
            timer.cancel()
            self._end(began, share)
            self._call_next()

        turn.ended.add_done_callback(ended)
        return turn

    def _end_early(self, turn: Turn) -> None:
        self._overdue += 1
        self.enter()
        turn.ended.set_result(None)

    def _end(self, began: float, share: float) -> None:
        now = asyncio.get_running_loop().time()
        self._rest_until = now + (now - began) * (1 / share - 1)
        self._open()

    def _open(self) -> None:
        if self._opened is not None:
            self._opened.set_result(None)
            self._opened, self.is_closed = None, False
            for callback in self.when_opened:
                callback()
