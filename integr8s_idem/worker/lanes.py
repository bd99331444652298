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

    def __init__(
        self,
        ordering: Ordering,
        settle: Callable[[Delivery], Awaitable[None]],
        drop: Callable[[Delivery], None],
    ) -> None:
        """`drop`: told of deliveries whose lane was cancelled before their turn; they come again."""
        self._ordering = ordering
        self._settle = settle
        self._drop = drop
        self._lanes: dict[Hashable, deque[Delivery]] = {}

    def put(self, delivery: Delivery) -> None:
        """Queue `delivery` in its lane; an idle lane starts at once."""
        name = self._lane_of(delivery)
        waiting = self._lanes.get(name)
        if waiting is not None:
            waiting.append(delivery)
            return
        waiting = self._lanes[name] = deque((delivery,))
        task = asyncio.get_running_loop().create_task(self._run(name, waiting))
        delivery.assignment.tasks.add(task)
        task.add_done_callback(delivery.assignment.tasks.discard)
        # By callback: a task that is cancelled before its first step runs no `finally`.
        task.add_done_callback(lambda _: self._close(name, waiting))

    def _lane_of(self, delivery: Delivery) -> Hashable:
        # The assignment is part of the name: after a rebalance the partition starts with fresh lanes.
        if self._ordering == "none":
            return delivery
        if self._ordering == "key" and delivery.record.key is not None:
            return (delivery.assignment, delivery.record.key)
        return delivery.assignment

    async def _run(self, name: Hashable, waiting: deque[Delivery]) -> None:
        while waiting:
            await self._settle(waiting.popleft())
        # Closed in the same step in which it is found empty: what came later would wait for nobody.
        self._close(name, waiting)

    def _close(self, name: Hashable, waiting: deque[Delivery]) -> None:
        if self._lanes.get(name) is waiting:  # the name may belong to a younger lane by now
            del self._lanes[name]
        while waiting:
            self._drop(waiting.popleft())
