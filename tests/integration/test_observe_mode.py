"""Observe mode on a real Kafka and Redis: settings, workers, metrics and the report."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from integr8s_idem import BaseEvent, EventPublisher, EventRouter, Service, Settings
from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.operations.observe_report import ServiceObservations, observe_report
from integr8s_idem.operations.worker_addresses import Address
from integr8s_idem.runtime import ServiceGroup
from integr8s_idem.telemetry import Observed
from integr8s_idem.worker import ServiceReport
from tests.support.conditions import eventually
from tests.support.kafka import Kafka
from tests.support.redis import RedisServer

pytestmark = pytest.mark.kafka


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    number: int


@dataclass
class Consumer:
    """A service with one handler, whose name is unique: metrics belong to the process of all tests."""

    kafka: Kafka
    prefix: str
    redis_url: str
    timeout: float = 1.0
    """Timeout of the store in seconds."""
    handled: list[int] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Handlers of negative numbers wait for it."""

    @property
    def name(self) -> str:
        return self.prefix.strip(".")

    def settings(self, mode: str, group: str = "group") -> Settings:
        return Settings.model_validate(
            {
                "kafka": {
                    "bootstrap_servers": self.kafka.bootstrap,
                    "topic_prefix": self.prefix,
                    "session_timeout_seconds": 6,
                    "heartbeat_interval_seconds": 0.5,
                },
                "store": {"url": self.redis_url, "timeout_seconds": self.timeout},
                "idempotency": {"default_ttl_seconds": 7_200},
                "services": {self.name: {"mode": mode, "group_id": self.prefix + group, "ordering": "none"}},
                "telemetry": {"metrics_port": 0, "spans": "off"},
            }
        )

    @property
    def service(self) -> Service:
        router = EventRouter()

        @router.on(OrderPlaced)
        async def charge(event: OrderPlaced) -> str:
            if event.number < 0:
                await self.gate.wait()
            self.handled.append(event.number)
            return f"receipt-{event.number}"

        providers = [IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)]
        return Service(self.name, providers=providers)

    @asynccontextmanager
    async def running(self, mode: str, group: str = "group") -> AsyncIterator[Worker]:
        """Run a worker, and drain it at the end."""
        ports: list[int] = []
        service_group = ServiceGroup([self.service], self.settings(mode, group), lambda _, port: ports.append(port))
        task = asyncio.create_task(service_group.run())
        worker = Worker(self.name, service_group, task, ports)
        try:
            await eventually(lambda: worker.report.state == "running" or task.done(), state=service_group.reports)
            yield worker
        finally:
            service_group.stop()
            async with asyncio.timeout(30):
                assert await task == 0, service_group.reports()

    async def publish(self, *events: BaseEvent) -> None:
        publisher = EventPublisher(self.settings("enforce").kafka)
        await publisher.publish(*events)
        await publisher.close()

    async def publish_changed(self, event: OrderPlaced, number: int) -> None:
        """Publish an event with the same id, and another number."""
        changed = event.model_copy(update={"number": number})
        publisher = EventPublisher(self.settings("enforce").kafka)
        await publisher.send(f"{self.prefix}order_placed", None, encode_event(changed), event_headers(changed))
        await publisher.close()


@dataclass
class Worker:
    """A worker in the process of the test."""

    name: str
    group: ServiceGroup
    task: asyncio.Task[int]
    ports: list[int]

    @property
    def report(self) -> ServiceReport:
        return self.group.reports()[0]

    async def observed(self) -> ServiceObservations:
        """Ask its metrics endpoint."""
        report = await observe_report([Address("127.0.0.1", self.ports[0])])
        return next(each for each in report.services if each.service == self.name)

    async def until(self, condition: Callable[[ServiceObservations], bool]) -> ServiceObservations:
        async with asyncio.timeout(60):
            while not condition(found := await self.observed()):
                await asyncio.wait({self.task}, timeout=0.05)
                assert not self.task.done(), self.report
        return found


@pytest.fixture
def consumer(kafka: Kafka, topic_prefix: str, redis_url: str) -> Consumer:
    return Consumer(kafka, topic_prefix, redis_url)


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def orders(count: int, first: int = 0) -> list[OrderPlaced]:
    return [OrderPlaced(number=number) for number in range(first, first + count)]


async def test_all_kinds_of_duplicates_run_and_are_reported(consumer: Consumer) -> None:
    [slow], [first, second] = orders(1, first=-1), orders(2)
    await consumer.publish(first, second)
    async with consumer.running("observe") as worker:
        await worker.until(lambda seen: seen.deliveries == 2)
        await consumer.publish(first)
        await consumer.publish_changed(second, 7)
        await worker.until(lambda seen: seen.count(Observed.REPUBLISHED) == 2)
        await consumer.publish(slow, slow)
        await worker.until(lambda seen: seen.count(Observed.CONCURRENT) == 1)
        consumer.gate.set()
        await eventually(lambda: len(consumer.handled) == 6)

    assert sorted(consumer.handled) == [-1, -1, 0, 0, 1, 7]
    consumer.handled.clear()
    # Another consumer group of the same service gets the same messages again.
    async with consumer.running("observe", group="again") as worker:
        seen = await worker.until(lambda seen: seen.deliveries == 12 and seen.count(Observed.REDELIVERED) == 3)

    assert seen.duplicates == 9
    assert (seen.count(Observed.REPUBLISHED), seen.count(Observed.CONCURRENT), seen.other_payloads) == (5, 1, 2)
    assert len(consumer.handled) == 6
    assert (seen.count(Observed.FAILED), seen.count(Observed.UNRECORDED)) == (0, 0)
    assert seen.ttl_seconds == 7_200
    assert seen.gap_of(0.999) in (1, 10, 60)


async def test_the_command_prints_the_report_and_fails_if_nothing_observes(consumer: Consumer) -> None:
    [order] = orders(1)

    async def observe(port: int, *options: str) -> tuple[int | None, str, str]:
        command = [sys.executable, "-m", "integr8s_idem", "observe", str(port), *options]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, error = await process.communicate()
        return process.returncode, out.decode(), error.decode()

    async with consumer.running("observe") as worker:
        await consumer.publish(order)
        await worker.until(lambda seen: seen.deliveries == 1)
        await consumer.publish(order)
        await worker.until(lambda seen: seen.duplicates == 1)
        status, text, _ = await observe(worker.ports[0])
        json_status, document, _ = await observe(worker.ports[0], "--json")
        closed = worker.ports[0]
    silent = await observe(closed)

    found: Any = json.loads(document)
    assert (status, json_status) == (0, 0)
    assert f"{consumer.name}: observes, keeps records for 2 h" in text
    assert "would have caught 99.9 % of them" in text
    assert found["services"][consumer.name]["duplicates_by_kind"]["republished"] == 1
    assert silent[0] == 1
    assert "does not answer" in silent[2]


async def test_an_outage_of_redis_neither_pauses_nor_delays_handlers(
    kafka: Kafka, topic_prefix: str, own_redis: RedisServer
) -> None:
    consumer = Consumer(kafka, topic_prefix, own_redis.url)
    async with consumer.running("observe") as worker:
        await consumer.publish(*orders(10))
        await worker.until(lambda seen: seen.count(Observed.FIRST) == 10)
        own_redis.kill()
        await consumer.publish(*orders(500, first=10))
        await eventually(lambda: len(consumer.handled) == 510, within=10, state=worker.group.reports)
        assert worker.report.state == "running"
        lost = await worker.until(lambda seen: seen.deliveries == 510)
        own_redis.start()
        more = 0

        async def observed_again() -> bool:
            nonlocal more
            await consumer.publish(*orders(1, first=1_000 + more))
            more += 1
            return (await worker.observed()).count(Observed.FIRST) > 10

        async with asyncio.timeout(60):
            while not await observed_again():
                await asyncio.wait({worker.task}, timeout=0.2)

    assert lost.count(Observed.FAILED) == 500
    assert sorted(consumer.handled)[:510] == list(range(510))


async def test_handlers_run_while_redis_hangs(kafka: Kafka, topic_prefix: str, own_redis: RedisServer) -> None:
    # If anything waited for the store, it would wait for longer than the test.
    consumer = Consumer(kafka, topic_prefix, own_redis.url, timeout=60)
    async with consumer.running("observe") as worker:
        await consumer.publish(*orders(1))
        await worker.until(lambda seen: seen.count(Observed.FIRST) == 1)
        own_redis.pause()
        try:
            await consumer.publish(*orders(500, first=1))
            await eventually(lambda: len(consumer.handled) == 501, within=10, state=worker.group.reports)
        finally:
            own_redis.resume()
        await worker.until(lambda seen: seen.deliveries == 501)


async def test_a_service_observes_before_redis_is_reachable(
    kafka: Kafka, topic_prefix: str, own_redis: RedisServer
) -> None:
    consumer = Consumer(kafka, topic_prefix, own_redis.url)
    own_redis.kill()
    async with consumer.running("observe") as worker:
        await consumer.publish(*orders(3))
        await worker.until(lambda seen: seen.count(Observed.FAILED) == 3)

    assert sorted(consumer.handled) == [0, 1, 2]


async def test_after_the_switch_to_enforce_observed_events_are_duplicates(consumer: Consumer) -> None:
    placed = orders(3)
    async with consumer.running("observe") as worker:
        await consumer.publish(*placed)
        await worker.until(lambda seen: seen.count(Observed.FIRST) == 3)

    async with consumer.running("enforce") as worker:
        await consumer.publish(*placed)
        await eventually(lambda: worker.report.tally.duplicates == 3, state=worker.group.reports)

    assert sorted(consumer.handled) == [0, 1, 2]


async def test_workers_of_both_modes_lose_no_event(consumer: Consumer) -> None:
    await consumer.kafka.create_topics({f"{consumer.prefix}order_placed": 4})
    placed = orders(200)
    async with consumer.running("observe"), consumer.running("enforce"):
        await consumer.publish(*placed, *placed)
        await eventually(lambda: set(consumer.handled) == set(range(200)))
