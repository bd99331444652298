"""`integr8s-idem keys explain topic:partition:offset` on real Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from integr8s_idem import IdempotencyConfig, IdempotencyManager
from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.keys.event_keys import KeyResolver, KeyStrategy
from integr8s_idem.operations.keys import undecodable_message
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.worker.dead_letters import GENERATION, REPLAY_GROUP, DeadLetter, replay_of
from tests.support.fake_consumer import FakeRecord
from tests.support.kafka.broker import Kafka
from tests.support.keys_desk import Desk
from tests.support.replays import SECRET, SIGNED
from tests.support.shop import OrderPlaced

pytestmark = pytest.mark.kafka

APP = ("--app", "tests.support.three_shops:platform")
EVENT = OrderPlaced(event_id="0192-a", order_id="1")


class Shop:
    """A topic with messages, and a store with their records."""

    def __init__(self, kafka: Kafka, prefix: str, folder: Path, redis_url: str) -> None:
        self._kafka = kafka
        self.topic = f"{prefix}order_placed"
        more = f'[kafka]\nbootstrap_servers = "{kafka.bootstrap}"\ntopic_prefix = "{prefix}"\n'
        more += f'[replay]\nsecret = "{SECRET}"\n'
        self.desk = Desk(folder, f'kind = "redis"\nurl = "{redis_url}"', more)

    def publish(self, *messages: tuple[bytes, Sequence[tuple[str, bytes]]], topic: str = "") -> list[int]:
        """Publish messages to partition 0 and return their offsets."""

        async def published() -> list[int]:
            producer: Any = AIOKafkaProducer(bootstrap_servers=self._kafka.bootstrap)
            await producer.start()
            try:
                sent = [
                    await producer.send_and_wait(topic or self.topic, value, headers=list(headers), partition=0)
                    for value, headers in messages
                ]
            finally:
                await producer.stop()
            return [one.offset for one in sent]

        return asyncio.run(published())

    def event(self, event: OrderPlaced = EVENT, *headers: tuple[str, bytes]) -> str:
        """Publish an event and return its `topic:partition:offset`."""
        (offset,) = self.publish((encode_event(event), [*event_headers(event), *headers]))
        return f"{self.topic}:0:{offset}"

    def handled(self, service: str, event: OrderPlaced = EVENT, strategy: KeyStrategy = KeyStrategy.EVENT_BASED) -> str:
        """Handle an event in a service and return its full key."""
        keyed = KeyResolver(strategy).resolve("charge", event)

        async def done(store: IdempotencyRepository) -> str:
            manager = IdempotencyManager(repository=store, scope=service)
            await manager.run(keyed.key, _receipt, fingerprint=event if keyed.fingerprint else None)
            await manager.close()
            return manager.space.full(keyed.key)

        return self.desk.do(done)

    def failed(self, service: str, attempts: int, *, hash_keys: bool = False) -> str:
        """Let an event fail in a service, which releases its key, and return the full key."""
        keyed = KeyResolver().resolve("charge", EVENT)

        async def fails() -> None:
            raise OSError("busy")

        async def done(store: IdempotencyRepository) -> str:
            config = IdempotencyConfig(max_attempts=attempts + 1, hash_keys=hash_keys)
            manager = IdempotencyManager(config, store, scope=service)
            key = manager.space.key(keyed.key)
            for _ in range(attempts):
                with pytest.raises(OSError, match="busy"):
                    await manager.run(key, fails, fingerprint=EVENT)
            await manager.close()
            return manager.space.full(key)

        return self.desk.do(done)

    def topics(self) -> set[str]:
        async def read() -> set[str]:
            consumer: Any = AIOKafkaConsumer(bootstrap_servers=self._kafka.bootstrap)
            await consumer.start()
            try:
                return set(await consumer.topics())
            finally:
                await consumer.stop()

        return asyncio.run(read())


async def _receipt() -> str:
    return "receipt-1"


@pytest.fixture
def shop(kafka: Kafka, topic_prefix: str, tmp_path: Path, redis_url: str) -> Shop:
    shop = Shop(kafka, topic_prefix, tmp_path, redis_url)
    asyncio.run(kafka.create_topics({shop.topic: 2}))
    return shop


def test_a_message_is_explained_for_every_service_that_reads_it(shop: Shop) -> None:
    place, by_id = shop.event(), shop.handled("billing")

    answer = shop.desk.explained(place, *APP)

    (record,) = answer["records"]
    assert (record["key"], record["result"]["text"]) == (by_id, '"receipt-1"')
    absent = {one["service"]: one for one in answer["absent"]}
    assert sorted(absent) == ["audit", "fraud"]
    assert absent["fraud"]["next_delivery"].startswith("would be handled, as attempt 1")
    assert absent["audit"]["next_delivery"] == "would be handled: this handler is not guarded"

    by_content = shop.handled("fraud", strategy=KeyStrategy.CONTENT_HASH)
    assert {one["key"] for one in shop.desk.explained(place, *APP)["records"]} == {by_id, by_content}


@pytest.mark.parametrize("hash_keys", [False, True], ids=["keys", "hashed keys"])
def test_the_rules_for_errors_of_each_handler_are_considered(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, hash_keys: bool
) -> None:
    rules = '[{"error": "OSError", "action": "retry", "attempts": 20}, {"error": "KeyError", "action": "stop"}]'
    monkeypatch.setenv("INTEGR8S_IDEM_SERVICES__BILLING__FAILURES", rules)
    monkeypatch.setenv("INTEGR8S_IDEM_IDEMPOTENCY__HASH_KEYS", str(hash_keys).lower())
    place, by_id = shop.event(), shop.failed("billing", 3, hash_keys=hash_keys)

    answer = shop.desk.explained(place, *APP)

    (record,) = answer["records"]
    decides = "OSError is retried, at most 20 attempts, KeyError stops the service"
    assert record["key"] == by_id
    assert record["failure_rules"] == ["retry(OSError, attempts=20)", "stop(KeyError)"]
    assert record["next_delivery"] == (
        "would be handled again, as attempt 4; a failure would be final (max_attempts = 3); by its rules, " + decides
    )
    absent = {one["service"]: one["next_delivery"] for one in answer["absent"]}
    assert absent["fraud"] == "would be handled, as attempt 1 of at most 5"
    by_key = shop.desk.explained(by_id, "--as", "key", *APP)["records"][0]
    # A hashed key does not name its handler.
    assert by_key["failure_rules"] == (None if hash_keys else record["failure_rules"])
    without = shop.desk.explained(by_id, "--as", "key")["records"][0]
    assert without["failure_rules"] is None
    assert without["next_delivery"].endswith("(to see the rules, use --app)")


def test_without_the_application_the_event_id_is_searched(shop: Shop) -> None:
    place, by_id = shop.event(), shop.handled("billing")
    shop.handled("billing", OrderPlaced(event_id="0192-b", order_id="1"))

    answer = shop.desk.explained(place)

    assert [one["key"] for one in answer["records"]] == [by_id]
    assert answer["read_as"].endswith("order_placed:0192-a")


def test_a_different_payload_with_the_same_id_is_detected(shop: Shop) -> None:
    shop.handled("billing")
    place = shop.event(OrderPlaced(event_id="0192-a", order_id="2"))

    answer = shop.desk.explained(place, *APP)

    assert "dead-letter it (key_reused)" in answer["records"][0]["next_delivery"]


def test_a_dead_letter_leads_to_its_record(shop: Shop) -> None:
    key = shop.handled("billing")
    record = FakeRecord(shop.topic, 0, 0, None, b"{}")
    headers = DeadLetter("handler_failed", "no", "charge", "order_placed:1", key).headers(record, "billing", "billing")
    (offset,) = shop.publish((b"{}", headers), topic=f"{shop.topic}.dlq")

    answer = shop.desk.explained(f"{shop.topic}.dlq:0:{offset}")

    assert [one["key"] for one in answer["records"]] == [key]
    assert answer["read_as"].startswith("the dead letter")


def test_a_replay_is_explained_for_its_group_and_generation(shop: Shop) -> None:
    shop.handled("billing")
    record = FakeRecord(shop.topic, 0, 0, None, encode_event(EVENT), event_headers(EVENT))
    headers = DeadLetter("handler_failed", "no", event_id=EVENT.event_id).headers(record, "billing", "billing")
    replay = replay_of(FakeRecord(f"{shop.topic}.dlq", 0, 0, None, record.value, headers), SIGNED)
    place = f"{shop.topic}:0:{shop.publish((encode_event(EVENT), replay.headers))[0]}"

    answer = shop.desk.explained(place, *APP)

    assert [one["key"][-2:] for one in answer["absent"]] == [";1"]
    assert sorted(note.split()[0] for note in answer["notes"]) == ["audit", "fraud"]


def test_unsigned_replay_headers_are_refused(shop: Shop) -> None:
    key = shop.handled("billing")
    place = shop.event(EVENT, (GENERATION, b"1"), (REPLAY_GROUP, b"analytics"))

    answer = shop.desk.explained(place, *APP)

    assert key in [one["key"] for one in answer["records"]]
    assert "billing refuses its replay headers (unsigned), and handles it as an ordinary delivery" in answer["notes"]


TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def sampled(flags: str) -> tuple[str, bytes]:
    return ("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-{flags}".encode())


def test_an_undecodable_message_is_explained(shop: Shop) -> None:
    (offset,) = shop.publish((b"no json", ()))

    with_app = shop.desk.explained(f"{shop.topic}:0:{offset}", *APP)["notes"]
    without_app = shop.desk.explained(f"{shop.topic}:0:{offset}")["notes"]

    more = [
        f"dead letter: none, since topic {shop.topic}.dlq does not exist",
        "trace: its headers name none, so each delivery starts a trace of its own; search for the span with "
        f'idempotency.delivery = "{shop.topic}:0:{offset}"',
    ]
    assert [note for note in with_app if "dead-letters it: malformed:" in note] == with_app[:-2]
    assert with_app[-2:] == without_app[-2:] == more
    assert without_app[0].startswith("the message cannot be decoded with the envelopes of these settings: malformed:")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("01", f'trace: {TRACE_ID}; its span "process {{topic}}" describes the failed delivery'),
        ("00", f"trace: {TRACE_ID}, which the producer did not sample, so it has no spans"),
    ],
)
def test_an_undecodable_message_with_an_event_id_in_its_headers_was_not_merely_never_seen(
    shop: Shop, flags: str, expected: str
) -> None:
    (offset,) = shop.publish((b"no json", [("event_id", b"0192-a"), sampled(flags)]))

    notes = shop.desk.explained(f"{shop.topic}:0:{offset}")["notes"]

    assert not [note for note in notes if "never seen" in note]
    assert "cannot be decoded" in notes[0]
    assert notes[-1] == expected.format(topic=shop.topic)


def test_the_dead_letter_of_an_undecodable_message_is_found(shop: Shop) -> None:
    first, second = shop.publish((b"no json", ()), (b"no json", ()))
    record = FakeRecord(shop.topic, 0, second, None, b"no json")
    headers = DeadLetter("malformed", "no json").headers(record, "billing", "billing")
    (place,) = shop.publish((b"no json", headers), topic=f"{shop.topic}.dlq")

    notes = {offset: shop.desk.explained(f"{shop.topic}:0:{offset}")["notes"] for offset in (first, second)}

    assert f"dead letter: {shop.topic}.dlq:0:{place} (service billing, malformed)" in notes[second]
    assert (
        f"dead letter: none in {shop.topic}.dlq; it was not delivered yet, or its dead letter has been deleted"
        in notes[first]
    )


def test_a_long_dead_letter_topic_is_not_read_to_its_end(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undecodable_message, "LONGEST_SEARCH", 1)
    (offset,) = shop.publish((b"", ()))
    shop.publish((b"1", ()), (b"2", ()), topic=f"{shop.topic}.dlq")

    notes = shop.desk.explained(f"{shop.topic}:0:{offset}")["notes"]

    assert "settings: empty:" in notes[0] or "dead-letters it: empty:" in notes[0]
    assert f"dead letter: none among the first 1 messages of {shop.topic}.dlq that are later than it" in notes


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("{topic}:0:7", "does not exist yet: the partition contains offsets 0 to 0"),
        ("{topic}:1:0", "does not exist yet: the partition is empty"),
        ("{topic}:9:0", "has partitions 0 to 1, not 9"),
        ("{topic}-other:0:0", "not found on"),
    ],
)
def test_a_missing_message_is_reported_and_no_topic_created(shop: Shop, place: str, message: str) -> None:
    shop.event()
    topics = shop.topics()

    answer = shop.desk.typed("explain", place.format(topic=shop.topic))

    assert answer.exit_code == 2
    assert message in answer.stderr
    assert shop.topics() == topics


def test_a_place_can_be_read_as_a_key(shop: Shop) -> None:
    shop.desk.take("orders:0:7")

    answer = shop.desk.explained("orders:0:7", "--as", "event")

    assert [one["label"] for one in answer["records"]] == ["orders:0:7"]


def test_unavailable_brokers_are_reported(tmp_path: Path, redis_url: str) -> None:
    more = '[kafka]\nbootstrap_servers = "127.0.0.1:9"\nrequest_timeout_seconds = 1\n'
    desk = Desk(tmp_path, f'kind = "redis"\nurl = "{redis_url}"', more)

    answer = desk.typed("explain", "orders:0:7")

    assert answer.exit_code == 2
    assert "cannot read orders[0]@7 from 127.0.0.1:9" in answer.stderr
