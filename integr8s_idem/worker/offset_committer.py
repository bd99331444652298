"""Offsets to the broker: explicit ones, only for partitions that are ours, only forwards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from aiokafka.errors import KafkaError

from integr8s_idem.telemetry import Observer, Signal
from integr8s_idem.worker.assignments import Assignment
from integr8s_idem.worker.client_options import bounded
from integr8s_idem.worker.kafka_protocols import Consumer

logger = logging.getLogger(__name__)


class OffsetCommitter:
    """Commits what is done (R3)."""

    def __init__(self, service: str, timeout: float, observer: Observer) -> None:
        """`timeout`: seconds that one commit may take."""
        self._service = service
        self._timeout = timeout
        self._observer = observer
        # Two commits under way at once could arrive in the wrong order and move the group back.
        self._one_at_a_time = asyncio.Lock()

    async def commit(self, consumer: Consumer, assignments: Iterable[Assignment]) -> None:
        """Commit the watermark of each assignment that has advanced.  A failure is logged and counted."""
        async with self._one_at_a_time:
            ours = consumer.assignment()
            offsets = {
                assignment: offset
                for assignment in assignments
                # One partition that is not ours would make the broker's client refuse all of them.
                if not assignment.ended
                and assignment.partition in ours
                and (offset := assignment.progress.to_commit) is not None
            }
            if not offsets:
                return
            try:
                await bounded(
                    consumer.commit({assignment.partition: offset for assignment, offset in offsets.items()}),
                    self._timeout,
                )
            except (KafkaError, TimeoutError) as error:
                # Information, never a reason to handle anything again: the guard knows what is done (A1).
                self._observer.count(Signal.COMMIT_FAILED)
                logger.warning("%s: commit failed: %s: %s", self._service, type(error).__name__, error)
                return
            for assignment, offset in offsets.items():
                assignment.progress.committed = offset
