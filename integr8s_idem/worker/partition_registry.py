"""The partitions that are assigned to this worker, and revoked ones with running handlers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from typing import Any

from integr8s_idem.telemetry.log_fields import logging_with
from integr8s_idem.worker.assignments import Assignment
from integr8s_idem.worker.kafka_protocols import Consumer, Partition
from integr8s_idem.worker.retry_topics import RetryPartition, RetryTopics

logger = logging.getLogger(__name__)


class PartitionRegistry:
    """Starts, closes and ends assignments."""

    def __init__(self, service: str, drain_seconds: float, retries: RetryTopics | None = None) -> None:
        """
        Args:
            service: Name of the service.
            drain_seconds: How long running handlers may take when their partition is revoked.
            retries: The retry topics of the service, if it has any.
        """
        self._service = service
        self._retries = retries
        self._drain_seconds = drain_seconds
        self.assignments: dict[Partition, Assignment] = {}
        self._leftover: list[Assignment] = []
        """Ended assignments with running deliveries."""

    def begin(self, partitions: Iterable[Partition]) -> list[Assignment]:
        """Start assignments of `partitions`."""
        new = [self._new(Partition(*partition)) for partition in partitions]
        self.assignments.update({assignment.partition: assignment for assignment in new})
        logger.info("%s: assigned partitions: %d", self._service, len(self.assignments))
        if not self.assignments:
            logger.warning(
                "%s: this worker has no partitions and handles nothing: its topics have fewer partitions than its "
                "group has members, or do not exist yet. Start fewer workers, or add partitions",
                self._service,
            )
        return new

    def _new(self, partition: Partition, start: int | None = None) -> Assignment:
        topic = self._retries.find(partition.topic) if self._retries is not None else None
        retry = RetryPartition(topic) if topic is not None else None
        return Assignment(partition, self._service, start=start, retry=retry)

    def close_all(self) -> None:
        """Close all assignments without waiting."""
        for assignment in self.assignments.values():
            assignment.close()

    async def close(self, assignments: Collection[Assignment]) -> None:
        """Start no more deliveries of `assignments`, and wait up to `drain_seconds` for those that run."""
        for assignment in assignments:
            assignment.close()
        running = {assignment.idle() for assignment in assignments if assignment.running}
        if running:
            await asyncio.wait(running, timeout=self._drain_seconds)

    def end(self, assignment: Assignment) -> None:
        """End an assignment: running handlers keep their leases and complete, but no longer move offsets."""
        assignment.close()
        assignment.ended = True
        if self.assignments.get(assignment.partition) is assignment:
            del self.assignments[assignment.partition]
        self._leftover = [left for left in (*self._leftover, assignment) if left.running]

    def restart(self, old: Assignment, offset: int) -> Assignment:
        """End `old`, and start another assignment of its partition at `offset`.

        The worker never seeks to offsets before the next one.  If they are fetched, the log has changed and its offsets
        refer to other messages: the topic was recreated under the same name, or the end of the log was lost.
        """
        with logging_with(old, offset=offset):
            logger.error(
                "%s: %s[%d] went back from offset %s to %d: the topic was recreated, or has lost messages; "
                "handling continues from there",
                self._service,
                old.partition.topic,
                old.partition.partition,
                old.progress.next_offset,
                offset,
            )
        self.end(old)
        assignment = self.assignments[old.partition] = self._new(old.partition, offset)
        return assignment

    def end_all(self) -> None:
        """End all assignments after the client was closed."""
        for assignment in list(self.assignments.values()):
            self.end(assignment)

    def handlers(self) -> set[asyncio.Task[Any]]:
        """Return the tasks that handle deliveries, including those of revoked partitions."""
        return {task for held in (*self.assignments.values(), *self._leftover) for task in held.handlers()}

    def lag(self, consumer: Consumer, topic: str | None = None) -> int:
        """Return the number of messages after the committed offsets as of the last poll, of one topic or of all."""
        assigned = consumer.assignment()
        return sum(
            _lag_of(consumer, assignment)
            for partition, assignment in self.assignments.items()
            if partition in assigned and topic in (None, partition.topic)
        )


def _lag_of(consumer: Consumer, assignment: Assignment) -> int:
    done = assignment.progress.committed
    done = assignment.start if done is None else done
    end = consumer.highwater(assignment.partition)
    return max(0, end - done) if end is not None and done is not None else 0
