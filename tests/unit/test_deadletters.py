"""Dead letters: the message as it came, and why it is there."""

from __future__ import annotations

from integr8s_idem.worker.deadletters import DeadLetter
from tests.support.fake_consumer import FakeRecord

RECORD = FakeRecord("orders", 3, 42, b"k", b"body", [("event_id", b"\xff"), ("idempotency-dlq-reason", b"earlier")])


def test_the_messages_own_headers_come_first_byte_for_byte() -> None:
    headers = DeadLetter("malformed", "no JSON").headers(RECORD, "billing", "billing-group")

    assert headers[:2] == list(RECORD.headers)


def test_our_headers_say_why_where_from_and_when() -> None:
    letter = DeadLetter("handler_failed", ValueError("no\nsuch  card"), "charge", "order_placed:1", 5)

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
