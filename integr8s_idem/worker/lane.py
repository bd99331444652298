"""A lane: deliveries that are handled one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from itertools import islice
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MOST_AHEAD: Final = 32
"""Maximum deliveries of a lane that are reserved in one batch."""

HORIZON: Final = 0.1
"""Seconds: a lane reserves about as many deliveries as it handles in this time, so slow handlers reserve only one."""


class Lane(Generic[T]):
    """A delivery whose turn it is, and those that wait for it."""

    __slots__ = ("_decoded", "_size", "_started_at", "name", "waiting")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        """Its key among the lanes of a pipeline."""
        self.waiting: deque[T] = deque()
        self._decoded = 0
        """How many of the first waiting deliveries are decoded."""
        self._size = 0
        """Deliveries in the last batch."""
        self._started_at = 0.0
        """Time of the last batch, by the event loop's clock."""

    def take_ahead(self, now: float) -> list[T]:
        """Return the waiting deliveries to be reserved together with the one whose turn it is."""
        elapsed, size = now - self._started_at, self._size
        at_this_rate = MOST_AHEAD if elapsed <= 0 else int(size * HORIZON / elapsed)
        size = max(min(2 * size, at_this_rate, MOST_AHEAD), 1)
        ahead = list(islice(self.waiting, size - 1))
        self._size, self._started_at = 1 + len(ahead), now
        self._decoded = max(self._decoded, len(ahead))
        return ahead

    def next_to_decode(self) -> T | None:
        """Return the first waiting delivery that is not decoded yet; `None` if enough are for the next batch."""
        if self._decoded >= min(len(self.waiting), self._size):
            return None
        self._decoded += 1
        return self.waiting[self._decoded - 1]

    def next_turn(self) -> T:
        """Return the delivery whose turn has come."""
        if self._decoded:
            self._decoded -= 1
        return self.waiting.popleft()

    def slow_down(self) -> None:
        """Start again with one delivery in the next batch."""
        self._size = 0

    def withdraw(self) -> list[T]:
        """Remove and return the waiting deliveries."""
        withdrawn, self.waiting, self._decoded = list(self.waiting), deque(), 0
        return withdrawn
