"""Faults between the end of a handler and its offset commit, and several services or versions side by side.

Broker and store are in memory, except in the tests that are marked kafka.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from dishka import AsyncContainer

from integr8s_idem import EventPublisher, IdempotencyConfig, Service, Settings
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.errors import PublishError
from integr8s_idem.events import BaseEvent, encode_event
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.handler_calls import HandlerCall, RegisteredHandler
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    KafkaProvider,
)
from integr8s_idem.keys.fingerprints import fingerprint_of
from integr8s_idem.runtime import ServiceGroup
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.fake_consumer import FakeBroker, FakeRecord
from tests.support.fake_worker import FakePublisher, running
from tests.support.guarded import LEASE, Guarded, guarded
from tests.support.kafka.broker import Kafka
from tests.support.workers import OrderPlaced as RealOrder
from tests.support.workers import Shop, header, open_shop

TOPIC = Partition("order_placed", 0)
DEAD = "order_placed.dlq"


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"


def dlq_header(record: FakeRecord, name: str) -> str:
    return dict(record.headers)[f"idempotency-dlq-{name}"].decode()


class FailingService:
    """A service whose handler fails `failures` times."""

    def __init__(self, here: Guarded, failures: int = 10**6) -> None:
        self.here = here
        self.attempts: list[int] = []
        self.failures = failures
        self.router = EventRouter()
        self.router.on(OrderPlaced, name="charge")(self._charge)

    async def _charge(self, call: Any) -> None:
        self.attempts.append(call.attempt.number)
        if len(self.attempts) <= self.failures:
            raise ConnectionError("no answer from the bank")

    def dispatcher(self) -> IdempotentEventDispatcher:
        """Return a dispatcher for another process with the same store."""
        manager = guarded(self.here.store, max_attempts=self.here.manager.config.max_attempts).manager
        return IdempotentEventDispatcher(self.router, manager, invoke=with_call)


async def with_call(handler: RegisteredHandler, call: HandlerCall) -> Any:
    """Pass the whole call to the handler."""
    return await handler.function(call)


class UnconfirmedPublisher(FakePublisher):
    """A publisher whose broker accepts messages but never confirms them."""

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> None:
        await super().send(topic, key, value, headers)
        await asyncio.get_running_loop().create_future()


class RefusingPublisher(FakePublisher):
    """A publisher whose messages are rejected until `recovered` is set."""

    recovered = False
    refused = 0

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> None:
        if not self.recovered:
            self.refused += 1
            raise PublishError(topic, "TopicAuthorizationFailedError")
        await super().send(topic, key, value, headers)


@pytest.mark.scenario(5)
@virtual_time
async def test_a_reused_id_is_dead_lettered_with_both_fingerprints_without_a_run() -> None:
    broker, service = FakeBroker(), FailingService(guarded(), failures=0)
    first, second = OrderPlaced(event_id="1"), OrderPlaced(event_id="1", order_id="2")
    broker.publish(first, second)

    async with running(service.dispatcher(), broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 2)

    (dead_letter,) = broker.values(DEAD)
    assert (dlq_header(dead_letter, "reason"), service.attempts) == ("key_reused", [1])
    assert fingerprint_of(first).hex() in dlq_header(dead_letter, "error-message")
    assert fingerprint_of(second).hex() in dlq_header(dead_letter, "error-message")


@pytest.mark.scenario(26)
@virtual_time
async def test_a_crash_between_dead_letter_and_offset_commit_duplicates_the_dead_letter() -> None:
    broker, service = FakeBroker(), FailingService(guarded(max_attempts=1))
    broker.publish(OrderPlaced())

    async with running(service.dispatcher(), broker, UnconfirmedPublisher(broker)) as first:
        await first.until(lambda: len(broker.values(DEAD)) == 1)
        await first.crash()
        assert TOPIC not in broker.committed
    async with running(service.dispatcher(), broker) as second:
        await second.until(lambda: broker.committed.get(TOPIC) == 1)

    dead_letters = broker.values(DEAD)
    assert [dlq_header(dead_letter, "reason") for dead_letter in dead_letters] == [
        "handler_failed",
        "previously_failed",
    ]
    assert (
        len(
            {
                (dlq_header(dead_letter, "key"), dlq_header(dead_letter, "offset"), dead_letter.value)
                for dead_letter in dead_letters
            }
        )
        == 1
    )
    assert service.attempts == [1]


@pytest.mark.scenario(27)
@virtual_time
async def test_crashes_between_retries_neither_lose_nor_add_attempts() -> None:
    broker, service = FakeBroker(), FailingService(guarded(max_attempts=4))
    broker.publish(OrderPlaced())

    for crashes in range(1, 4):
        async with running(service.dispatcher(), broker, retry_initial_seconds=60, retry_max_seconds=60) as worker:
            await worker.until(lambda: worker.worker.report().tally.retries == 1)
            assert len(service.attempts) == crashes
            await worker.crash()
    async with running(service.dispatcher(), broker) as last:
        await last.until(lambda: broker.committed.get(TOPIC) == 1)

    assert service.attempts == [1, 2, 3, 4]
    assert [dlq_header(dead_letter, "attempts") for dead_letter in broker.values(DEAD)] == ["4"]


@pytest.mark.scenario(73)
@virtual_time
async def test_only_the_affected_partition_waits_and_logs_while_dead_letters_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker, service = FakeBroker(), FailingService(guarded(), failures=0)
    other = Partition("order_placed", 1)
    broker.put("order_placed", b"no json")
    broker.publish(OrderPlaced())
    broker.publish(OrderPlaced(), partition=1)
    publisher = RefusingPublisher(broker)

    async with running(service.dispatcher(), broker, publisher) as worker:
        await worker.until(lambda: broker.committed.get(other) == 1)
        await asyncio.sleep(300)
        assert (broker.committed, service.attempts) == ({other: 1}, [1])
        assert publisher.refused > 25
        publisher.recovered = True
        await worker.until(lambda: broker.committed.get(TOPIC) == 2, 15)

    alarms = [record for record in caplog.records if "cannot publish to dead-letter topic" in record.message]
    assert {record.levelno for record in alarms} == {logging.ERROR}
    assert [dead_letter.value for dead_letter in broker.values(DEAD)] == [b"no json"]


class ThreadedService:
    """A service whose handler works in a thread that cannot be cancelled."""

    def __init__(self, effects: Effects) -> None:
        self.effects = effects
        self.store = MemoryIdempotencyRepository()
        self.started = threading.Event()
        self.may_end = threading.Event()
        self.ended = threading.Event()

    def dispatcher(self) -> EventDispatcher:
        router = EventRouter()
        router.on(OrderPlaced, name="stamp")(self._stamp)
        config = IdempotencyConfig(processing_timeout_seconds=LEASE)
        manager = IdempotencyManager(config, self.store, scope="billing")
        return IdempotentEventDispatcher(router, manager, invoke=with_call)

    async def _stamp(self, call: Any) -> None:
        await asyncio.to_thread(self._in_thread, call)

    def _in_thread(self, call: HandlerCall) -> None:
        self.started.set()
        if call.attempt.number == 1:
            assert self.may_end.wait(60)
        self.effects.apply("1", call.attempt)
        if call.attempt.number == 1:
            self.ended.set()


@pytest.fixture
def threaded(tmp_path: Path) -> ThreadedService:
    effects = Effects(tmp_path)
    effects.prepare()
    return ThreadedService(effects)


@pytest.mark.scenario(32)
async def test_a_worker_waits_for_a_thread_that_ends_within_the_drain_timeout(threaded: ThreadedService) -> None:
    broker = FakeBroker()
    broker.publish(OrderPlaced())

    async with running(threaded.dispatcher(), broker, drain_timeout_seconds=30) as worker:
        await eventually(threaded.started.is_set)
        worker.worker.stop()
        await eventually(lambda: worker.worker.report().state == "draining")
        threaded.may_end.set()

    assert broker.committed == {TOPIC: 1}
    assert threaded.effects.judge({"1"})["repeats"] == 0


@pytest.mark.scenario(32)
async def test_a_thread_that_outlives_the_drain_timeout_repeats_nothing_in_a_fenced_sink(
    threaded: ThreadedService,
) -> None:
    broker = FakeBroker()
    broker.publish(OrderPlaced())

    async with running(threaded.dispatcher(), broker, drain_timeout_seconds=0.1):
        await eventually(threaded.started.is_set)
    assert broker.committed == {}
    async with running(threaded.dispatcher(), broker) as successor:
        await eventually(lambda: broker.committed == {TOPIC: 1}, state=successor.worker.report)
    threaded.may_end.set()
    await eventually(threaded.ended.is_set)

    assert threaded.effects.judge({"1"}) == {"events": 1, "lost": 0, "repeats": 1, "fenced_repeats": 0}
    assert threaded.effects.refused() == 1


class OrderPaid(BaseEvent):
    event_type: Literal["order_paid"] = "order_paid"
    order_id: str


class OrderRefunded(BaseEvent):
    event_type: Literal["order_refunded"] = "order_refunded"
    order_id: str


@pytest.fixture
async def shop(kafka: Kafka, topic_prefix: str, redis_url: str) -> AsyncIterator[Shop]:
    async with open_shop(kafka, topic_prefix, redis_url, partitions=2) as shop:
        await kafka.create_topics({f"{topic_prefix}order_paid": 2})
        yield shop


@pytest.mark.kafka
@pytest.mark.scenario(75)
async def test_two_versions_in_one_group_handle_their_event_types_and_dead_letter_unknown_ones(shop: Shop) -> None:
    def version(*events: type[BaseEvent]) -> EventRouter:
        router = EventRouter()

        @router.on(*events, name="note")
        async def note(event: Any) -> None:
            shop.charged.append(f"{event.event_type} {event.order_id}")

        return router

    older = await shop.worker(version(RealOrder))
    newer = await shop.worker(version(RealOrder, OrderPaid))
    for number in range(10):
        await shop.deliver(RealOrder(order_id=str(number)), partition=number % 2)
    await shop.publisher.publish(*(OrderPaid(order_id=str(number)) for number in range(10)))
    refund = OrderRefunded(order_id="0")
    await shop.publisher.send(shop.topic, None, encode_event(refund), [])

    def settled() -> int:
        return sum(w.tally.handled + w.tally.duplicates + w.tally.dead_letters for w in (older, newer))

    await eventually(lambda: settled() >= 21, state=lambda: (older.tally, newer.tally))
    [dead_letter] = await shop.messages(f"{shop.topic}.dlq", 1)

    assert sorted(shop.charged) == sorted(f"{kind} {n}" for kind in ("order_paid", "order_placed") for n in range(10))
    assert (header(dead_letter, "reason"), dead_letter.value) == ("unknown_type", encode_event(refund))
    assert not older.task.done()
    assert not newer.task.done()


@pytest.mark.kafka
@pytest.mark.scenario(76)
async def test_a_failed_service_does_not_stop_the_others_and_is_named_by_health(
    kafka: Kafka, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings.model_validate(
        {
            "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix},
            "telemetry": {"metrics_enabled": False},
        }
    )
    handled, breaks = asyncio.Event(), asyncio.Event()
    router = EventRouter()

    @router.on(RealOrder)
    async def charge(event: RealOrder) -> None:
        handled.set()

    def not_importable(_: Settings) -> AsyncContainer:
        raise ImportError("no module named payments")

    async def broken(_: AsyncContainer) -> None:
        await breaks.wait()
        raise RuntimeError("out of paper")

    services = [
        Service(
            name,
            providers=[KafkaProvider(), DispatcherProvider(router)],
            group_id=topic_prefix + name,
            background=background,
        )
        for name, background in (("billing", ()), ("printing", (broken,)))
    ]
    group = ServiceGroup([*services, Service("shipping", container=not_importable)], settings)
    run = asyncio.create_task(group.run())
    await eventually(lambda: sum(service.ready for service in group.health().services) == 2, state=group.health)

    breaks.set()
    await eventually(lambda: sum(service.live for service in group.health().services) == 1, state=group.health)
    publisher = EventPublisher(settings.kafka)
    await publisher.publish(RealOrder(order_id="1"))
    await publisher.close()
    async with asyncio.timeout(60):
        await handled.wait()

    assert {service.name: service.reason for service in group.health().services} == {
        "billing": "",
        "printing": "RuntimeError",
        "shipping": "ApplicationError",
    }
    assert not group.health().live
    group.stop()
    assert await run == 1
