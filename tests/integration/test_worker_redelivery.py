"""Real Kafka delivers an event twice, and the handler runs once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem import EventRouter
from tests.support.conditions import eventually
from tests.support.kafka.broker import Kafka
from tests.support.workers import QUICK, OrderPlaced, Shop, header, open_shop, orders

pytestmark = pytest.mark.kafka


@pytest.fixture
async def shop(kafka: Kafka, topic_prefix: str, redis_url: str) -> AsyncIterator[Shop]:
    async with open_shop(kafka, topic_prefix, redis_url, partitions=2) as shop:
        yield shop


def charging(shop: Shop) -> EventRouter:
    """Return a router whose handler records its orders."""
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> str:
        shop.charged.append(event.order_id)
        return f"receipt-{event.order_id}"

    return router


@pytest.mark.scenario(1, 13)
async def test_an_event_redelivered_after_completion_is_not_handled_again(shop: Shop) -> None:
    worker = await shop.worker(charging(shop))
    event = orders(1)[0]
    await shop.deliver(event)
    await worker.idle(settled=1)

    await shop.deliver(event)
    await worker.idle(settled=2)

    assert shop.charged == ["0"]
    assert worker.tally.duplicates == 1
    assert await shop.committed() == 2


@pytest.mark.scenario(13)
async def test_events_delivered_twice_are_handled_once(shop: Shop) -> None:
    events = orders(90)
    await shop.publisher.publish(*events)
    await shop.publisher.publish(*events[::3])
    worker = await shop.worker(charging(shop))

    await worker.idle(settled=120)

    assert sorted(shop.charged, key=int) == [event.order_id for event in events]
    assert worker.tally.duplicates == 30


async def test_a_duplicate_on_another_partition_is_committed_only_after_the_first_run(
    shop: Shop,
) -> None:
    may_end = asyncio.Event()
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        await may_end.wait()
        shop.charged.append(event.order_id)

    worker = await shop.worker(router)
    event = orders(1)[0]
    await shop.deliver(event, partition=0)
    await eventually(lambda: worker.worker.report().in_flight == 1)
    await shop.deliver(event, partition=1)
    await eventually(lambda: worker.tally.waits == 1)

    assert await shop.committed(partition=1) is None
    may_end.set()
    await worker.idle(settled=2)

    assert shop.charged == ["0"]
    assert (await shop.committed(0), await shop.committed(1)) == (1, 1)


@pytest.mark.scenario(4)
async def test_a_waiting_duplicate_runs_after_a_failure_and_the_retry_is_a_duplicate(shop: Shop) -> None:
    """The second delivery completes first."""
    first_may_fail = asyncio.Event()
    runs: list[int] = []
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        runs.append(len(runs) + 1)
        if len(runs) == 1:
            await first_may_fail.wait()
            raise ConnectionError("the card terminal is down")
        shop.charged.append(event.order_id)

    slow_to_retry = {"retry_initial_seconds": 20, "retry_max_seconds": 20}
    worker = await shop.worker(router, service=QUICK.model_copy(update=slow_to_retry))
    event = orders(1)[0]
    await shop.deliver(event, partition=0)
    await eventually(lambda: runs)
    await shop.deliver(event, partition=1)
    await eventually(lambda: worker.tally.waits == 1)
    first_may_fail.set()
    await eventually(lambda: worker.tally.handled == 1)

    assert await _eventually_committed(shop, 1) == 1
    await worker.idle(settled=2)

    assert shop.charged == ["0"]
    assert runs == [1, 2]
    assert worker.tally.duplicates == 1


async def _eventually_committed(shop: Shop, partition: int) -> int | None:
    for _ in range(100):
        if (offset := await shop.committed(partition)) is not None:
            return offset
    return None


async def test_a_failing_handler_is_retried_and_then_dead_lettered_with_its_history(shop: Shop) -> None:
    attempts: list[str] = []
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        attempts.append(event.order_id)
        if event.order_id == "1":
            raise ConnectionError("no answer from the bank")

    worker = await shop.worker(router, max_attempts=3)
    events = orders(3)
    for event in events:
        await shop.deliver(event)
    await worker.idle(settled=3)

    [dead_letter] = await shop.messages(f"{shop.topic}.dlq", 1)
    record = await worker.manager.repository.get([f"idempotency:billing:charge:order_placed:id:{events[1].event_id}"])

    assert attempts == ["0", "1", "1", "1", "2"]
    assert dead_letter.value == (await shop.messages(shop.topic, 2))[1].value
    assert {name: header(dead_letter, name) for name in ("reason", "error-class", "attempts", "handler", "offset")} == {
        "reason": "handler_failed",
        "error-class": "ConnectionError",
        "attempts": "3",
        "handler": "charge",
        "offset": "1",
    }
    assert record[0] is not None
    assert record[0].status.value == "failed"
    assert await shop.committed() == 3


async def test_a_failed_offset_is_not_passed_by_the_next_success(shop: Shop) -> None:
    """If it were, a crash would lose the event."""
    fails = asyncio.Event()
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        if event.order_id == "0" and not fails.is_set():
            raise ConnectionError("not yet")
        shop.charged.append(event.order_id)

    worker = await shop.worker(router, service=QUICK.model_copy(update={"ordering": "none"}), max_attempts=1000)
    for event in orders(5):
        await shop.deliver(event)
    await eventually(lambda: sorted(shop.charged) == ["1", "2", "3", "4"])

    assert await shop.committed() in (None, 0)
    fails.set()
    await worker.idle(settled=5)

    assert await shop.committed() == 5


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{no json", "malformed"),
        (b"", "empty"),
        (b"[1, 2]", "malformed"),
        (b'{"event_type": "order_placed", "order_id": "1"}', "missing_id"),
        (b'{"event_type": "order_placed", "event_id": "", "order_id": "1"}', "missing_id"),
        (b'{"event_type": "order_placed", "event_id": 7, "order_id": "1"}', "missing_id"),
        (b'{"event_type": "order_lost", "event_id": "1"}', "unknown_type"),
        (b'{"event_type": "order_placed", "event_id": "1", "event_version": "9.0"}', "unsupported_version"),
        (b'{"event_type": "order_placed", "event_id": "1"}', "invalid"),
        (b"\xff\xfe\x00", "malformed"),
    ],
)
async def test_an_undecodable_message_is_dead_lettered_unchanged_and_the_worker_continues(
    shop: Shop, body: bytes, reason: str
) -> None:
    worker = await shop.worker(charging(shop))

    await shop.publisher.send(shop.topic, b"key", body, [("mine", b"\x00\xff")])
    await shop.deliver(orders(1)[0])
    await worker.idle(settled=2)

    [dead_letter] = await shop.messages(f"{shop.topic}.dlq", 1)
    assert (dead_letter.key, dead_letter.value or b"") == (b"key", body)
    assert dead_letter.headers[0] == ("mine", b"\x00\xff")
    assert header(dead_letter, "reason") == reason
    assert shop.charged == ["0"]


@pytest.mark.scenario(6)
async def test_two_handlers_of_one_event_are_independent(shop: Shop) -> None:
    router = charging(shop)
    mailed: list[str] = []

    @router.on(OrderPlaced)
    async def mail(event: OrderPlaced) -> None:
        mailed.append(event.order_id)
        if len(mailed) < 3:
            raise ConnectionError("no mail today")

    worker = await shop.worker(router)
    await shop.deliver(orders(1)[0])
    await worker.idle(settled=2)

    assert shop.charged == ["0"]
    assert mailed == ["0", "0", "0"]
    assert await shop.committed() == 1


async def test_events_with_one_key_keep_their_order_while_keys_run_concurrently(shop: Shop) -> None:
    seen: dict[bytes, list[int]] = {}
    both = asyncio.Barrier(2)
    router = EventRouter()

    @router.on(OrderPlaced)
    async def note(event: OrderPlaced) -> None:
        customer, number = event.order_id.split("-")
        if number == "0":
            async with asyncio.timeout(20):
                await both.wait()  # passes only if the first events of both customers run concurrently
        seen.setdefault(customer.encode(), []).append(int(number))

    worker = await shop.worker(router, service=QUICK.model_copy(update={"ordering": "key"}))
    for number in range(20):
        for customer in ("a", "b"):
            event = OrderPlaced(order_id=f"{customer}-{number}", aggregate_id=customer)
            await shop.publisher.publish(event)
    await worker.idle(settled=40)

    assert seen == {b"a": list(range(20)), b"b": list(range(20))}


@pytest.mark.scenario(90)
async def test_a_too_large_result_is_dropped_and_duplicates_are_still_detected(shop: Shop) -> None:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> str:
        shop.charged.append(event.order_id)
        return "x" * 2000

    worker = await shop.worker(router, max_result_size_bytes=1000)
    event = orders(1)[0]
    await shop.deliver(event)
    await shop.deliver(event)
    await worker.idle(settled=2)

    [record] = await worker.manager.repository.get([_key(event)])
    assert shop.charged == ["0"]
    assert record is not None
    assert record.result_dropped


def _key(event: Any) -> str:
    return f"idempotency:billing:charge:order_placed:id:{event.event_id}"


@pytest.mark.scenario(5)
async def test_the_same_id_with_a_different_payload_is_refused_and_dead_lettered(shop: Shop) -> None:
    worker = await shop.worker(charging(shop), default_ttl_seconds=timedelta(hours=1).total_seconds())
    event = orders(1)[0]
    await shop.deliver(event)
    await shop.deliver(event.model_copy(update={"order_id": "other"}))
    await worker.idle(settled=2)

    [dead_letter] = await shop.messages(f"{shop.topic}.dlq", 1)
    assert shop.charged == ["0"]
    assert header(dead_letter, "reason") == "key_reused"
