"""Dead letters as operators see them, and which of them are meant."""

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
from integr8s_idem.operations.dead_letter_counts import MOST_GROUPS, OTHERS, Group, Tally
from integr8s_idem.operations.dead_letter_filter import Choice, moment
from integr8s_idem.operations.dead_letter_topics import dead_letter_topics, topics_of
from integr8s_idem.operations.dead_letters import Letter, Place
from tests.support.dead_letters import letter_of
from tests.support.fake_consumer import FakeRecord

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
FOREIGN = Letter(
    FakeRecord(
        "order_placed.dlq", 0, 9, None, None,
        [("idempotency-dlq-reason", b""), ("idempotency-dlq-attempts", b"9" * 5_000)],
    )
)  # fmt: skip


def test_a_letter_tells_whose_it_is_and_where_it_came_from() -> None:
    letter = Letter(letter_of(7, offset=3, generation=2))

    assert letter.summary() == {
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
        "bytes": letter.size,
    }


def test_what_another_program_has_written_is_shown_as_far_as_it_makes_sense() -> None:
    told = FOREIGN.summary()

    assert (told["reason"], told["attempts"], told["generation"], told["origin"]) == ("", None, 0, "")


@pytest.mark.parametrize("forged", [b"x" * 300, b"idempotency:\n", "idempotency:é".encode()])
def test_no_store_is_asked_for_a_key_that_cannot_be_one(forged: bytes) -> None:
    record = letter_of()
    headers = [(name, forged if name == "idempotency-dlq-record" else value) for name, value in record.headers]

    assert Letter(FakeRecord("order_placed.dlq", 0, 1, None, None, headers)).record_key == ""


def test_a_time_beyond_all_calendars_spoils_no_letter() -> None:
    assert Letter(letter_of(timestamp=10**18)).at == datetime.fromtimestamp(0, UTC)


def test_a_whole_letter_is_lossless() -> None:
    record = letter_of(more=[("odd", b"\xff"), ("odd", b"\xc3\xa9"), ("null", None)])  # type: ignore[list-item]  # Kafka has them

    message = json.loads(json.dumps(Letter(record).whole()))["message"]

    def decoded(told: dict[str, str] | None) -> bytes | None:
        if told is None:
            return None
        return told["text"].encode() if "text" in told else base64.b64decode(told["base64"])

    assert [(name, decoded(value)) for name, value in message["headers"]] == list(record.headers)
    assert (decoded(message["key"]), decoded(message["value"])) == (record.key, record.value)
    assert message["timestamp"] == record.timestamp


@pytest.mark.parametrize("text", ["", "a", "a:0", "a:0:", "a:b:1", "a:0:-1", ":0:1", "a:0:1:2", "a:0:²"])
def test_what_is_no_place_says_how_one_is_written(text: str) -> None:
    with pytest.raises(ApplicationError, match="write topic:partition:offset"):
        Place.of(text)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("30s", NOW - timedelta(seconds=30)),
        ("2h", NOW - timedelta(hours=2)),
        ("7d", NOW - timedelta(days=7)),
        ("2026-04-30", datetime(2026, 4, 30, tzinfo=UTC)),
        ("2026-04-30T10:00+02:00", datetime(2026, 4, 30, 8, tzinfo=UTC)),
        ("2026-04-30T10:00:00.500Z", datetime(2026, 4, 30, 10, 0, 0, 500_000, tzinfo=UTC)),
    ],
)
def test_times_are_ages_or_iso_8601(text: str, means: datetime) -> None:
    assert moment(text, NOW) == means


@pytest.mark.parametrize("text", ["", "2x", "h", "yesterday", "-2h", "999999w", "2026-13-01"])
def test_what_is_no_time_says_how_one_is_written(text: str) -> None:
    with pytest.raises(ApplicationError, match="write an age, as in 30m, 2h or 7d"):
        moment(text, NOW)


@pytest.mark.parametrize(
    ("wanted", "is_meant"),
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
def test_letters_are_meant_that_fit_every_part(wanted: dict[str, Any], is_meant: bool) -> None:
    assert Choice(**wanted).takes(Letter(letter_of())) is is_meant


def test_a_letter_that_says_nothing_fits_no_pattern() -> None:
    assert not Choice(services=("*",)).takes(FOREIGN)


KAFKA = KafkaSettings(topic_prefix="shop.")
THERE = {"shop.order_placed", "shop.order_placed.dlq", "shop.paid.dlq", "other.dlq"}


def test_without_a_name_all_topics_are_meant_that_begin_and_end_as_the_settings_say() -> None:
    assert dead_letter_topics(KAFKA, THERE) == ["shop.order_placed.dlq", "shop.paid.dlq"]


def test_of_a_platform_those_are_meant_that_its_services_read_and_that_are_there() -> None:
    assert dead_letter_topics(KAFKA, THERE, read=["shop.paid", "shop.refunded"]) == ["shop.paid.dlq"]


@pytest.mark.parametrize("name", ["shop.paid.dlq", "shop.paid", "paid.dlq", "paid"])
def test_a_topic_is_named_by_itself_or_by_the_one_it_serves(name: str) -> None:
    assert dead_letter_topics(KAFKA, THERE, named=[name, name]) == ["shop.paid.dlq"]


def test_a_topic_that_is_not_there_is_not_made_up() -> None:
    with pytest.raises(ApplicationError, match=r'did you mean "shop.order_placed.dlq"'):
        dead_letter_topics(KAFKA, THERE, named=["shop.order_place"])


def test_made_up_reasons_take_no_more_memory_than_there_may_be_groups() -> None:
    tally = Tally()
    for number in range(MOST_GROUPS + 10):
        tally.add(Group("t.dlq", "billing", f"reason-{number}", ""))

    assert tally.total == MOST_GROUPS + 10
    assert tally.rows()[0] == (Group("t.dlq", OTHERS, OTHERS, OTHERS), 10)
    assert len(tally.rows()) == MOST_GROUPS + 1


async def test_a_platform_whose_containers_cannot_be_made_is_told_what_to_do_instead() -> None:
    def broken(_: Settings) -> AsyncContainer:
        raise ZeroDivisionError("no such database")

    with pytest.raises(ApplicationError, match=r"topics of service billing are not known.*no such database.*--topic"):
        await topics_of(Platform(Service("billing", container=broken)), Settings())
