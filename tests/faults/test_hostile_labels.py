"""Untrusted names in labels and keys: bounded in number, length and time; personal data is not leaked.

Broker and store are in memory, except in the test of colliding keys, which uses a real Redis.
"""

from __future__ import annotations

import random
import time
from typing import Literal

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.keys import MAX_KEY_LENGTH, Key, KeySpace
from integr8s_idem.keys.event_keys import KeyResolver, KeyStrategy
from integr8s_idem.records import Reserved
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.telemetry import Gauge, Phase, Signal
from integr8s_idem.telemetry.metric_labels import MAX_LABELS
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.kafka_protocols import Partition
from tests.faults.conftest import Telemetry
from tests.fuzz.mutators import text
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import virtual_store
from tests.support.received import received

PERSON = "anna.canary@example.org"
TOPIC = Partition("order_placed", 0)


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"
    customer: str = ""


def labels_of(registry: CollectorRegistry) -> dict[str, set[str]]:
    """Return the values of each label in the output of a scrape."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            for name, value in sample.labels.items():
                found.setdefault(name, set()).add(value)
    return found


@pytest.mark.scenario(109)
def test_hostile_event_types_topics_and_reasons_create_a_bounded_number_of_series() -> None:
    registry, source = CollectorRegistry(), random.Random(1)
    observer = PrometheusObserver("billing", registry)

    for number in range(3_000):
        hostile = f"{text(source)}{number}"
        observer.count(Signal.DELIVERED, hostile)
        observer.count(Signal.DEAD_LETTER, hostile, reason=hostile)
        observer.measure(Gauge.CONSUMER_LAG, 1, hostile)
        with observer.processing(received(topic=hostile), hostile, "event-1"), observer.phase(Phase.HANDLE, hostile):
            pass

    found = labels_of(registry)
    assert max(map(len, found.values())) <= MAX_LABELS + 2
    assert all(len(value) <= 128 and value.isprintable() for values in found.values() for value in values)
    assert found["service"] == {"billing"}


@pytest.mark.scenario(109)
@virtual_time
async def test_two_thousand_unknown_event_types_add_no_series() -> None:
    registry, broker, router = CollectorRegistry(), FakeBroker(), EventRouter()
    manager = IdempotencyManager(
        IdempotencyConfig(), virtual_store(), PrometheusObserver("billing", registry), scope="billing"
    )

    @router.on(OrderPlaced)
    async def handle(event: OrderPlaced) -> None: ...

    for number in range(2_000):
        broker.put("order_placed", f'{{"event_id": "{number}", "event_type": "type-{number}"}}'.encode())
    broker.publish(OrderPlaced())
    async with running(IdempotentEventDispatcher(router, manager), broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 2_001)

    assert labels_of(registry)["event_type"] == {"", "order_placed"}
    assert len(broker.values("order_placed.dlq")) == 2_000


@pytest.mark.scenario(110)
@pytest.mark.parametrize("piece", ["a", "a.", "%", ":", "\0", "😀", "\ud800", "*", "[", "a-"])
def test_a_key_of_many_pieces_is_built_in_bounded_time(piece: str) -> None:
    began = time.thread_time()
    space = KeySpace("idempotency", piece * 200_000)
    full = space.full(Key.of_event(piece * 200_000, "t", "id", piece * 200_000))

    assert time.thread_time() - began < 5.0
    assert len(full) <= MAX_KEY_LENGTH


@pytest.mark.scenario(106)
@virtual_time
async def test_hashed_keys_keep_personal_data_out_of_store_logs_spans_metrics_and_headers(
    caplog: pytest.LogCaptureFixture, telemetry: Telemetry
) -> None:
    store = virtual_store()
    manager = IdempotencyManager(
        IdempotencyConfig(hash_keys=True, max_attempts=2), store, telemetry.observer, scope="billing"
    )
    broker, router = FakeBroker(), EventRouter()

    @router.on(OrderPlaced)
    async def handle(event: OrderPlaced) -> None:
        raise ConnectionError("the bank is unreachable")

    broker.publish(OrderPlaced(customer=PERSON))
    resolver = KeyResolver(KeyStrategy.CUSTOM, custom=lambda event: str(getattr(event, "customer", "")))
    caplog.set_level("DEBUG")
    async with running(IdempotentEventDispatcher(router, manager, resolver=resolver), broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    (dead_letter,) = broker.values("order_placed.dlq")
    (record,) = [record async for record in store.scan("")]
    output = {
        "log": caplog.text,
        "dead letter": repr(dead_letter.headers),
        "record": repr(record),
        **telemetry.output(),
    }
    assert [name for name, text in output.items() if "canary" in text] == []
    # The record can be found with the digest from the log and the dead letter.
    digest = record.key.removeprefix(manager.space.root)
    assert digest in output["log"]
    assert digest in output["dead letter"]


@pytest.mark.scenario(86)
async def test_hostile_keys_do_not_collide_on_a_real_redis(redis_client: Redis) -> None:
    store, source = RedisIdempotencyRepository(redis_client), random.Random(2)
    names = {text(source, 6) or "x" for _ in range(500)}
    manager = IdempotencyManager(IdempotencyConfig(), store, scope="billing")

    verdicts = [await manager.reserve(name) for name in sorted(names)]

    assert all(isinstance(verdict, Reserved) for verdict in verdicts)
    assert await redis_client.dbsize() == len(names)
    assert len([record async for record in store.scan(manager.space.root)]) == len(names)
