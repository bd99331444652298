"""Dead letters as operators see them, and the filters, times and topics that select them."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from dishka import AsyncContainer

from integr8s_idem import Platform, Service, Settings
from integr8s_idem.config import KafkaSettings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.dead_letter_counts import MAX_GROUPS, OTHERS, Group, Tally
from integr8s_idem.operations.dead_letter_filter import DeadLetterFilter, parse_time
from integr8s_idem.operations.dead_letter_topics import dead_letter_topics, platform_topics
from integr8s_idem.operations.dead_letters import Place, StoredDeadLetter
from tests.support.dead_letters import dead_letter_of
from tests.support.fake_consumer import FakeRecord

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
FOREIGN = StoredDeadLetter(
    FakeRecord(
        "order_placed.dlq", 0, 9, None, None,
        [("idempotency-dlq-reason", b""), ("idempotency-dlq-attempts", b"9" * 5_000)],
    )
)  # fmt: skip


def test_a_dead_letter_names_its_service_its_reason_and_its_original_message() -> None:
    dead_letter = StoredDeadLetter(dead_letter_of(7, offset=3, generation=2))

    assert dead_letter.summary() == {
        "place": "order_placed.dlq:0:3",
        "at": "2030-01-01T00:00:00.000Z",
        "service": "billing",
        "group": "billing",
        "handler": "charge",
        "reason": "handler_failed",
        "error_class": "ValueError",
        "error": "ValueError: no such card",
        "event_type": "order_placed",
        "key": "order_placed:event-7",
        "record": "idempotency:billing:charge:order_placed:id:event-7",
        "attempts": 2,
        "generation": 2,
        "origin": "order_placed:0:7",
        "published_at": "2030-01-01T00:00:00.000Z",
        "bytes": dead_letter.size,
    }


def test_unknown_properties_of_a_foreign_message_are_empty() -> None:
    summary = FOREIGN.summary()

    assert (summary["reason"], summary["attempts"], summary["generation"], summary["origin"]) == ("", None, 0, "")


@pytest.mark.parametrize("forged", [b"x" * 300, b"idempotency:\n", "idempotency:é".encode()])
def test_an_invalid_record_key_in_a_header_is_ignored(forged: bytes) -> None:
    record = dead_letter_of()
    headers = [(name, forged if name == "idempotency-dlq-record" else value) for name, value in record.headers]

    assert StoredDeadLetter(FakeRecord("order_placed.dlq", 0, 1, None, None, headers)).record_key == ""


def test_a_timestamp_out_of_range_is_shown_as_1970() -> None:
    assert StoredDeadLetter(dead_letter_of(timestamp=10**18)).at == datetime.fromtimestamp(0, UTC)


def test_json_of_a_dead_letter_is_lossless() -> None:
    record = dead_letter_of(more=[("odd", b"\xff"), ("odd", b"\xc3\xa9"), ("null", None)])  # type: ignore[list-item]  # Kafka has them

    message = json.loads(json.dumps(StoredDeadLetter(record).as_json()))["message"]

    def decoded(value: dict[str, str] | None) -> bytes | None:
        if value is None:
            return None
        return value["text"].encode() if "text" in value else base64.b64decode(value["base64"])

    assert [(name, decoded(value)) for name, value in message["headers"]] == list(record.headers)
    assert (decoded(message["key"]), decoded(message["value"])) == (record.key, record.value)
    assert message["timestamp"] == record.timestamp


@pytest.mark.parametrize("text", ["", "a", "a:0", "a:0:", "a:b:1", "a:0:-1", ":0:1", "a:0:1:2", "a:0:²"])
def test_an_invalid_place_is_refused_with_the_expected_format(text: str) -> None:
    with pytest.raises(ApplicationError, match="write topic:partition:offset"):
        Place.of(text)


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("30s", NOW - timedelta(seconds=30)),
        ("2h", NOW - timedelta(hours=2)),
        ("7d", NOW - timedelta(days=7)),
        ("2026-04-30", datetime(2026, 4, 30, tzinfo=UTC)),
        ("2026-04-30T10:00+02:00", datetime(2026, 4, 30, 8, tzinfo=UTC)),
        ("2026-04-30T10:00:00.500Z", datetime(2026, 4, 30, 10, 0, 0, 500_000, tzinfo=UTC)),
    ],
)
def test_times_are_ages_or_iso_8601(text: str, time: datetime) -> None:
    assert parse_time(text, NOW) == time


@pytest.mark.parametrize("text", ["", "2x", "h", "yesterday", "-2h", "999999w", "2026-13-01"])
def test_an_invalid_time_is_refused_with_the_expected_format(text: str) -> None:
    with pytest.raises(ApplicationError, match="write an age such as 30m, 2h or 7d"):
        parse_time(text, NOW)


@pytest.mark.parametrize(
    ("fields", "is_match"),
    [
        ({}, True),
        ({"services": ("billing",)}, True),
        ({"services": ("audit", "bill*")}, True),
        ({"services": ("audit",)}, False),
        ({"reasons": ("handler_failed",), "services": ("audit",)}, False),
        ({"errors": ("ValueError",)}, True),
        ({"errors": ("SUCH CARD",)}, True),
        ({"errors": ("KeyError",)}, False),
        ({"event_types": ("order_*",)}, True),
        ({"keys": ("order_placed:event-1",)}, True),
        ({"keys": ("order_placed:event",)}, False),
        ({"keys": ("idempotency:billing:*:event-1",)}, True),
        ({"keys": ("customer-1",)}, True),
        ({"keys": ("customer-[1]",)}, False),
        ({"since": datetime(2030, 1, 1, tzinfo=UTC)}, True),
        ({"since": datetime(2030, 1, 2, tzinfo=UTC)}, False),
        ({"until": datetime(2030, 1, 1, tzinfo=UTC)}, False),
        ({"until": datetime(2030, 1, 2, tzinfo=UTC)}, True),
    ],
)
def test_a_filter_matches_dead_letters_that_satisfy_every_field(fields: dict[str, Any], is_match: bool) -> None:
    assert DeadLetterFilter(**fields).matches(StoredDeadLetter(dead_letter_of())) is is_match


def test_an_empty_property_matches_no_pattern() -> None:
    assert not DeadLetterFilter(services=("*",)).matches(FOREIGN)


KAFKA = KafkaSettings(topic_prefix="shop.")
EXISTING = {"shop.order_placed", "shop.order_placed.dlq", "shop.paid.dlq", "other.dlq"}


def test_all_topics_with_the_configured_prefix_and_suffix_are_searched_by_default() -> None:
    assert dead_letter_topics(KAFKA, EXISTING) == ["shop.order_placed.dlq", "shop.paid.dlq"]


def test_for_a_platform_the_existing_topics_of_its_services_are_searched() -> None:
    assert dead_letter_topics(KAFKA, EXISTING, read=["shop.paid", "shop.refunded"]) == ["shop.paid.dlq"]


@pytest.mark.parametrize("name", ["shop.paid.dlq", "shop.paid", "paid.dlq", "paid"])
def test_a_topic_can_be_named_by_itself_or_by_its_original_topic(name: str) -> None:
    assert dead_letter_topics(KAFKA, EXISTING, named=[name, name]) == ["shop.paid.dlq"]


def test_an_unknown_topic_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ApplicationError, match=r'did you mean "shop.order_placed.dlq"'):
        dead_letter_topics(KAFKA, EXISTING, named=["shop.order_place"])


def test_invented_reasons_are_counted_in_bounded_memory() -> None:
    tally = Tally()
    for number in range(MAX_GROUPS + 10):
        tally.add(Group("t.dlq", "billing", f"reason-{number}", ""))

    assert tally.total == MAX_GROUPS + 10
    assert tally.rows()[0] == (Group("t.dlq", OTHERS, OTHERS, OTHERS), 10)
    assert len(tally.rows()) == MAX_GROUPS + 1


async def test_a_platform_with_a_broken_container_is_reported_with_an_alternative() -> None:
    def broken(_: Settings) -> AsyncContainer:
        raise ZeroDivisionError("no such database")

    with pytest.raises(ApplicationError, match=r"cannot determine the topics .*billing.*no such database.*--topic"):
        await platform_topics(Platform(Service("billing", container=broken)), Settings())
