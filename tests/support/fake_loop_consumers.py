"""In-memory consumers of aiokafka and confluent-kafka with one partition, for tests of consumer loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import confluent_kafka
from aiokafka import TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError

from integr8s_idem import IdempotencyManager
from integr8s_idem.integrations.kafka_loops import by_position, work_of
from integr8s_idem.records import Reserved
from tests.support.fake_consumer import FakeRecord

TOPIC = "orders"
PARTITION = TopicPartition(TOPIC, 0)


class FakeMessage:
    """A message of confluent-kafka."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def topic(self) -> str:
        return TOPIC

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def value(self) -> bytes:
        return b"%d" % self._offset

    def headers(self) -> None:
        return None

    def key(self) -> None:
        return None

    def error(self) -> None:
        return None


class _FakeConsumer:
    def __init__(self, messages: int) -> None:
        self.messages = messages
        self.current_position = 0
        self.commits: list[int] = []
        self.commit_errors: list[BaseException] = []
        """Errors of the next commits."""
        self.is_assigned = True
        self.is_paused = False
        self.on_poll: Callable[[], None] = lambda: None

    def _next_offsets(self, most: int) -> range:
        self.on_poll()
        if self.is_paused or not self.is_assigned:
            return range(0)
        first = self.current_position
        self.current_position = min(first + most, self.messages)
        return range(first, self.current_position)

    def _commit(self, offset: int) -> None:
        if self.commit_errors:
            raise self.commit_errors.pop(0)
        self.commits.append(offset)


class FakeConfluent(_FakeConsumer):
    """A confluent-kafka consumer."""

    def __init__(self, messages: int) -> None:
        super().__init__(messages)
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def assignment(self) -> list[Any]:
        if self.is_closed:
            raise RuntimeError("Consumer closed")
        return [confluent_kafka.TopicPartition(TOPIC, 0)] if self.is_assigned else []

    def poll(self, timeout: float) -> FakeMessage | None:
        found = self._next_offsets(1)
        if not found:
            time.sleep(min(timeout, 0.01))
        return FakeMessage(found[0]) if found else None

    def seek(self, partition: Any) -> None:
        if not self.is_assigned:
            raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._STATE))
        self.current_position = partition.offset

    def pause(self, partitions: Sequence[Any]) -> None:
        self.is_paused = bool(partitions) or self.is_paused

    def resume(self, partitions: Sequence[Any]) -> None:
        self.is_paused = not partitions and self.is_paused

    def commit(self, *, offsets: Sequence[Any], asynchronous: bool) -> Sequence[Any]:
        [partition] = offsets
        self._commit(partition.offset)
        return offsets


class FakeAiokafka(_FakeConsumer):
    """An aiokafka consumer that fetches up to three records at once."""

    def assignment(self) -> set[Any]:
        return {PARTITION} if self.is_assigned else set()

    def paused(self) -> set[Any]:
        return {PARTITION} if self.is_paused else set()

    async def getmany(self, *partitions: Any, timeout_ms: int, max_records: int = 3) -> dict[Any, Any]:
        found = self._next_offsets(max_records)
        if not found:
            await asyncio.sleep(min(timeout_ms / 1000, 0.01))
        records = [FakeRecord(TOPIC, 0, offset, None, b"%d" % offset) for offset in found]
        return {PARTITION: records} if records else {}

    async def position(self, partition: Any) -> int:
        return self.current_position

    def seek(self, partition: Any, offset: int) -> None:
        if not self.is_assigned:
            raise IllegalStateError(f"No current assignment for partition {partition}")
        self.current_position = offset

    def pause(self, *partitions: Any) -> None:
        self.is_paused = bool(partitions) or self.is_paused

    def resume(self, *partitions: Any) -> None:
        self.is_paused = not partitions and self.is_paused

    async def commit(self, offsets: dict[Any, int]) -> None:
        if not self.is_assigned:
            raise KafkaError("not assigned")
        self._commit(offsets[PARTITION])


async def reserve_elsewhere(manager: IdempotencyManager) -> None:
    """Reserve the first record for another worker."""
    work = work_of(manager, FakeRecord(TOPIC, 0, 0, None, b"0"), by_position, None, reserve_elsewhere)
    assert isinstance(await manager.reserve(work.key, fingerprint=work.fingerprint), Reserved)
