"""One real broker and one real Redis for many trials, and what a trial asks of them."""

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
"""Its node id; it coordinates all groups."""


@dataclass
class Ground:
    """The servers, and clients of them that all trials share."""

    broker: KafkaBroker
    redis: RedisServer
    folder: Path
    """For everything that trials write; gone with the ground."""
    producer: Any
    admin: Any
    store: RedisIdempotencyRepository
    homes: Mapping[str, Home]
    """By kind: the servers for records that were asked for beside that Redis."""

    @property
    def redis_settings(self) -> StoreTable:
        """Of a store in that Redis, for a worker."""
        return {"kind": "redis", "url": self.redis.url, "timeout_seconds": 0.5}

    @asynccontextmanager
    async def topic_set(self, prefix: str, partitions: int = PARTITIONS) -> AsyncIterator[Topics]:
        """Topics of a trial, made and removed."""
        names = {f"{prefix}job": partitions, f"{prefix}job_done": 1, f"{prefix}job.dlq": 1}
        await self.broker.create_topics(names)
        try:
            yield Topics(self, prefix)
        finally:
            await self.admin.delete_topics(list(names))


@dataclass
class Topics:
    """The topics of one trial: `job`, `job_done`, `job.dlq` behind its prefix."""

    ground: Ground
    prefix: str
    ends: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By partition of `job`: the offset behind the last message."""
    published: list[str] = field(default_factory=list)
    """Works, copies included."""

    async def publish(self, events: Iterable[BaseEvent]) -> None:
        """Put jobs into the topic; those of one aggregate into one partition, in order."""
        for event in events:
            key = event.aggregate_id.encode() if event.aggregate_id else None
            sent = await self.ground.producer.send_and_wait(
                f"{self.prefix}job", encode_event(event), key=key, headers=event_headers(event)
            )
            self.ends[sent.partition] = max(self.ends[sent.partition], sent.offset + 1)
            self.published.append(getattr(event, "work"))  # noqa: B009  # any kind of job

    async def settled(self, group: str) -> bool:
        """Whether the group has committed all that was published."""
        offsets = await self._committed(group)
        return all(offsets.get(partition, 0) >= end for partition, end in self.ends.items())

    async def behind(self, group: str) -> str:
        """By partition how much of it is committed, for whoever waits in vain."""
        offsets = await self._committed(group)
        return ", ".join(f"{partition}: {offsets.get(partition, 0)} of {end}" for partition, end in self.ends.items())

    async def _committed(self, group: str) -> dict[int, int]:
        try:
            committed: Mapping[Any, Any] = await self.ground.admin.list_consumer_group_offsets(group, BROKER)
        except KafkaError as error:
            if error.retriable:  # the coordinator is not there yet, or not any more
                return {}
            raise
        return {at.partition: told.offset for at, told in committed.items() if at.topic == f"{self.prefix}job"}

    async def members(self, group: str) -> set[str]:
        """Whom the group consists of."""
        [answer] = await self.ground.admin.describe_consumer_groups([group], BROKER)
        [(_, _, _, _, _, members, *_)] = answer.groups
        return {member_id for member_id, *_ in members}

    async def messages(self, name: str) -> Sequence[Any]:
        """All messages of one of the topics with a single partition."""
        place = TopicPartition(f"{self.prefix}{name}", 0)
        consumer: Any = AIOKafkaConsumer(bootstrap_servers=self.ground.broker.bootstrap, enable_auto_commit=False)
        await consumer.start()
        try:
            consumer.assign([place])
            end = (await consumer.end_offsets([place]))[place]
            consumer.seek(place, 0)
            found: list[Any] = []
            while await consumer.position(place) < end:
                batches = await consumer.getmany(place, timeout_ms=200)
                found += batches.get(place, [])
            return found
        finally:
            await consumer.stop()


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Clients meet servers that are just starting and topics that are just made: nothing to tell of."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@asynccontextmanager
async def open_ground(redis: Mapping[str, str] | None = None, *, kinds: Iterable[str] = ()) -> AsyncIterator[Ground]:
    """Servers of our own, started now and gone afterwards.

    Args:
        redis: Settings of Redis over those for tests.
        kinds: Of the stores for which there must be servers beside that Redis.
    """
    with ExitStack() as servers:
        servers.enter_context(_quiet("aiokafka"))
        folder = Path(servers.enter_context(tempfile.TemporaryDirectory(prefix="idem-crashes-")))
        (folder / "kafka").mkdir()
        broker = KafkaBroker(folder / "kafka")
        servers.callback(broker.kill)
        broker.start()
        server = servers.enter_context(RedisServer(config=redis))
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
            homes = {kind: servers.enter_context(open_home(kind)) for kind in kinds}
            yield Ground(broker, server, folder, producer, admin, store, homes)
