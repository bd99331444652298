"""What the FastStream middleware publishes, and publishes again for a duplicate."""

from __future__ import annotations

import logging
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from faststream import AckPolicy, BaseMiddleware
from faststream.exceptions import AckMessage
from faststream.kafka import KafkaMessage, KafkaResponse, TestKafkaBroker

from integr8s_idem.keys import Key
from integr8s_idem.records import Reserved, StoredResult
from tests.support.faststream_shop import Shop, nothing


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.integrations.faststream_guard.pause_after", lambda _: 0.0)


async def test_a_duplicate_whose_result_was_too_large_to_keep_is_acknowledged() -> None:
    shop = Shop(max_result_size_bytes=10)
    shop.add_subscriber({"receipt": "x" * 100})
    shop.before_publishing(nothing)

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    assert len(shop.runs) == len(shop.sent) == 1
    assert shop.settled == ["ack", "AckMessage"]


@pytest.mark.parametrize("answer", [{"receipt": "1"}, KafkaResponse({"receipt": "1"})])
async def test_a_duplicate_publishes_nothing_if_results_are_not_stored(answer: Any) -> None:
    shop = Shop(enable_result_caching=False)
    shop.add_subscriber(answer)
    shop.before_publishing(nothing)

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    assert [body for body, _ in shop.sent] == [{"receipt": "1"}]
    assert shop.settled == ["ack", "AckMessage"]


async def test_a_duplicate_whose_result_cannot_be_read_is_acknowledged() -> None:
    shop = Shop()
    shop.add_subscriber({"receipt": "1"})
    shop.before_publishing(nothing)

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        (record,) = [record async for record in shop.here.store.scan("")]
        await shop.here.store.delete([record.key])
        space, key = shop.here.manager.space, Key(record.key.removeprefix(shop.here.manager.space.root), "")
        assert space.full(key) == record.key
        reserved = await shop.here.manager.reserve(key)
        assert isinstance(reserved, Reserved)
        await shop.here.manager.complete(reserved, StoredResult(b"{", "application/json"))
        await shop.place()

    assert len(shop.sent) == 1
    assert shop.settled == ["ack", "AckMessage"]


async def test_messages_published_in_one_batch_do_not_share_an_event_id() -> None:
    shop = Shop()
    shop.add_subscriber([{"receipt": "1"}, {"receipt": "2"}], batch=True)
    received = list[tuple[str, str | None]]()

    @shop.broker.subscriber("receipts")
    async def receive(receipt: dict[str, str], message: KafkaMessage) -> None:
        received.append((receipt["receipt"], message.headers.get("event_id")))

    async with TestKafkaBroker(shop.broker):
        await shop.place()

    assert received == [("1", None), ("2", None)]


async def test_a_published_message_without_a_body_has_an_event_id() -> None:
    shop = Shop()
    shop.add_subscriber(None)
    shop.before_publishing(nothing)
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()
    assert [body for body, _ in shop.sent] == [None, None]
    [event_id] = {headers.get("event_id") for _, headers in shop.sent}
    assert event_id is not None


@pytest.mark.parametrize("value", [Decimal("7.0"), date(2026, 1, 2), UUID(int=1), "7.0", b"7.0", 7.0, ["7.0"]])
@pytest.mark.parametrize("answer", [lambda value: value, KafkaResponse])
async def test_a_duplicate_publishes_the_same_bytes_so_that_the_next_subscriber_drops_them(
    value: Any, answer: Any
) -> None:
    shop, sent = Shop(), list[tuple[bytes, Any]]()
    shop.add_subscriber(answer(value))

    @shop.broker.subscriber("receipts", group_id="archive", ack_policy=AckPolicy.NACK_ON_ERROR)
    async def receive(receipt: Any) -> None:
        shop.runs.append(receipt)

    @shop.broker.subscriber("receipts")
    async def watch(message: KafkaMessage) -> None:
        sent.append((message.body, message.content_type))

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    assert len(shop.runs) == 2
    assert sent[0] == sent[1]
    assert shop.given_up == []


@pytest.mark.parametrize("key", [b"order-7", b"\x00; key=%", None])
async def test_a_duplicate_publishes_a_response_with_its_key(key: bytes | None) -> None:
    shop, keys = Shop(), list[bytes | None]()
    shop.add_subscriber(KafkaResponse({"receipt": "1"}, key=key))

    class Watch(BaseMiddleware[Any, Any]):
        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            if cmd.destination == "receipts":
                keys.append(cmd.key)
            return await call_next(cmd)

    shop.broker.add_middleware(Watch)
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()
    assert keys == [key, key]


async def test_a_reply_and_a_published_message_of_one_response_do_not_share_an_event_id() -> None:
    shop, ids = Shop(), list[str]()
    answer = KafkaResponse({"receipt": "1"}, headers={"kind": "receipt"})
    shop.add_subscriber(answer)

    @shop.broker.subscriber("receipts", "replies")
    async def receive(receipt: Any, message: KafkaMessage) -> None:
        ids.append(message.headers["event_id"])

    async with TestKafkaBroker(shop.broker):
        for event_id in ("e-1", "e-2", "e-1"):
            headers = {"event_id": event_id}
            await shop.broker.publish({"order": "7"}, "orders", headers=headers, reply_to="replies")

    assert len(set(ids)) == 4
    assert ids[4:] == ids[:2]
    assert answer.headers == {"kind": "receipt"}


async def test_a_duplicate_of_a_message_that_the_handler_acknowledged_publishes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shop = Shop()

    @shop.broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)
    @shop.broker.publisher("receipts")
    async def charge(order: Any) -> None:
        shop.runs.append(order)
        raise AckMessage

    shop.before_publishing(nothing)
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()
    assert (len(shop.runs), shop.sent) == (1, [])
    assert shop.settled == ["AckMessage", "AckMessage"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
