"""An in-memory broker for the real worker, with one member per consumer group."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from aiokafka.errors import CommitFailedError

from integr8s_idem.worker.kafka_protocols import Partition

PARTITIONS: Final = 2
"""Number of partitions of each topic."""

IDLE_SECONDS: Final = 1.0
"""Minimum wait of a poll without messages."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message in a partition of the broker."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]
    timestamp: int
    """Milliseconds since 1970, UTC, by the clock of the test."""
    is_copy: bool = False
    """Whether it repeats an earlier message."""


@dataclass(slots=True)
class _Group:
    committed: dict[Partition, int] = field(default_factory=dict)
    member: MemoryConsumer | None = None


class MemoryBroker:
    """An in-memory broker that creates topics on first use."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        """`now_ms`: returns milliseconds since 1970."""
        self.logs: dict[Partition, list[StoredMessage]] = {}
        self.groups: dict[str, _Group] = {}
        self._now_ms = now_ms

    def append(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Sequence[tuple[str, bytes]],
        *,
        partition: int | None = None,
    ) -> StoredMessage:
        """Append a message.  `partition`: chosen by the key if not given; the first for a message without a key."""
        if partition is None:
            partition = zlib.crc32(key) % PARTITIONS if key is not None else 0
        return self._put(StoredMessage(topic, partition, 0, key, value, tuple(headers), self._now_ms()))

    def repeat(self, message: StoredMessage) -> None:
        """Append a message once more to its partition."""
        self._put(replace(message, is_copy=True, timestamp=self._now_ms()))

    def _put(self, message: StoredMessage) -> StoredMessage:
        log = self.log(Partition(message.topic, message.partition))
        placed = replace(message, offset=len(log))
        log.append(placed)
        for group in self.groups.values():
            if group.member is not None:
                group.member.arrived.set()
        return placed

    def log(self, partition: Partition) -> list[StoredMessage]:
        return self.logs.setdefault(partition, [])

    def group(self, name: str) -> _Group:
        return self.groups.setdefault(name, _Group())

    def messages(self, topic: str | None = None) -> list[StoredMessage]:
        """Return all messages, or those of one topic, by partition."""
        return [each for at, log in self.logs.items() if topic in (None, at.topic) for each in log]

    def leave(self, consumer: MemoryConsumer) -> None:
        """Remove `consumer` from its group, because it left or its session expired."""
        group = self.group(consumer.group)
        if group.member is consumer:
            group.member = None

    def lag(self, group: str, topics: Collection[str]) -> int:
        """Return the number of messages of `topics` that the group has not committed."""
        committed = self.group(group).committed
        return sum(len(log) - committed.get(at, 0) for at, log in self.logs.items() if at.topic in topics)


class MemoryConsumer:
    """A replacement for `AIOKafkaConsumer`.  A consumer that joins gets all partitions, and its predecessor none."""

    def __init__(self, broker: MemoryBroker, group: str) -> None:
        self.group = group
        self.arrived = asyncio.Event()
        self._broker = broker
        self._topics: Sequence[str] = ()
        self._listener: Any = None
        self._positions: dict[Partition, int] = {}
        self._paused: set[Partition] = set()

    @property
    def is_member(self) -> bool:
        return self._broker.group(self.group).member is self

    def subscribe(self, topics: Sequence[str], *, listener: Any) -> None:
        self._topics, self._listener = topics, listener

    async def start(self) -> None:
        group = self._broker.group(self.group)
        group.member = self
        assigned = [Partition(topic, number) for topic in self._topics for number in range(PARTITIONS)]
        self._positions = {partition: group.committed.get(partition, 0) for partition in assigned}
        await self._listener.on_partitions_assigned(set(assigned))

    async def stop(self) -> None:
        if self.is_member:
            await self._lose_all()
            self._broker.leave(self)

    async def _lose_all(self) -> None:
        await self._listener.on_partitions_revoked(set(self._positions))
        self._positions.clear()

    async def getmany(self, *partitions: Any, timeout_ms: int, max_records: int) -> Mapping[Any, Sequence[Any]]:
        if not self.is_member and self._positions:
            await self._lose_all()
        batches = self._fetch(partitions, max_records)
        if not batches:
            self.arrived.clear()
            try:
                async with asyncio.timeout(max(timeout_ms / 1000, IDLE_SECONDS)):
                    await self.arrived.wait()
            except TimeoutError:
                return {}
            batches = self._fetch(partitions, max_records)
        await asyncio.sleep(0)
        return batches

    def _fetch(self, only: Sequence[Partition], most: int) -> dict[Partition, list[StoredMessage]]:
        batches: dict[Partition, list[StoredMessage]] = {}
        if not self.is_member:
            return batches
        for partition, position in self._positions.items():
            if partition in self._paused or (only and partition not in only):
                continue
            if taken := self._broker.log(partition)[position : position + most]:
                batches[partition] = taken
                self._positions[partition] = taken[-1].offset + 1
        return batches

    async def commit(self, offsets: Mapping[Any, int]) -> None:
        if not self.is_member:
            raise CommitFailedError("another member has its partitions")
        self._broker.group(self.group).committed.update(offsets)

    async def position(self, partition: Any) -> int:
        return self._positions[partition]

    def seek(self, partition: Any, offset: int) -> None:
        self._positions[partition] = offset

    def pause(self, *partitions: Any) -> None:
        self._paused.update(partitions)

    def resume(self, *partitions: Any) -> None:
        self._paused.difference_update(partitions)
        self.arrived.set()

    def assignment(self) -> set[Any]:
        return set(self._positions)

    def highwater(self, partition: Any) -> int | None:
        return len(self._broker.log(partition))

    async def end_offsets(self, partitions: Sequence[Any]) -> Mapping[Any, int]:
        return {partition: len(self._broker.log(partition)) for partition in partitions}
