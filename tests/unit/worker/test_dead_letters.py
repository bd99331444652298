"""Dead letters: the message as it came, and why it is there; and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from integr8s_idem.errors import ApplicationError, UndecodableEventError
from integr8s_idem.worker.dead_letters import PREFIX, DeadLetter, record_key_of, replay_of
from tests.support.fake_consumer import FakeRecord

RECORD = FakeRecord("orders", 3, 42, b"k", b"body", [("event_id", b"\xff"), ("idempotency-dlq-reason", b"earlier")])


def test_the_messages_own_headers_come_first_byte_for_byte() -> None:
    headers = DeadLetter("malformed", "no JSON").headers(RECORD, "billing", "billing-group")

    assert headers[:2] == list(RECORD.headers)


def test_our_headers_say_why_where_from_and_when() -> None:
    letter = DeadLetter("handler_failed", ValueError("no\nsuch  card"), "charge", "order_placed:1", attempts=5)

    headers = dict(letter.headers(RECORD, "billing", "billing-group")[2:])

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


def test_an_error_of_any_length_and_any_letters_makes_a_bounded_header() -> None:
    letter = DeadLetter("handler_failed", ValueError("\ud800" + "é" * 100_000))

    headers = dict(letter.headers(RECORD, "billing", "g"))

    assert len(headers["idempotency-dlq-error-message"]) < 3_000
    assert headers["idempotency-dlq-error-message"].startswith(b"ValueError: \\ud800")


def dead_letter_of(
    *headers: tuple[str, bytes],
    reason: str = "handler_failed",
    handler: str = "charge",
    value: bytes | None = b"body",
    generation: int = 0,
) -> FakeRecord:
    """The dead letter of a message with these headers."""
    message = FakeRecord("orders", 3, 42, b"k", value, headers)
    letter = DeadLetter(reason, ValueError("no"), handler, generation=generation)
    return FakeRecord("orders.dlq", 0, 7, b"k", value, letter.headers(message, "billing", "billing-group"))


def foreign(**told: Any) -> FakeRecord:
    """A letter of which another program has written some headers."""
    headers = [(name, value) for name, value in dead_letter_of().headers if name.removeprefix(PREFIX) not in told]
    return FakeRecord("orders.dlq", 0, 7, b"k", b"", headers + [(PREFIX + name, value) for name, value in told.items()])


TARGET = [("idempotency-replay-group", b"billing-group"), ("idempotency-replay-handler", b"charge")]


def test_a_replay_is_the_message_as_it_came_one_generation_higher_for_the_handler_that_failed() -> None:
    topic, key, value, headers = replay_of(dead_letter_of(("event_id", b"\xff"), ("event_id", b"twice")))

    assert (topic, key, value) == ("orders", b"k", b"body")
    assert headers == [("event_id", b"\xff"), ("event_id", b"twice"), ("idempotency-generation", b"1"), *TARGET]


@pytest.mark.parametrize("generations", [[b"8"], [b"junk", b"008"]])
def test_a_replay_of_a_replay_counts_on_and_leaves_no_old_headers_behind(generations: Sequence[bytes]) -> None:
    told = [("idempotency-generation", generation) for generation in generations]

    replay = replay_of(dead_letter_of(*told, *TARGET, generation=8))

    assert replay.headers == [("idempotency-generation", b"9"), *TARGET]


def test_a_letter_of_nobodys_handler_is_replayed_for_the_whole_group() -> None:
    replay = replay_of(dead_letter_of(reason="malformed", handler="", value=None))

    assert replay.headers == [("idempotency-generation", b"1"), ("idempotency-replay-group", b"billing-group")]
    assert replay.value is None


def test_a_header_without_a_value_names_no_target() -> None:
    assert replay_of(foreign(group=None, handler=None)).headers == [("idempotency-generation", b"1")]


def test_a_letter_names_its_record_where_there_is_one() -> None:
    assert record_key_of(foreign(record=b"idempotency:billing:charge:order_placed:id:1")).endswith(":id:1")
    for letter in (dead_letter_of(), foreign(record=b"\xff"), RECORD):
        with pytest.raises(ApplicationError, match="names no record"):
            record_key_of(letter)


def test_of_a_letter_that_was_copied_back_and_dead_lettered_again_the_last_word_counts() -> None:
    first = dead_letter_of()
    again = DeadLetter("malformed", "no JSON").headers(first, "shipping", "shipping-group")

    replay = replay_of(FakeRecord("orders.dlq.dlq", 0, 0, b"k", b"body", again))

    assert replay.topic == "orders.dlq"
    assert replay.headers == [("idempotency-generation", b"1"), ("idempotency-replay-group", b"shipping-group")]


@pytest.mark.parametrize(
    ("letter", "why"),
    [
        (RECORD, "no dead letter"),
        (FakeRecord("orders", 0, 0, None, b"body"), "no dead letter"),
        (foreign(topic=b"\xff"), "no dead letter"),
        (foreign(topic=None), "no dead letter"),
        (FakeRecord("orders", 0, 0, b"k", b"body", dead_letter_of().headers), "not a dead-letter topic"),
        (dead_letter_of(generation=999), "replayed 999 times"),
        (
            FakeRecord(
                "orders.dlq", 0, 1, None, None, [*dead_letter_of().headers, ("idempotency-dlq-dropped", b"value")]
            ),
            "not the whole message",
        ),
    ],
)
def test_what_cannot_be_replayed_says_why(letter: FakeRecord, why: str) -> None:
    with pytest.raises(ApplicationError, match=why):
        replay_of(letter)


def test_a_letter_whose_generation_is_no_number_cannot_be_counted_up() -> None:
    with pytest.raises(UndecodableEventError, match="no number from 0 to 999"):
        replay_of(foreign(generation=b"one"))
