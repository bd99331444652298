"""Let work wait for a delay or a future, at most until its partition is revoked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

W = TypeVar("W")


class Waiting(Generic[W]):
    """Work that is waiting, without a task for each."""

    def __init__(self, resume: Callable[[W], None], abandon: Callable[[W], None]) -> None:
        """
        Args:
            resume: Called when the wait is over.
            abandon: Called instead if the assignment of the work has closed.
        """
        self._resume = resume
        self._abandon = abandon
        self._entries: dict[W, _Entry] = {}

    def add(
        self,
        work: W,
        closing: asyncio.Future[None],
        *,
        seconds: float | None = None,
        until: asyncio.Future[None] | None = None,
    ) -> None:
        """Let `work` wait.

        Args:
            closing: Done when the assignment of the work closes.
            seconds: Maximum wait.
            until: A future that ends the wait.
        """
        entry = self._entries[work] = _Entry(lambda: self._end(work, closing))
        entry.wait(closing, until, seconds)

    def abandon_all(self) -> None:
        """Abandon all work that is waiting."""
        while self._entries:
            work, entry = self._entries.popitem()
            entry.cancel()
            self._abandon(work)

    def __len__(self) -> int:
        return len(self._entries)

    def _end(self, work: W, closing: asyncio.Future[None]) -> None:
        self._entries.pop(work).cancel()
        (self._abandon if closing.done() else self._resume)(work)


class _Entry:
    """One wait."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._is_over = False
        self._timer: asyncio.TimerHandle | None = None
        self._futures: list[asyncio.Future[None]] = []

    def wait(self, closing: asyncio.Future[None], until: asyncio.Future[None] | None, seconds: float | None) -> None:
        self._futures = [closing] if until is None else [closing, until]
        for future in self._futures:
            future.add_done_callback(self._wake)
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._wake)

    def cancel(self) -> None:
        self._is_over = True
        for future in self._futures:
            future.remove_done_callback(self._wake)
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self, _: object = None) -> None:
        if not self._is_over:
            self._end()
