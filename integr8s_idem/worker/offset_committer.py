"""Commit offsets explicitly, only of assigned partitions, and only forwards.

Numbers such as R1 and A5 refer to docs/explanation/worker.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from time import perf_counter

from aiokafka.errors import KafkaError

from integr8s_idem.telemetry import Observer, Signal
from integr8s_idem.worker.assignments import Assignment
from integr8s_idem.worker.client_options import bounded
from integr8s_idem.worker.kafka_protocols import Consumer

logger = logging.getLogger(__name__)


class OffsetCommitter:
    """Commits the offsets of settled deliveries (R3)."""

    def __init__(self, service: str, timeout: float, observer: Observer) -> None:
        """`timeout` is the maximum duration of a commit in seconds."""
        self._service = service
        self._timeout = timeout
        self._observer = observer
        # Concurrent commits could arrive in the wrong order and rewind the group.
        self._lock = asyncio.Lock()

    async def commit(self, consumer: Consumer, assignments: Iterable[Assignment]) -> None:
        """Commit the watermark of each assignment that has advanced.  A failure is logged and counted."""
        async with self._lock:
            assigned = consumer.assignment()
            offsets = {
                assignment: offset
                for assignment in assignments
                # The client refuses the whole commit if one partition is not assigned.
                if not assignment.ended
                and assignment.partition in assigned
                and (offset := assignment.progress.to_commit) is not None
            }
            if not offsets:
                return
            topics = {assignment.partition.topic for assignment in offsets}
            topic = topics.pop() if len(topics) == 1 else ""
            since = perf_counter()
            try:
                await bounded(
                    consumer.commit({assignment.partition: offset for assignment, offset in offsets.items()}),
                    self._timeout,
                )
            except (KafkaError, TimeoutError) as error:
                # Nothing is handled twice because of this: records show which work is done (A1).
                self._observer.count(Signal.COMMIT_FAILED)
                self._observer.offsets_committed(since=since, topic=topic, error=error)
                logger.warning("%s: commit failed: %s: %s", self._service, type(error).__name__, error)
                return
            self._observer.offsets_committed(since=since, topic=topic)
            for assignment, offset in offsets.items():
                assignment.progress.committed = offset
