"""Dead letters: their headers, and messages that replay them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from integr8s_idem.errors import ApplicationError, UndecodableEventError
from integr8s_idem.worker.dead_letters import PREFIX, DeadLetter, record_key_of, replay_of
from tests.support.fake_consumer import FakeRecord

RECORD = FakeRecord("orders", 3, 42, b"k", b"body", [("event_id", b"\xff"), ("idempotency-dlq-reason", b"earlier")])


def test_a_dead_letter_starts_with_the_messages_own_headers() -> None:
    headers = DeadLetter("malformed", "no JSON").headers(RECORD, "billing", "billing-group")

    assert headers[:2] == list(RECORD.headers)


def test_headers_state_the_reason_the_origin_and_the_time() -> None:
    dead_letter = DeadLetter("handler_failed", ValueError("no\nsuch  card"), "charge", "order_placed:1", attempts=5)

    headers = dict(dead_letter.headers(RECORD, "billing", "billing-group")[2:])

    assert headers.pop("idempotency-dlq-failed-at").isdigit()
    assert headers == {
        "idempotency-dlq-reason": b"handler_failed",
        "idempotency-dlq-error-class": b"ValueError",
        "idempotency-dlq-error-message": b"ValueError: no such card",
        "idempotency-dlq-service": b"billing",
        "idempotency-dlq-group": b"billing-group",
        "idempotency-dlq-handler": b"charge",
        "idempotency-dlq-key": b"order_placed:1",
        "idempotency-dlq-attempts": b"5",
        "idempotency-dlq-generation": b"0",
        "idempotency-dlq-topic": b"orders",
        "idempotency-dlq-partition": b"3",
        "idempotency-dlq-offset": b"42",
        "idempotency-dlq-timestamp": b"1893456000000",
    }


def test_an_error_of_any_length_and_any_characters_yields_a_bounded_header() -> None:
    dead_letter = DeadLetter("handler_failed", ValueError("\ud800" + "é" * 100_000))

    headers = dict(dead_letter.headers(RECORD, "billing", "g"))

    assert len(headers["idempotency-dlq-error-message"]) < 3_000
    assert headers["idempotency-dlq-error-message"].startswith(b"ValueError: \\ud800")


def dead_letter_of(
    *headers: tuple[str, bytes],
    reason: str = "handler_failed",
    handler: str = "charge",
    value: bytes | None = b"body",
    generation: int = 0,
) -> FakeRecord:
    """Return the dead letter of a message with `headers`."""
    message = FakeRecord("orders", 3, 42, b"k", value, headers)
    dead_letter = DeadLetter(reason, ValueError("no"), handler, generation=generation)
    return FakeRecord("orders.dlq", 0, 7, b"k", value, dead_letter.headers(message, "billing", "billing-group"))


def modified(**fields: Any) -> FakeRecord:
    """Return a dead letter in which `fields` were replaced by another program."""
    headers = [(name, value) for name, value in dead_letter_of().headers if name.removeprefix(PREFIX) not in fields]
    added = [(PREFIX + name, value) for name, value in fields.items()]
    return FakeRecord("orders.dlq", 0, 7, b"k", b"", headers + added)


TARGET = [("idempotency-replay-group", b"billing-group"), ("idempotency-replay-handler", b"charge")]


def test_a_replay_is_the_original_message_in_the_next_generation_for_the_failed_handler() -> None:
    topic, key, value, headers = replay_of(dead_letter_of(("event_id", b"\xff"), ("event_id", b"twice")))

    assert (topic, key, value) == ("orders", b"k", b"body")
    assert headers == [("event_id", b"\xff"), ("event_id", b"twice"), ("idempotency-generation", b"1"), *TARGET]


@pytest.mark.parametrize("generations", [[b"8"], [b"junk", b"008"]])
def test_a_replay_of_a_replay_increments_the_generation_and_replaces_the_headers(generations: Sequence[bytes]) -> None:
    earlier = [("idempotency-generation", generation) for generation in generations]

    replay = replay_of(dead_letter_of(*earlier, *TARGET, generation=8))

    assert replay.headers == [("idempotency-generation", b"9"), *TARGET]


def test_a_dead_letter_without_a_handler_is_replayed_for_the_whole_group() -> None:
    replay = replay_of(dead_letter_of(reason="malformed", handler="", value=None))

    assert replay.headers == [("idempotency-generation", b"1"), ("idempotency-replay-group", b"billing-group")]
    assert replay.value is None


def test_a_header_without_a_value_is_ignored() -> None:
    assert replay_of(modified(group=None, handler=None)).headers == [("idempotency-generation", b"1")]


def test_the_record_key_is_read_from_a_dead_letter_or_an_error_is_raised() -> None:
    assert record_key_of(modified(record=b"idempotency:billing:charge:order_placed:id:1")).endswith(":id:1")
    for dead_letter in (dead_letter_of(), modified(record=b"\xff"), RECORD):
        with pytest.raises(ApplicationError, match="has no record"):
            record_key_of(dead_letter)


def test_the_last_headers_of_a_message_that_was_dead_lettered_twice_count() -> None:
    first = dead_letter_of()
    again = DeadLetter("malformed", "no JSON").headers(first, "shipping", "shipping-group")

    replay = replay_of(FakeRecord("orders.dlq.dlq", 0, 0, b"k", b"body", again))

    assert replay.topic == "orders.dlq"
    assert replay.headers == [("idempotency-generation", b"1"), ("idempotency-replay-group", b"shipping-group")]


@pytest.mark.parametrize(
    ("dead_letter", "why"),
    [
        (RECORD, "not a dead letter"),
        (FakeRecord("orders", 0, 0, None, b"body"), "not a dead letter"),
        (modified(topic=b"\xff"), "not a dead letter"),
        (modified(topic=None), "not a dead letter"),
        (FakeRecord("orders", 0, 0, b"k", b"body", dead_letter_of().headers), "not a dead-letter topic"),
        (dead_letter_of(generation=999), "replayed 999 times"),
        (
            FakeRecord(
                "orders.dlq", 0, 1, None, None, [*dead_letter_of().headers, ("idempotency-dlq-dropped", b"value")]
            ),
            "does not contain the whole message",
        ),
    ],
)
def test_a_message_that_cannot_be_replayed_raises_an_error(dead_letter: FakeRecord, why: str) -> None:
    with pytest.raises(ApplicationError, match=why):
        replay_of(dead_letter)


def test_a_dead_letter_with_an_invalid_generation_cannot_be_replayed() -> None:
    with pytest.raises(UndecodableEventError, match="not a number from 0 to 999"):
        replay_of(modified(generation=b"one"))
