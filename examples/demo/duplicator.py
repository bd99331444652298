"""Deliver events twice."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from aiokafka.errors import KafkaError

from examples.demo.errors import DemoError
from integr8s_idem.config import KafkaSettings
from integr8s_idem.errors import PublishError
from integr8s_idem.worker import EventPublisher
from integr8s_idem.worker.consumer import leave_group, make_consumer
from integr8s_idem.worker.kafka_protocols import Consumer

EVERY: Final = 3
"""One event of this many is delivered twice."""

_DELAYS: Final = (0.0, 0.2, 1.0, 3.0)
"""Delays of the copies in seconds: some arrive during the first delivery, some long after its end."""

_POLL_MS: Final = 200
_STOP_SECONDS: Final = 5.0


class Duplicator:
    """Reads every topic of the platform, and publishes every third event again, unchanged.

    A copy is recognized by its event id, and is not copied again.
    """

    def __init__(self, kafka: KafkaSettings, group: str, event_types: tuple[str, ...]) -> None:
        self._kafka = kafka
        self._group = group
        self._topics = [kafka.topic_prefix + event_type for event_type in event_types]
        self._publisher = EventPublisher(kafka)
        self._seen: set[tuple[str, bytes]] = set()
        self._due = 0
        self.copies = 0
        """Number of copies that the broker has confirmed."""

    @property
    def events(self) -> int:
        """Number of distinct events so far."""
        return len(self._seen)

    @property
    def idle(self) -> bool:
        """Whether no copy is pending."""
        return self._due == self.copies

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            DemoError: The broker failed.
        """
        consumer = make_consumer(self._kafka, self._group)
        consumer.subscribe(self._topics, listener=None)
        try:
            await consumer.start()
            async with asyncio.TaskGroup() as copying:
                while True:
                    for record in await _next(consumer):
                        if self._is_due(record):
                            copying.create_task(self._copy(record, _DELAYS[self._due % len(_DELAYS)]))
                            self._due += 1
        except* (KafkaError, PublishError) as errors:
            raise DemoError(
                "; ".join(f"events cannot be delivered again: {error!r}" for error in errors.exceptions)
            ) from errors
        finally:
            await leave_group(consumer, _STOP_SECONDS)
            await self._publisher.close()

    def _is_due(self, record: Any) -> bool:
        identity = (record.topic, dict(record.headers)["event_id"])
        if identity in self._seen:
            return False
        self._seen.add(identity)
        return len(self._seen) % EVERY == 0

    async def _copy(self, record: Any, delay: float) -> None:
        await asyncio.sleep(delay)
        await self._publisher.send(record.topic, record.key, record.value, record.headers)
        self.copies += 1


async def _next(consumer: Consumer) -> list[Any]:
    batches = await consumer.getmany(timeout_ms=_POLL_MS, max_records=1_000)
    return [record for records in batches.values() for record in records]
