"""An in-memory broker and its only consumer, for tests of `ServiceWorker` in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka.errors import CorruptRecordException

from integr8s_idem.events import BaseEvent, encode_event, event_headers
from integr8s_idem.worker.kafka_protocols import Partition


@dataclass(frozen=True, slots=True)
class FakeRecord:
    """A message."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]] = ()
    timestamp: int = 1_893_456_000_000


@dataclass(slots=True)
class FakeBroker:
    """Messages and committed offsets by partition."""

    logs: dict[Partition, list[FakeRecord]] = field(default_factory=dict)
    committed: dict[Partition, int] = field(default_factory=dict)
    damaged: dict[Partition, int] = field(default_factory=dict)
    """Offsets that cannot be read.  Like in aiokafka, a poll that reaches one loses messages of other partitions."""
    markers: dict[Partition, int] = field(default_factory=dict)
    """Ends of logs whose last message is followed by transaction markers or aborted messages."""
    commits: list[dict[Partition, int]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def put(
        self, topic: str, value: bytes | None, *, partition: int = 0, key: bytes | None = None, gap: int = 0,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> FakeRecord:  # fmt: skip
        """Append a message after `gap` empty offsets, as compaction leaves them."""
        log = self.logs.setdefault(Partition(topic, partition), [])
        offset = self.end(Partition(topic, partition)) + gap
        record = FakeRecord(topic, partition, offset, key, value, headers)
        log.append(record)
        self.arrived.set()
        return record

    def mark(self, topic: str, count: int = 1, *, partition: int = 0) -> None:
        """Append `count` offsets without a message: transaction markers or aborted messages."""
        at = Partition(topic, partition)
        self.logs.setdefault(at, [])
        self.markers[at] = self.end(at) + count
        self.arrived.set()

    def end(self, partition: Partition) -> int:
        """Return the next offset of a log."""
        log = self.logs.get(partition)
        return max(log[-1].offset + 1 if log else 0, self.markers.get(partition, 0))

    def publish(self, *events: BaseEvent, partition: int = 0) -> None:
        """Append events to the topics of their types."""
        for event in events:
            key = event.aggregate_id.encode() if event.aggregate_id else None
            self.put(event.event_type, encode_event(event), partition=partition, key=key, headers=event_headers(event))

    def values(self, topic: str) -> list[FakeRecord]:
        """Return all messages of a topic."""
        return [record for at, log in self.logs.items() if at.topic == topic for record in log]


class FakeConsumer:
    """The only member of its group; it is assigned all partitions of its topics that exist when it starts."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.paused: set[Partition] = set()
        self.errors: list[BaseException] = []
        """Errors that the next polls raise, one each."""
        self._topics: Sequence[str] = ()
        self._listener: Any = None
        self._positions: dict[Partition, int] = {}

    def subscribe(self, topics: Sequence[str], *, listener: Any) -> None:
        self._topics, self._listener = topics, listener

    async def start(self) -> None:
        await self.give(at for at in self.broker.logs if at.topic in self._topics)

    async def stop(self) -> None:
        if self._positions:
            await self._listener.on_partitions_revoked(set(self._positions))
        self._positions.clear()

    async def give(self, partitions: Iterable[Partition]) -> None:
        """Assign partitions in a rebalance, which clears all pauses, like in aiokafka."""
        given = sorted(set(partitions))
        self.paused.clear()
        for partition in given:
            self._positions[partition] = self.broker.committed.get(partition, 0)
        await self._listener.on_partitions_assigned(set(given))

    async def take(self, partitions: Iterable[Partition]) -> None:
        """Revoke partitions in a rebalance."""
        taken = set(partitions)
        await self._listener.on_partitions_revoked(taken)
        self.paused.clear()
        for partition in taken:
            del self._positions[partition]

    async def getmany(self, *partitions: Any, timeout_ms: int, max_records: int) -> Mapping[Any, Sequence[Any]]:
        if self.errors:
            raise self.errors.pop(0)
        batches = self._fetch(partitions, max_records)
        if not batches:
            self.broker.arrived.clear()
            try:
                await asyncio.wait_for(self.broker.arrived.wait(), timeout_ms / 1000)
            except TimeoutError:
                return {}
            batches = self._fetch(partitions, max_records)
        await asyncio.sleep(0)
        return batches

    def _fetch(self, only: Sequence[Partition], max_records: int) -> dict[Partition, list[FakeRecord]]:
        batches: dict[Partition, list[FakeRecord]] = {}
        for partition, position in self._positions.items():
            if partition in self.paused or (only and partition not in only):
                continue
            if position == self.broker.damaged.get(partition):
                raise CorruptRecordException(f"{partition} at {position}")
            end = self.broker.damaged.get(partition, 2**62)
            log = self.broker.logs.get(partition, [])
            records = [record for record in log if position <= record.offset < end]
            if taken := records[:max_records]:
                batches[partition] = taken
                max_records -= len(taken)
                self._positions[partition] = taken[-1].offset + 1
            if len(taken) == len(records):
                self._positions[partition] = max(self._positions[partition], min(self.broker.end(partition), end))
        return batches

    async def commit(self, offsets: Mapping[Any, int]) -> None:
        assert set(offsets) <= set(self._positions), "commit of a partition that is not assigned"
        self.broker.commits.append(dict(offsets))
        self.broker.committed.update(offsets)

    async def position(self, partition: Any) -> int:
        return self._positions[partition]

    def seek(self, partition: Any, offset: int) -> None:
        self._positions[partition] = offset

    def pause(self, *partitions: Any) -> None:
        self.paused.update(partitions)

    def resume(self, *partitions: Any) -> None:
        self.paused.difference_update(partitions)

    def assignment(self) -> set[Any]:
        return set(self._positions)

    def highwater(self, partition: Any) -> int | None:
        return self.broker.end(partition)

    async def end_offsets(self, partitions: Sequence[Any]) -> Mapping[Any, int]:
        return {partition: self.highwater(partition) or 0 for partition in partitions}
