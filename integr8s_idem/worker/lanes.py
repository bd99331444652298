"""Keep order within lanes: deliveries of one lane are handled one after another, lanes concurrently."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

from integr8s_idem.worker.assignments import Delivery
from integr8s_idem.worker.lane import Lane

Ordering = Literal["partition", "key", "none"]


class Lanes:
    """The lanes that are busy."""

    def __init__(self, ordering: Ordering) -> None:
        self._by_key = ordering == "key"
        self.are_ordered = ordering != "none"
        """Whether deliveries wait for each other."""
        self._lanes: dict[Hashable, Lane[Delivery]] = {}

    def enter(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Return those whose turn it is; the others wait."""
        if not self.are_ordered:
            return deliveries
        due = []
        for delivery in deliveries:
            name: Hashable = delivery.assignment
            # The name includes the assignment, so that a partition starts with new lanes after a rebalance.
            if self._by_key and delivery.record.key is not None:
                name = (delivery.assignment, delivery.record.key)
            lane = self._lanes.get(name)
            if lane is None:
                lane = self._lanes[name] = Lane(name)
                due.append(delivery)
            else:
                lane.waiting.append(delivery)
            delivery.lane = lane
        return due

    def leave(self, deliveries: Iterable[Delivery]) -> list[Delivery]:
        """End the turns of `deliveries`, and return those that come next in their lanes."""
        due = []
        for delivery in deliveries:
            lane = delivery.lane
            if lane is None:
                continue  # without an order
            if lane.waiting:
                due.append(lane.next_turn())
            else:
                del self._lanes[lane.name]
        return due

    def withdraw_closed(self) -> list[Delivery]:
        """Remove and return the deliveries of closed assignments that wait for others."""
        closed = [lane for lane in self._lanes.values() if lane.waiting and lane.waiting[0].assignment.closed]
        return [delivery for lane in closed for delivery in lane.withdraw()]

    def __len__(self) -> int:
        return len(self._lanes)
