"""Backpressure: stop fetching at the limits, go on at half of them.  Polling never stops (R5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from integr8s_idem.worker.assignments import Assignment
from integr8s_idem.worker.records import Consumer, Partition

MOST_UNCOMMITTED: Final = 10_000
"""Deliveries of one partition from its first unfinished one on: a stuck event must not fill the memory."""


class Pressure:
    """Decides which partitions rest."""

    def __init__(self, most: int, most_bytes: int) -> None:
        """`most`: deliveries in flight; `most_bytes`: their bodies together."""
        self._most = most
        self._most_bytes = most_bytes
        self._full = False
        self._resting: frozenset[Partition] = frozenset()

    @property
    def resting(self) -> frozenset[Partition]:
        """Partitions that are not fetched now."""
        return self._resting

    def apply(
        self,
        consumer: Consumer,
        assignments: Mapping[Partition, Assignment],
        in_flight: int,
        in_flight_bytes: int,
        *,
        hold: bool,
    ) -> None:
        """Pause and resume partitions of `consumer`.  `hold`: all of them rest, whatever the load."""
        at_limit = in_flight >= self._most or in_flight_bytes >= self._most_bytes
        above_half = in_flight > self._most // 2 or in_flight_bytes > self._most_bytes // 2
        self._full = at_limit or (self._full and above_half)
        resting = frozenset(
            partition
            for partition, assignment in assignments.items()
            if hold
            or self._full
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
