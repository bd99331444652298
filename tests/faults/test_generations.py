"""Replays of dead letters: handled once per generation by the handlers they are for, with a readable history.

Broker and store are in memory, except in the tests that are marked kafka and in one with a real Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from redis.asyncio import Redis

from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.events import BaseEvent, encode_event
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.handler_calls import HandlerCall, RegisteredHandler
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.keys import Key
from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.dead_letters import record_key_of, replay_of
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.aging import age_records
from tests.support.fake_consumer import FakeBroker, FakeRecord
from tests.support.fake_worker import FakePublisher, running
from tests.support.guarded import Job, guarded
from tests.support.kafka.broker import Kafka
from tests.support.replays import SIGNED, TRUSTED
from tests.support.workers import OrderPlaced as RealOrder
from tests.support.workers import Shop, header, open_shop, orders

TOPIC = Partition("order_placed", 0)
DEAD = "order_placed.dlq"


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"


class OrderPaid(BaseEvent):
    event_type: Literal["order_paid"] = "order_paid"


class Billing:
    """A service with handlers that fail until they are fixed."""

    def __init__(self, *handlers: str, attempts: int = 1) -> None:
        self.here = guarded(max_attempts=attempts)
        self.runs: list[str] = []
        self.broken: set[str] = set()
        self.router = EventRouter()
        for name in handlers or ("charge",):
            self.router.on(OrderPlaced, name=name)(self._handler(name))

    def _handler(self, name: str) -> Any:
        async def handle(event: OrderPlaced) -> str:
            self.runs.append(name)
            if name in self.broken:
                raise ConnectionError("no answer from the bank")
            return "receipt"

        return handle

    @property
    def dispatcher(self) -> IdempotentEventDispatcher:
        return IdempotentEventDispatcher(self.router, self.here.manager)

    def key(self, event: OrderPlaced, handler: str = "charge") -> Key:
        return KeyResolver().resolve(handler, event).key


def replay(broker: FakeBroker, dead_letter: FakeRecord) -> None:
    """Replay a dead letter like `examples.replay_dead_letters`."""
    topic, key, value, headers = replay_of(dead_letter, SIGNED)
    broker.put(topic, value, key=key, headers=headers)


def dlq_headers(record: FakeRecord) -> dict[str, bytes]:
    return {name.removeprefix("idempotency-dlq-"): text for name, text in record.headers}


@virtual_time
async def test_a_replayed_dead_letter_is_handled_and_the_history_contains_both_generations() -> None:
    broker, billing, event = FakeBroker(), Billing(), OrderPlaced()
    billing.broken.add("charge")
    broker.publish(event)

    async with running(billing.dispatcher, broker, replay=SIGNED.replay) as worker:
        await worker.until(lambda: len(broker.values(DEAD)) == 1)
        billing.broken.clear()
        replay(broker, broker.values(DEAD)[0])
        await worker.until(lambda: broker.committed.get(TOPIC) == 2)

    history = await billing.here.manager.history(billing.key(event))
    assert {generation: record.status.value for generation, record in history.items()} == {0: "failed", 1: "completed"}
    assert "no answer from the bank" in history[0].error
    assert billing.runs == ["charge", "charge"]


@virtual_time
async def test_a_dead_letter_that_is_replayed_twice_is_handled_once() -> None:
    broker, billing = FakeBroker(), Billing()
    billing.broken.add("charge")
    broker.publish(OrderPlaced())

    async with running(billing.dispatcher, broker, replay=SIGNED.replay, ordering="none") as worker:
        await worker.until(lambda: len(broker.values(DEAD)) == 1)
        billing.broken.clear()
        for _ in range(2):
            replay(broker, broker.values(DEAD)[0])
        await worker.until(lambda: broker.committed.get(TOPIC) == 3)

    assert billing.runs == ["charge"] * 2
    assert worker.worker.report().tally.duplicates == 1


@virtual_time
async def test_a_replay_that_fails_is_dead_lettered_with_its_generation_and_can_be_replayed_again() -> None:
    broker, billing, event = FakeBroker(), Billing(attempts=2), OrderPlaced()
    billing.broken.add("charge")
    broker.publish(event)

    async with running(billing.dispatcher, broker, replay=SIGNED.replay) as worker:
        for generation in range(3):
            await worker.until(lambda g=generation: len(broker.values(DEAD)) == g + 1)  # type: ignore[misc]
            replay(broker, broker.values(DEAD)[-1])
        await worker.until(lambda: len(broker.values(DEAD)) == 4)

    dead_letters = broker.values(DEAD)
    assert [dlq_headers(dead_letter)["generation"] for dead_letter in dead_letters] == [b"0", b"1", b"2", b"3"]
    assert [dlq_headers(dead_letter)["attempts"] for dead_letter in dead_letters] == [b"2"] * 4
    assert list(await billing.here.manager.history(billing.key(event))) == [0, 1, 2, 3]


@virtual_time
async def test_a_replay_runs_only_the_handler_that_failed() -> None:
    broker, billing = FakeBroker(), Billing("charge", "mail")
    billing.broken.add("mail")
    broker.publish(OrderPlaced())

    async with running(billing.dispatcher, broker, replay=SIGNED.replay) as worker:
        await worker.until(lambda: len(broker.values(DEAD)) == 1)
        billing.broken.clear()
        replay(broker, broker.values(DEAD)[0])
        await worker.until(lambda: broker.committed.get(TOPIC) == 2)

    assert sorted(billing.runs) == ["charge", "mail", "mail"]


@pytest.mark.parametrize("guard", [True, False])
@virtual_time
async def test_a_replay_for_one_service_is_skipped_by_another(guard: bool) -> None:
    broker, billing = FakeBroker(), Billing()
    broker.publish(OrderPlaced())
    (sent,) = broker.values("order_placed")
    headers = [
        ("idempotency-dlq-reason", b"handler_failed"),
        ("idempotency-dlq-topic", b"order_placed"),
        ("idempotency-dlq-group", b"shipping"),
        ("idempotency-dlq-handler", b"charge"),
    ]
    replay(broker, FakeRecord(DEAD, 0, 0, None, sent.value, headers))
    replay(broker, FakeRecord(DEAD, 0, 1, None, b"unreadable for shipping", headers[:3]))

    async with running(
        billing.dispatcher if guard else EventDispatcher(billing.router), broker, replay=SIGNED.replay
    ) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 3)

    assert billing.runs == ["charge"]
    assert broker.values(DEAD) == []


@virtual_time
async def test_a_replay_for_a_removed_handler_is_dead_lettered() -> None:
    broker, billing, renamed = FakeBroker(), Billing("charge"), Billing("collect")
    billing.broken.add("charge")
    broker.publish(OrderPlaced())
    async with running(billing.dispatcher, broker, replay=SIGNED.replay) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    replay(broker, broker.values(DEAD)[0])
    async with running(renamed.dispatcher, broker, replay=SIGNED.replay) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 2)

    assert dlq_headers(broker.values(DEAD)[-1])["reason"] == b"no_handler"
    assert renamed.runs == []


@pytest.mark.parametrize("guard", [True, False])
@virtual_time
async def test_events_published_by_a_replay_have_new_ids_so_that_the_next_service_handles_them(guard: bool) -> None:
    broker, here, router = FakeBroker(), guarded(), EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None: ...

    async def publishing(handler: RegisteredHandler, call: HandlerCall) -> None:
        call.outgoing.publish(OrderPaid())

    publisher, event = FakePublisher(broker), OrderPlaced()
    for generation in (b"0", b"1", b"1"):
        broker.put("order_placed", encode_event(event), headers=[("idempotency-generation", generation)])

    dispatcher = (
        IdempotentEventDispatcher(router, here.manager, invoke=publishing, publisher=publisher)
        if guard
        else EventDispatcher(router, invoke=publishing, publisher=publisher)
    )
    async with running(dispatcher, broker, publisher, replay=TRUSTED) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 3)

    ids = [dict(record.headers)["event_id"] for record in broker.values("order_paid")]
    assert len(set(ids)) == 2
    assert len(ids) == (2 if guard else 3)


@pytest.mark.parametrize("guard", [True, False])
@virtual_time
async def test_a_derived_key_is_the_same_in_all_generations_unless_the_handler_includes_the_generation(
    guard: bool,
) -> None:
    broker, here, router, keys = FakeBroker(), guarded(hash_keys=True), EventRouter(), list[tuple[str, str]]()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None: ...

    async def record_keys(handler: RegisteredHandler, call: HandlerCall) -> None:
        attempt = call.attempt
        keys.append((attempt.key_for("charge"), attempt.key_for(f"charge-{attempt.generation}")))

    event = OrderPlaced()
    for generation in (b"0", b"1"):
        broker.put("order_placed", encode_event(event), headers=[("idempotency-generation", generation)])
    dispatcher = (
        IdempotentEventDispatcher(router, here.manager, invoke=record_keys)
        if guard
        else EventDispatcher(router, invoke=record_keys)
    )
    async with running(dispatcher, broker, replay=TRUSTED) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 2)

    (first, first_with_generation), (second, second_with_generation) = keys
    assert first == second
    assert first_with_generation != second_with_generation


@virtual_time
async def test_the_history_contains_the_records_that_have_not_expired() -> None:
    here, key = guarded(default_ttl_seconds=60), Key.of("order:1")
    for generation in (0, 1, 999):
        await asyncio.sleep(25)
        await here.manager.run(key.in_generation(generation), Job(result=generation))

    assert list(await here.manager.history("order:1")) == [0, 1, 999]
    await asyncio.sleep(20)
    assert list(await here.manager.history(key)) == [1, 999]
    assert await here.manager.history("order:2") == {}


@pytest.mark.parametrize("hash_keys", [False, True])
async def test_a_history_is_read_from_redis_with_hashed_keys(redis_client: Redis, hash_keys: bool) -> None:
    store = RedisIdempotencyRepository(redis_client)
    manager = IdempotencyManager(IdempotencyConfig(hash_keys=hash_keys), store, scope="billing")
    for generation in (0, 2):
        await manager.run(Key.of("order:1").in_generation(generation), Job(result=generation))

    history = await manager.history("order:1")

    assert {number: record.result and record.result.body for number, record in history.items()} == {0: b"0", 2: b"2"}
    await manager.close()


@pytest.fixture
async def shop(kafka: Kafka, topic_prefix: str, redis_url: str) -> AsyncIterator[Shop]:
    async with open_shop(kafka, topic_prefix, redis_url) as shop:
        yield shop


def charging(shop: Shop, broken: set[str]) -> EventRouter:
    """Return a router whose handler fails for the orders in `broken`."""
    router = EventRouter()

    @router.on(RealOrder)
    async def charge(event: RealOrder) -> None:
        shop.charged.append(event.order_id)
        if event.order_id in broken:
            raise ConnectionError("no answer from the bank")

    return router


@pytest.mark.kafka
async def test_a_dead_letter_replayed_twice_on_real_servers_is_handled_once_more(shop: Shop) -> None:
    broken = {"1"}
    worker = await shop.worker(charging(shop, broken), max_attempts=1)
    events = orders(3)
    await shop.publisher.publish(*events)
    await worker.idle(settled=3)
    [dead_letter] = await shop.messages(f"{shop.topic}.dlq", 1)

    broken.clear()
    for _ in range(2):
        await shop.publisher.send(*replay_of(dead_letter, SIGNED))
    await worker.idle(settled=5)

    history = await worker.manager.history_of(record_key_of(dead_letter))
    by_name = await worker.manager.history(KeyResolver().resolve("charge", events[1]).key)
    # Redis returns the remaining ttl of a record: two reads may differ by a millisecond.
    assert [(record.key, record.fence) for record in history.values()] == [
        (record.key, record.fence) for record in by_name.values()
    ]
    assert {number: record.status for number, record in history.items()} == {
        0: IdempotencyStatus.FAILED,
        1: IdempotencyStatus.COMPLETED,
    }
    assert shop.charged == ["0", "1", "2", "1"]
    assert header(dead_letter, "generation") == "0"


@pytest.mark.kafka
@pytest.mark.scenario(15)
async def test_a_topic_consumed_again_runs_nothing_within_the_ttl_and_everything_after_it(shop: Shop) -> None:
    events = orders(50)
    await shop.publisher.publish(*events)
    for group in ("first", "repeat", "later"):  # a group without offsets reads from the beginning
        shop.group = group
        if group == "later":
            async with Redis.from_url(shop.redis_url) as client:
                await age_records(client, shop.manager().config.ttl)
        worker = await shop.worker(charging(shop, set()))
        await worker.idle(settled=50)
        await worker.stop()

        expected = {"first": (50, 0), "repeat": (0, 50), "later": (50, 0)}[group]
        assert (worker.tally.handled, worker.tally.duplicates) == expected

    assert sorted(shop.charged) == sorted(2 * [event.order_id for event in events])
