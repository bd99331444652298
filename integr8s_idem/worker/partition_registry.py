"""The partitions that are ours, and what still runs of those that were."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from typing import Any

from integr8s_idem.worker.assignments import Assignment
from integr8s_idem.worker.kafka_protocols import Consumer, Partition

logger = logging.getLogger(__name__)


class PartitionRegistry:
    """Assignments by partition; they begin, close, end and begin anew here."""

    def __init__(self, service: str, drain_seconds: float) -> None:
        """`drain_seconds`: how long running handlers may go on when their partition is given up."""
        self._service = service
        self._drain_seconds = drain_seconds
        self.assignments: dict[Partition, Assignment] = {}
        self._leftover: list[Assignment] = []
        """Not ours any more, and not idle yet."""

    def begin(self, partitions: Iterable[Partition]) -> list[Assignment]:
        """They are ours from now on."""
        begun = [Assignment(Partition(*partition)) for partition in partitions]
        self.assignments.update({assignment.partition: assignment for assignment in begun})
        logger.info("%s: partitions that are ours now: %d", self._service, len(self.assignments))
        return begun

    def close_at_once(self) -> None:
        """Begin nothing more, of whatever is ours."""
        for assignment in self.assignments.values():
            assignment.close()

    async def close(self, assignments: Collection[Assignment]) -> None:
        """Begin nothing more of them, and let what runs come to its end, for a while."""
        for assignment in assignments:
            assignment.close()
        running = {assignment.idle() for assignment in assignments if assignment.running}
        if running:
            await asyncio.wait(running, timeout=self._drain_seconds)

    def end(self, assignment: Assignment) -> None:
        """It is not ours any more: handlers that still run keep their leases and complete, but move no offset."""
        assignment.close()
        assignment.ended = True
        if self.assignments.get(assignment.partition) is assignment:
            del self.assignments[assignment.partition]
        self._leftover = [left for left in (*self._leftover, assignment) if left.running]

    def begin_anew(self, old: Assignment, offset: int) -> Assignment:
        """Take `old` for over, and begin at `offset`.

        We never seek back behind what was delivered.  So the log is another one, whose offsets mean other
        messages: its topic was made anew under the same name, or it has lost its end.
        """
        logger.error(
            "%s: %s[%d] went back from offset %s to %d: the topic was made anew, or has lost messages; "
            "what it holds now is handled from there",
            self._service,
            old.partition.topic,
            old.partition.partition,
            old.progress.next_offset,
            offset,
        )
        self.end(old)
        assignment = self.assignments[old.partition] = Assignment(old.partition, start=offset)
        return assignment

    def forget(self) -> None:
        """The client is gone, and all partitions with it; what still runs is kept in sight."""
        for assignment in list(self.assignments.values()):
            self.end(assignment)

    def handlers(self) -> set[asyncio.Task[Any]]:
        """What handles deliveries, those of partitions given up included."""
        return {task for held in (*self.assignments.values(), *self._leftover) for task in held.handlers()}

    def lag(self, consumer: Consumer, topic: str | None = None) -> int:
        """Messages behind what is committed, as far as the last poll knows; of one topic, or of all."""
        ours = consumer.assignment()
        return sum(
            _behind(consumer, assignment)
            for partition, assignment in self.assignments.items()
            if partition in ours and topic in (None, partition.topic)
        )


def _behind(consumer: Consumer, assignment: Assignment) -> int:
    done = assignment.progress.committed
    done = assignment.start if done is None else done
    end = consumer.highwater(assignment.partition)
    return max(0, end - done) if end is not None and done is not None else 0
