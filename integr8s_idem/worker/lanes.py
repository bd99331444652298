"""Lanes keep order: within a lane one delivery after the other, lanes beside each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Literal

from integr8s_idem.worker.assignments import Delivery

Ordering = Literal["partition", "key", "none"]


class Lanes:
    """Knows whose turn it is."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._behind: dict[Hashable, deque[Delivery]] = {}
        """By lane: who waits behind the delivery whose turn it is."""

    def enter(self, delivery: Delivery) -> bool:
        """Whether it is its turn at once."""
        if self._ordering == "none":
            return True
        behind = self._behind.get(name := self._lane_of(delivery))
        if behind is None:
            self._behind[name] = deque()
            return True
        behind.append(delivery)
        return False

    def leave(self, delivery: Delivery) -> Delivery | None:
        """`delivery` has had its turn: whose it is now."""
        if self._ordering == "none":
            return None
        behind = self._behind[name := self._lane_of(delivery)]
        if behind:
            return behind.popleft()
        del self._behind[name]
        return None

    def __len__(self) -> int:
        return len(self._behind)

    def _lane_of(self, delivery: Delivery) -> Hashable:
        # The assignment is part of the name: after a rebalance the partition starts with fresh lanes.
        if self._ordering == "key" and delivery.record.key is not None:
            return (delivery.assignment, delivery.record.key)
        return delivery.assignment
