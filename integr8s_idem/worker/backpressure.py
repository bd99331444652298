"""Backpressure: pause fetching when deliveries in flight reach a limit, and resume at half of it.

Polling continues while partitions are paused (R5).  If deliveries wait for others of their partition, each partition
has a part of the limit for itself: otherwise the deliveries behind one that takes long would fill the limit, and the
other partitions would stand still as well.

Numbers such as R1 and A5 refer to docs/explanation/worker.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from integr8s_idem.worker.assignments import Assignment, Delivery
from integr8s_idem.worker.kafka_protocols import Consumer, Partition

SHARED: Final = 4
"""One part in so many of the limit is divided among the partitions, and kept for them."""

MOST_UNCOMMITTED: Final = 10_000
"""Maximum deliveries of a partition after its first unfinished one, so that a stuck event does not fill memory."""


class Backpressure:
    """Counts deliveries in flight, and pauses partitions at the limits."""

    def __init__(self, most: int, most_bytes: int, *, is_ordered: bool = False) -> None:
        """Set the limits.

        Args:
            most: Maximum number of deliveries in flight.
            most_bytes: Maximum total size of deliveries in flight, in bytes.
            is_ordered: Whether deliveries wait for others of their partition, so that one that takes long may be
                followed by many.  A quarter of `most` is then kept for the partitions, in equal parts.
        """
        self._most = most
        self._most_bytes = most_bytes
        self._is_ordered = is_ordered
        self.in_flight = 0
        """Deliveries that are not settled yet."""
        self._bytes = 0
        self._has_retries = False
        """Whether a delivery of a retry topic was added."""
        self.full = False
        """Whether partitions are paused because of the load: those that have what is kept for them."""
        self._below_half: asyncio.Future[None] | None = None
        self._paused: frozenset[Partition] = frozenset()

    @property
    def paused(self) -> frozenset[Partition]:
        """Partitions that are paused."""
        return self._paused

    @property
    def has_room(self) -> bool:
        """Whether there is room below both limits, including what is kept for partitions."""
        return self.in_flight < self._most and self._bytes < self._most_bytes

    def room(self, assignments: Mapping[Partition, Assignment]) -> int:
        """Maximum messages of the next poll; at least one, since paused partitions are not fetched anyway.

        At the limit, what is kept is included, since only partitions that have less are fetched.
        """
        return max(1, self._most - self.in_flight - (0 if self.full else self._kept(assignments)))

    def _kept_for_each(self, assignments: Mapping[Partition, Assignment]) -> int:
        """Return how many deliveries each partition may have in flight, even if the others fill the limit."""
        unfinished = [each.progress.unfinished for each in assignments.values() if each.retry is None]
        if not self._is_ordered or len(unfinished) < 2:
            return 0
        revoked = max(0, self.in_flight - sum(unfinished))  # they wait for handlers that still run
        return max(0, self._most - revoked) // (SHARED * len(unfinished))

    def _kept(self, assignments: Mapping[Partition, Assignment]) -> int:
        """Return how many deliveries are kept for partitions and not in flight."""
        most = self._kept_for_each(assignments)
        unfinished = (each.progress.unfinished for each in assignments.values() if each.retry is None)
        return sum([most - number for number in unfinished if number < most]) if most else 0

    def neediest(
        self, assignments: Mapping[Partition, Assignment], without: Collection[Partition] = ()
    ) -> Iterator[tuple[list[Partition], int]]:
        """Yield the partitions that have less than half their share of the limit in flight, then those below it.

        With each group, yield how many messages bring the fullest of it to its share.  At the limit, the share of a
        partition is what is kept for it.
        """
        share = self._kept_for_each(assignments) if self.full else max(1, self._most // max(1, len(assignments)))
        for limit in (share // 2, share):
            below = {
                partition: unfinished
                for partition, assignment in assignments.items()
                if partition not in self._paused
                and partition not in without
                and assignment.retry is None
                and (unfinished := assignment.progress.unfinished) < limit
            }
            if below:
                yield list(below), share - max(below.values())

    @property
    def is_above_half(self) -> bool:
        """Whether more than half of a limit is in flight."""
        return self.in_flight > self._most // 2 or self._bytes > self._most_bytes // 2

    def add(self, *deliveries: Delivery) -> None:
        """Count deliveries as in flight, of the same partition.  Those of retry topics have a limit of their own."""
        if deliveries and deliveries[0].assignment.retry is not None:
            self._has_retries = True
            return
        self.in_flight += len(deliveries)
        for delivery in deliveries:
            self._bytes += delivery.size

    def remove(self, deliveries: Sequence[Delivery]) -> None:
        """Stop counting deliveries that were settled or released."""
        if self._has_retries:
            deliveries = [delivery for delivery in deliveries if delivery.assignment.retry is None]
        self.in_flight -= len(deliveries)
        for delivery in deliveries:
            self._bytes -= delivery.size
        if self._below_half is not None and not self.is_above_half:
            self._below_half.set_result(None)
            self._below_half = None

    async def wait_for_room(self, timeout: float) -> None:
        """Return when more may be fetched, or after `timeout` seconds."""
        if self._below_half is None:
            self._below_half = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._below_half}, timeout=timeout)

    def apply(self, consumer: Consumer, assignments: Mapping[Partition, Assignment], *, hold: bool) -> None:
        """Pause and resume partitions of `consumer`; with `hold`, pause all of them."""
        at_limit = not self.has_room or self.in_flight + self._kept(assignments) >= self._most
        self.full = at_limit or (self.full and self.is_above_half)
        kept = self._kept_for_each(assignments) if self.has_room else 0
        paused = frozenset(
            partition
            for partition, assignment in assignments.items()
            if hold
            or (self.full and assignment.retry is None and assignment.progress.unfinished >= kept)
            or assignment.closed
            or assignment.damaged
            or assignment.progress.span >= MOST_UNCOMMITTED
            # Its next copies are due later than those in flight, so they can wait in the topic.
            or (assignment.retry is not None and assignment.progress.unfinished)
        )
        assigned = consumer.assignment()
        if to_resume := [partition for partition in self._paused - paused if partition in assigned]:
            consumer.resume(*to_resume)
        # Pause all of them each time: a rebalance silently resumes paused partitions.
        if to_pause := [partition for partition in paused if partition in assigned]:
            consumer.pause(*to_pause)
        self._paused = paused
