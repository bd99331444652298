"""Lanes keep order: within a lane one delivery after the other, lanes beside each other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Literal

from integr8s_idem.worker.assignments import Delivery

Ordering = Literal["partition", "key", "none"]


class Lanes:
    """Runs deliveries, each lane in order.

    The number of tasks is bounded by the deliveries in flight, which the worker limits; the number of
    running handlers by the settler's slots.
    """

    def __init__(self, ordering: Ordering, settle: Callable[[Delivery], Awaitable[None]]) -> None:
        self._ordering = ordering
        self._settle = settle
        self._lanes: dict[Hashable, deque[Delivery]] = {}

    def put(self, delivery: Delivery) -> None:
        """Queue `delivery` in its lane; an idle lane starts at once."""
        name = self._lane_of(delivery)
        waiting = self._lanes.get(name)
        if waiting is not None:
            waiting.append(delivery)
            return
        self._lanes[name] = deque((delivery,))
        task = asyncio.get_running_loop().create_task(self._run(name))
        delivery.assignment.tasks.add(task)
        task.add_done_callback(delivery.assignment.tasks.discard)

    def _lane_of(self, delivery: Delivery) -> Hashable:
        # The assignment is part of the name: after a rebalance the partition starts with fresh lanes.
        if self._ordering == "none":
            return delivery
        if self._ordering == "key" and delivery.record.key is not None:
            return (delivery.assignment, delivery.record.key)
        return delivery.assignment

    async def _run(self, name: Hashable) -> None:
        waiting = self._lanes[name]
        try:
            while waiting:
                await self._settle(waiting.popleft())
        finally:
            # Whatever is left was cancelled with us, or its assignment is closing: it comes again.
            del self._lanes[name]
