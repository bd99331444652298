"""One real broker and one real Redis, shared by many trials, and the topics of a trial."""

from __future__ import annotations

import logging
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from integr8s_idem.events import BaseEvent, encode_event, event_headers
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from tests.support.homes import Home, StoreTable, open_home
from tests.support.kafka.broker import KafkaBroker
from tests.support.redis import RedisServer

PARTITIONS: Final = 2
BROKER: Final = 1
"""Node ID of the only broker, which coordinates all groups."""


@dataclass
class Servers:
    """Servers and clients that all trials share."""

    broker: KafkaBroker
    redis: RedisServer
    folder: Path
    """Files of the trials; deleted when the servers are stopped."""
    producer: Any
    admin: Any
    store: RedisIdempotencyRepository
    homes: Mapping[str, Home]
    """Additional servers for records, by kind of store."""

    @property
    def redis_settings(self) -> StoreTable:
        """Store settings of a worker that uses this Redis."""
        return {"kind": "redis", "url": self.redis.url, "timeout_seconds": 0.5}

    @asynccontextmanager
    async def topic_set(
        self, prefix: str, partitions: int = PARTITIONS, *, retry: Iterable[str] = ()
    ) -> AsyncIterator[Topics]:
        """Create the topics of a trial, and delete them at the end of the block.

        Args:
            prefix: Prefix of all topics.
            partitions: Number of partitions of the jobs, and of each retry topic.
            retry: Retry topics, without the prefix.
        """
        names = {f"{prefix}job": partitions, f"{prefix}job_done": 1, f"{prefix}job.dlq": 1}
        names |= {f"{prefix}{name}": partitions for name in retry}
        await self.broker.create_topics(names)
        try:
            yield Topics(self, prefix)
        finally:
            await self.admin.delete_topics(list(names))


@dataclass
class Topics:
    """The topics `job`, `job_done` and `job.dlq` of a trial, with its prefix."""

    servers: Servers
    prefix: str
    ends: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """End offset by partition of `job`."""
    published: list[str] = field(default_factory=list)
    """Work of all published jobs, duplicates included."""

    async def publish(self, events: Iterable[BaseEvent]) -> None:
        """Publish jobs; jobs of one aggregate go to one partition, in order."""
        for event in events:
            key = event.aggregate_id.encode() if event.aggregate_id else None
            sent = await self.servers.producer.send_and_wait(
                f"{self.prefix}job", encode_event(event), key=key, headers=event_headers(event)
            )
            self.ends[sent.partition] = max(self.ends[sent.partition], sent.offset + 1)
            self.published.append(getattr(event, "work"))  # noqa: B009  # jobs of any class

    async def settled(self, group: str) -> bool:
        """Return whether the group has committed all published jobs."""
        offsets = await self._committed(group)
        return all(offsets.get(partition, 0) >= end for partition, end in self.ends.items())

    async def progress(self, group: str) -> str:
        """Return the committed and the end offset of each partition, for error messages."""
        offsets = await self._committed(group)
        return ", ".join(f"{partition}: {offsets.get(partition, 0)} of {end}" for partition, end in self.ends.items())

    async def _committed(self, group: str) -> dict[int, int]:
        try:
            committed: Mapping[Any, Any] = await self.servers.admin.list_consumer_group_offsets(group, BROKER)
        except KafkaError as error:
            if error.retriable:  # the coordinator is not available
                return {}
            raise
        return {at.partition: offset.offset for at, offset in committed.items() if at.topic == f"{self.prefix}job"}

    async def members(self, group: str) -> set[str]:
        """Return the member IDs of the group."""
        [answer] = await self.servers.admin.describe_consumer_groups([group], BROKER)
        [(_, _, _, _, _, members, *_)] = answer.groups
        return {member_id for member_id, *_ in members}

    async def messages(self, name: str) -> Sequence[Any]:
        """Return all messages of a topic with a single partition."""
        partition = TopicPartition(f"{self.prefix}{name}", 0)
        consumer: Any = AIOKafkaConsumer(bootstrap_servers=self.servers.broker.bootstrap, enable_auto_commit=False)
        await consumer.start()
        try:
            consumer.assign([partition])
            end = (await consumer.end_offsets([partition]))[partition]
            consumer.seek(partition, 0)
            found: list[Any] = []
            while await consumer.position(partition) < end:
                batches = await consumer.getmany(partition, timeout_ms=200)
                found += batches.get(partition, [])
            return found
        finally:
            await consumer.stop()


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence a logger: clients log errors about servers that are starting and topics that were just created."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@asynccontextmanager
async def open_servers(redis: Mapping[str, str] | None = None, *, kinds: Iterable[str] = ()) -> AsyncIterator[Servers]:
    """Start the servers, and stop them at the end of the block.

    Args:
        redis: Redis settings that override those for tests.
        kinds: Kinds of stores that need servers in addition to this Redis.
    """
    with ExitStack() as stack:
        stack.enter_context(_quiet("aiokafka"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idem-crashes-")))
        (folder / "kafka").mkdir()
        broker = KafkaBroker(folder / "kafka")
        stack.callback(broker.kill)
        broker.start()
        server = stack.enter_context(RedisServer(config=redis))
        async with AsyncExitStack() as clients:
            producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap, acks="all", linger_ms=0)
            await producer.start()
            clients.push_async_callback(producer.stop)
            admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
            await admin.start()
            clients.push_async_callback(admin.close)
            client = server.client()
            clients.push_async_callback(client.aclose)
            store = RedisIdempotencyRepository(client, timeout=timedelta(seconds=30))
            homes = {kind: stack.enter_context(open_home(kind)) for kind in kinds}
            yield Servers(broker, server, folder, producer, admin, store, homes)
