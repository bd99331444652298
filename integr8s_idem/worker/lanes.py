"""Keep order within lanes: deliveries of one lane are handled one after another, lanes concurrently."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Literal

from integr8s_idem.worker.assignments import Delivery

Ordering = Literal["partition", "key", "none"]


class Lanes:
    """Queues of deliveries, one for each lane that is busy."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._queues: dict[Hashable, deque[Delivery]] = {}
        """Deliveries that wait for the current one of their lane."""

    def enter(self, delivery: Delivery) -> bool:
        """Return whether `delivery` may start; otherwise it is queued."""
        if self._ordering == "none":
            return True
        queue = self._queues.get(name := self._lane_of(delivery))
        if queue is None:
            self._queues[name] = deque()
            return True
        queue.append(delivery)
        return False

    def leave(self, delivery: Delivery) -> Delivery | None:
        """End the turn of `delivery`, and return the next delivery of its lane, if there is one."""
        if self._ordering == "none":
            return None
        queue = self._queues[name := self._lane_of(delivery)]
        if queue:
            return queue.popleft()
        del self._queues[name]
        return None

    def __len__(self) -> int:
        return len(self._queues)

    def _lane_of(self, delivery: Delivery) -> Hashable:
        # The name includes the assignment, so that a partition starts with new lanes after a rebalance.
        if self._ordering == "key" and delivery.record.key is not None:
            return (delivery.assignment, delivery.record.key)
        return delivery.assignment
