"""Keep order within lanes: deliveries of one lane are handled one after another, lanes concurrently."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from itertools import islice
from typing import Final, Literal

from integr8s_idem.worker.assignments import Delivery

Ordering = Literal["partition", "key", "none"]

MOST_AHEAD: Final = 32
"""Maximum deliveries of a lane that are reserved in one batch."""

HORIZON: Final = 0.1
"""Seconds: a lane reserves about as many deliveries as it handles in this time, so slow handlers reserve only one."""


class Lane:
    """A delivery whose turn it is, and those that wait for it."""

    __slots__ = ("_decoded", "_size", "_started_at", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Delivery] = deque()
        self._decoded = 0
        """How many of the first waiting deliveries are decoded."""
        self._size = 0
        """Deliveries in the last batch."""
        self._started_at = 0.0
        """Time of the last batch, by the event loop's clock."""

    def take_ahead(self, now: float) -> list[Delivery]:
        """Return the waiting deliveries to be reserved together with the one whose turn it is."""
        elapsed, size = now - self._started_at, self._size
        at_this_rate = MOST_AHEAD if elapsed <= 0 else int(size * HORIZON / elapsed)
        size = max(min(2 * size, at_this_rate, MOST_AHEAD), 1)
        ahead = list(islice(self.waiting, size - 1))
        self._size, self._started_at = 1 + len(ahead), now
        self._decoded = max(self._decoded, len(ahead))
        return ahead

    def next_to_decode(self) -> Delivery | None:
        """Return the first waiting delivery that is not decoded yet; `None` if enough are for the next batch."""
        if self._decoded >= min(len(self.waiting), self._size):
            return None
        self._decoded += 1
        return self.waiting[self._decoded - 1]

    def next_turn(self) -> Delivery:
        """Return the delivery whose turn has come."""
        self._decoded = max(self._decoded - 1, 0)
        return self.waiting.popleft()

    def slow_down(self) -> None:
        """Start again with one delivery in the next batch."""
        self._size = 0

    def withdraw(self) -> list[Delivery]:
        """Remove and return the waiting deliveries."""
        withdrawn, self.waiting, self._decoded = list(self.waiting), deque(), 0
        return withdrawn


class Lanes:
    """The lanes that are busy."""

    def __init__(self, ordering: Ordering) -> None:
        self._by_key = ordering == "key"
        self.are_ordered = ordering != "none"
        """Whether deliveries wait for each other."""
        self._lanes: dict[Hashable, Lane] = {}

    def enter(self, delivery: Delivery) -> bool:
        """Return whether it is the turn of `delivery`; otherwise it waits."""
        if not self.are_ordered:
            return True
        name = self._name_of(delivery) if self._by_key else delivery.assignment
        lane = self._lanes.get(name)
        if lane is None:
            self._lanes[name] = Lane()
            return True
        lane.waiting.append(delivery)
        return False

    def leave(self, delivery: Delivery) -> Delivery | None:
        """End the turn of `delivery`, and return the next delivery of its lane, if there is one."""
        if not self.are_ordered:
            return None
        name = self._name_of(delivery) if self._by_key else delivery.assignment
        lane = self._lanes[name]
        if lane.waiting:
            return lane.next_turn()
        del self._lanes[name]
        return None

    def take_ahead(self, delivery: Delivery) -> list[Delivery]:
        """Return the deliveries to be reserved in one batch with `delivery`, before their turn."""
        lane = self._lanes[self._name_of(delivery)]
        return lane.take_ahead(asyncio.get_running_loop().time()) if lane.waiting else []

    def next_to_decode(self, delivery: Delivery) -> Delivery | None:
        """Return a delivery that waits for `delivery`, and is to be decoded before its turn, if there is one."""
        lane = self._lanes.get(self._name_of(delivery))
        return None if lane is None else lane.next_to_decode()

    def slow_down(self, delivery: Delivery) -> None:
        """Reserve only one delivery in the next batch of its lane.

        Called after a crash.  If the next crash is caused by the first delivery, no others lapse with it.
        """
        if self.are_ordered:
            self._lanes[self._name_of(delivery)].slow_down()

    def withdraw_closed(self) -> list[Delivery]:
        """Remove and return the deliveries of closed assignments that wait for others."""
        closed = [lane for lane in self._lanes.values() if lane.waiting and lane.waiting[0].assignment.closed]
        return [delivery for lane in closed for delivery in lane.withdraw()]

    def __len__(self) -> int:
        return len(self._lanes)

    def _name_of(self, delivery: Delivery) -> Hashable:
        # The name includes the assignment, so that a partition starts with new lanes after a rebalance.
        if self._by_key and delivery.record.key is not None:
            return (delivery.assignment, delivery.record.key)
        return delivery.assignment
