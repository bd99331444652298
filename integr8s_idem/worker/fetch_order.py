"""Decide from which partitions the next poll fetches, and how many messages.

If events are ordered, the partitions with the fewest deliveries in flight come first.  The client returns the messages
of one partition until none of them are left.  If they had to wait for each other, most partitions would have nothing in
flight, and little would be handled concurrently.

Numbers such as A8 refer to docs/explanation/worker.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from integr8s_idem.worker.backpressure import Backpressure
from integr8s_idem.worker.kafka_protocols import Consumer, Partition
from integr8s_idem.worker.partition_registry import PartitionRegistry
from integr8s_idem.worker.retry_topics import MOST_FETCHED

POLL_SECONDS: Final = 0.2
"""Maximum wait of a poll."""

POLL_RECORDS: Final = 500
"""Maximum messages of a poll."""

Batches = Mapping[Any, Sequence[Any]]
"""Messages by partition, in order."""


class FetchOrder:
    """Fetches with one client."""

    def __init__(
        self,
        consumer: Consumer,
        partitions: PartitionRegistry,
        backpressure: Backpressure,
        *,
        take: Callable[[Batches], None],
        is_ordered: bool,
    ) -> None:
        """
        Args:
            take: Registers messages.
            is_ordered: Whether deliveries of a partition wait for each other.
        """
        self._consumer = consumer
        self._partitions = partitions
        self._backpressure = backpressure
        self._take = take
        self._is_ordered = is_ordered

    async def fetch(self, *only: Partition, most: int = POLL_RECORDS, seconds: float = POLL_SECONDS) -> Batches:
        """Fetch from some partitions, or from all of them, waiting up to `seconds` for the first message."""
        return await self._consumer.getmany(*only, timeout_ms=int(seconds * 1000), max_records=most)

    async def next_batches(self) -> Batches:
        """Fetch a few copies for retries, if there are any; otherwise events, as they are needed."""
        assignments = self._partitions.assignments
        most = min(POLL_RECORDS, self._backpressure.room(assignments))
        retries = [partition for partition, assignment in assignments.items() if assignment.retry is not None]
        # Few at a time: copies that wait must not fill the memory.
        if retries and (batches := await self.fetch(*retries, most=MOST_FETCHED, seconds=0.0)):
            return batches
        if self._is_ordered and self._backpressure.full:
            return await self._fetch_kept()
        if self._is_ordered and len(assignments) > 1:
            for partitions, lacking in self._backpressure.neediest(assignments):
                if batches := await self.fetch(*partitions, most=min(most, lacking), seconds=0.0):
                    return batches
        if not retries:
            return await self.fetch(most=most)
        events = [partition for partition in assignments if partition not in retries]
        return await self.fetch(*(events or retries), most=most if events else MOST_FETCHED)

    async def _fetch_kept(self) -> Batches:
        """Register what is kept for the partitions, of one after another: a busy one must not hold up the others."""
        assignments, fetched, has_polled = self._partitions.assignments, set[Partition](), False
        while self._backpressure.has_room:
            for partitions, lacking in self._backpressure.neediest(assignments, fetched):
                has_polled = True
                most = min(POLL_RECORDS, lacking, self._backpressure.room(assignments))
                if batches := await self.fetch(*partitions, most=most, seconds=0.0):
                    self._take(batches)
                    fetched |= batches.keys()
                    break
            else:
                break
        # Any poll raises errors of the client (A8), but it discards messages of the partitions that are paused (A14).
        return {} if has_polled else await self.fetch(*list(assignments)[:1], most=1, seconds=0.0)
