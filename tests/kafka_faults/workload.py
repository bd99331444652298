"""A load of events by key, group members that handle them, and the effects that they leave."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from aiokafka import TopicPartition
from aiokafka.partitioner import DefaultPartitioner

from integr8s_idem import EventPublisher, EventRouter, IdempotencyConfig, IdempotencyManager, IdempotentEventDispatcher
from integr8s_idem.config import KafkaSettings, RedisStoreSettings, ServiceSettings
from integr8s_idem.errors import PublishError
from integr8s_idem.handlers.handler_calls import HandlerCall, RegisteredHandler
from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_client
from integr8s_idem.worker import ServiceWorker
from tests.campaigns.figures import Figures, ViolationError
from tests.kafka_faults import servers
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.kafka.broker import Kafka
from tests.support.workers import QUICK, OrderPlaced, WorkerInTest

KEYS: Final = 8
HANDLER_SECONDS: Final = 0.02
COMMITTED_WITHIN: Final = 30.0
"""Seconds within which the last offsets must be committed."""

BY_KEY: Final = QUICK.model_copy(update={"ordering": "key", "max_in_flight": 60})


@dataclass
class Workload:
    """A topic with numbered events per key, and the members that handle them."""

    settings: KafkaSettings
    group: str
    effects: Effects
    publisher: EventPublisher
    service: ServiceSettings = BY_KEY
    handler_seconds: float = HANDLER_SECONDS
    members: list[WorkerInTest] = field(default_factory=list)
    past: list[WorkerInTest] = field(default_factory=list)
    """Members that have left."""
    published: list[str] = field(default_factory=list)
    partitions: int = 4
    rounds: int = 0
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    """Handlers wait for it while it is cleared."""
    _clients: list[Any] = field(default_factory=list)

    @property
    def topic(self) -> str:
        return self.publisher.topic_of("order_placed")

    async def join(self) -> WorkerInTest:
        """Start another member; it may not have joined the group yet."""
        manager = self._manager()
        publisher = EventPublisher(self.settings)
        router = EventRouter()

        @router.on(OrderPlaced)
        async def handle(event: OrderPlaced) -> None: ...

        dispatcher = IdempotentEventDispatcher(router, manager, publisher=publisher, invoke=self._invoke)
        worker = ServiceWorker("tasks", dispatcher, publisher, self.settings, self.service, group=self.group)
        member = WorkerInTest(worker, manager, publisher, asyncio.create_task(worker.run()))
        self.members.append(member)
        return member

    def _manager(self) -> IdempotencyManager:
        client = redis_client(RedisStoreSettings(url=servers.redis().url))
        config = IdempotencyConfig(processing_timeout_seconds=5, default_ttl_seconds=3600)
        manager = IdempotencyManager(config, RedisIdempotencyRepository(client), scope=self.group)
        self._clients.append(client)
        return manager

    async def _invoke(self, handler: RegisteredHandler, call: HandlerCall) -> str:
        event = call.event
        assert isinstance(event, OrderPlaced)
        self.effects.note("begin", event.order_id, call.attempt)
        await asyncio.sleep(self.handler_seconds / 2)
        await self.may_end.wait()
        self.effects.apply(event.order_id, call.attempt)
        await asyncio.sleep(self.handler_seconds / 2)
        self.effects.note("end", event.order_id, call.attempt)
        return event.order_id

    async def leave(self, member: WorkerInTest, *, at_once: bool = False) -> None:
        """Stop `member` after a drain; with `at_once`, cancel its handlers instead."""
        self.members.remove(member)
        self.past.append(member)
        if at_once:
            member.task.cancel()
            await asyncio.wait({member.task})
            await member.manager.close()
            await member.publisher.close()
        else:
            await member.stop()

    async def publish_round(self) -> None:
        """Publish the next event of each key, with retries until it is confirmed.  Only one round runs at a time."""
        async with self.publishing:
            await self._publish_round()

    async def _publish_round(self) -> None:
        events = [
            OrderPlaced(order_id=f"{key}-{self.rounds}", aggregate_id=f"{self.group}-{key}") for key in range(KEYS)
        ]
        self.rounds += 1
        self.published += [event.order_id for event in events]
        for event in events:
            while True:
                try:
                    await self.publisher.publish(event)
                    break
                except PublishError:
                    await asyncio.sleep(0.1)

    def partition_of(self, work: str) -> int:
        """Return the partition of a key's events."""
        return _partition_of(f"{self.group}-{work.split('-')[0]}", self.partitions)

    async def feed(self, every: float) -> None:
        """Publish a round every `every` seconds until cancelled."""
        while True:
            await asyncio.shield(asyncio.ensure_future(self.publish_round()))
            await asyncio.sleep(every)

    async def all_settled(self, *, within: float = 60.0) -> None:
        """Wait until every published event has had its effect, and no event is in flight."""

        def settled() -> bool:
            reports = [member.worker.report() for member in self.members]
            return self.effects.done() >= set(self.published) and all(report.in_flight == 0 for report in reports)

        await eventually(settled, within=within, state=self.snapshot)

    def snapshot(self) -> str:
        """Describe the state, for error messages."""
        missing = sorted(set(self.published) - self.effects.done())
        return f"missing {missing[:10]} of {len(self.published)}; " + "; ".join(
            str(member.worker.report()) for member in self.members
        )

    async def judge(self) -> Figures:
        """Check that every event had its effect once in the sink and in order of its key, and was committed.

        Raises:
            ViolationError: An event was lost, repeated, out of order, or not committed.
        """
        figures = self.effects.judge(self.published)
        self._judge_order()
        give_up_at = time.monotonic() + COMMITTED_WITHIN
        while sum((committed := await self._committed()).values()) < len(self.published):
            if time.monotonic() > give_up_at:
                raise ViolationError(f"committed only {committed} of {len(self.published)}")
            await asyncio.sleep(0.1)
        figures.update(self.effects.judge_records(await servers.records(self.effects.keys())))
        if figures["completed"] != len(self.published):
            raise ViolationError(f"completed only {figures['completed']} of {len(self.published)}")
        return figures

    async def _committed(self) -> dict[TopicPartition, int]:
        return await servers.committed(self.settings.bootstrap_servers, self.group)

    def _judge_order(self) -> None:
        seen: dict[str, int] = {}
        for work in self.effects.in_sink():  # in order of arrival
            key, number = work.split("-")
            if int(number) != seen.get(key, -1) + 1:
                raise ViolationError(f"{work} followed number {seen.get(key)} of its key")
            seen[key] = int(number)

    async def close(self) -> None:
        """Stop all members without draining, and close all clients."""
        for member in list(self.members):
            await self.leave(member, at_once=True)
        await self.publisher.close()
        for client in self._clients:
            await client.aclose()


def _partition_of(key: str, partitions: int) -> int:
    numbers = list(range(partitions))
    chosen: int = DefaultPartitioner()(key.encode(), numbers, numbers)
    return chosen


def _prefixes() -> Iterator[str]:
    while True:
        yield f"w{uuid4().hex[:10]}."


def _used_by(group: str, partitions: int) -> set[int]:
    return {_partition_of(f"{group}-{key}", partitions) for key in range(KEYS)}


@asynccontextmanager
async def open_workload(kafka: Kafka, *, partitions: int = 4, **changes: Any) -> AsyncIterator[Workload]:
    """Create a topic and a workload on it; remaining members are stopped at the end."""
    # With two partitions, all keys would fall into one of them for one of 128 prefixes.
    prefix = next(name for name in _prefixes() if len(_used_by(f"{name}tasks", partitions)) > 1 or partitions == 1)
    settings = KafkaSettings.model_validate(
        {
            "bootstrap_servers": kafka.bootstrap,
            "topic_prefix": prefix,
            "session_timeout_seconds": 6,
            "heartbeat_interval_seconds": 0.3,
            "rebalance_timeout_seconds": 10,
            "request_timeout_seconds": 5,
            "metadata_max_age_seconds": 1,
            **changes,
        }
    )
    await kafka.create_topics({f"{prefix}order_placed": partitions})
    with tempfile.TemporaryDirectory(prefix="idem-workload-") as folder:
        effects = Effects(Path(folder))
        effects.prepare()
        workload = Workload(settings, f"{prefix}tasks", effects, EventPublisher(settings), partitions=partitions)
        workload.may_end.set()
        try:
            yield workload
        finally:
            await workload.close()
