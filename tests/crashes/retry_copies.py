"""The copies in the retry topics of a trial, as read from the broker."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from integr8s_idem.worker.dead_letters import RETRY_PREFIX
from tests.crashes.ground import BROKER, PARTITIONS, Servers
from tests.crashes.retry_jobs import group_of, retry_topics

_POLL_MS: Final = 200


@dataclass(frozen=True, slots=True)
class Copy:
    """A message in a retry topic."""

    work: str
    attempt: int
    is_signed: bool


class Copies:
    """Reads the retry topics of one group."""

    def __init__(self, servers: Servers, prefix: str, consumer: Any) -> None:
        self._admin = servers.admin
        self._consumer = consumer
        self._group = group_of(prefix)
        names = [f"{prefix}{name}" for name in retry_topics(self._group)]
        self._partitions = [TopicPartition(name, number) for name in names for number in range(PARTITIONS)]

    @classmethod
    @asynccontextmanager
    async def open(cls, servers: Servers, prefix: str) -> AsyncIterator[Self]:
        """Open a consumer, which joins no group."""
        consumer: Any = AIOKafkaConsumer(bootstrap_servers=servers.broker.bootstrap, enable_auto_commit=False)
        await consumer.start()
        try:
            copies = cls(servers, prefix, consumer)
            consumer.assign(copies._partitions)
            yield copies
        finally:
            await consumer.stop()

    async def are_settled(self) -> bool:
        """Whether the group has committed all copies."""
        committed = await self._committed()
        ends = await self._ends()  # afterwards, so that a copy that is published in between counts
        return all(committed.get(partition, 0) >= end for partition, end in ends.items())

    async def waiting(self) -> dict[str, set[int]]:
        """Return the attempts of the copies that are not committed, by work.  No worker is running."""
        found = defaultdict[str, set[int]](set)
        for copy in await self._read(await self._committed()):
            found[copy.work].add(copy.attempt)
        return found

    async def all(self) -> Sequence[Copy]:
        """Return all copies so far."""
        return await self._read({})

    async def _ends(self) -> Mapping[TopicPartition, int]:
        ends: Mapping[TopicPartition, int] = await self._consumer.end_offsets(self._partitions)
        return ends

    async def _committed(self) -> Mapping[TopicPartition, int]:
        try:
            committed: Mapping[Any, Any] = await self._admin.list_consumer_group_offsets(self._group, BROKER)
        except KafkaError as error:
            if error.retriable:  # the coordinator is not available
                return {}
            raise
        return {partition: offset.offset for partition, offset in committed.items()}

    async def _read(self, starts: Mapping[TopicPartition, int]) -> list[Copy]:
        ends = await self._ends()
        for partition in self._partitions:
            self._consumer.seek(partition, starts.get(partition, 0))
        found: list[Copy] = []
        while any([await self._consumer.position(partition) < end for partition, end in ends.items()]):
            batches = await self._consumer.getmany(timeout_ms=_POLL_MS)
            found += [_copy(message) for messages in batches.values() for message in messages]
        return found


def _copy(message: Any) -> Copy:
    headers = dict(message.headers)
    attempt = int(headers[f"{RETRY_PREFIX}attempt"])
    return Copy(json.loads(message.value)["work"], attempt, f"{RETRY_PREFIX}signature" in headers)
