"""Backpressure: count what is in flight, stop fetching at the limits, go on at half of them.

Polling never stops (R5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from integr8s_idem.worker.assignments import Assignment, Delivery
from integr8s_idem.worker.kafka_protocols import Consumer, Partition

MOST_UNCOMMITTED: Final = 10_000
"""Deliveries of one partition from its first unfinished one on: a stuck event must not fill the memory."""


class Backpressure:
    """Knows the load, and decides which partitions rest."""

    def __init__(self, most: int, most_bytes: int) -> None:
        """`most`: deliveries in flight; `most_bytes`: their bodies together."""
        self._most = most
        self._most_bytes = most_bytes
        self.in_flight = 0
        """Deliveries taken and not settled yet."""
        self._bytes = 0
        self.full = False
        """Whether nothing more is fetched for now."""
        self._eased: asyncio.Future[None] | None = None
        self._resting: frozenset[Partition] = frozenset()

    @property
    def resting(self) -> frozenset[Partition]:
        """Partitions that are not fetched now."""
        return self._resting

    @property
    def room(self) -> int:
        """How many more may come; at least one, since what rests brings nothing anyway."""
        return max(1, self._most - self.in_flight)

    def _above_half(self) -> bool:
        return self.in_flight > self._most // 2 or self._bytes > self._most_bytes // 2

    def took(self, delivery: Delivery) -> None:
        """`delivery` is in flight."""
        self.in_flight += 1
        self._bytes += delivery.size

    def left(self, delivery: Delivery) -> None:
        """`delivery` is settled, or given up."""
        self.in_flight -= 1
        self._bytes -= delivery.size
        if self._eased is not None and not self._above_half():
            self._eased.set_result(None)
            self._eased = None

    async def ease(self, at_most: float) -> None:
        """Return when more may be fetched, or after so many seconds."""
        if self._eased is None:
            self._eased = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._eased}, timeout=at_most)

    def apply(self, consumer: Consumer, assignments: Mapping[Partition, Assignment], *, hold: bool) -> None:
        """Pause and resume partitions of `consumer`.  `hold`: all of them rest, whatever the load."""
        at_limit = self.in_flight >= self._most or self._bytes >= self._most_bytes
        self.full = at_limit or (self.full and self._above_half())
        resting = frozenset(
            partition
            for partition, assignment in assignments.items()
            if hold
            or self.full
            or assignment.closed
            or assignment.damaged
            or assignment.progress.span >= MOST_UNCOMMITTED
        )
        ours = consumer.assignment()
        if wakened := [partition for partition in self._resting - resting if partition in ours]:
            consumer.resume(*wakened)
        # Every time all of them: a rebalance quietly resumes what was paused.
        if paused := [partition for partition in resting if partition in ours]:
            consumer.pause(*paused)
        self._resting = resting
