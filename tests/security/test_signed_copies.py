"""Signed copies in retry topics: who may write there, but has no secret, changes nothing that a handler gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final

import pytest

from integr8s_idem.worker.replay_signatures import event_hash
from integr8s_idem.worker.retry_copies import RetryCopy, UnverifiedCopyError, copy_of, origin_of
from tests.support.fake_consumer import FakeRecord
from tests.support.replays import SIGNED

Headers = Sequence[tuple[str, bytes]]

TOPIC: Final = "order_placed.billing.retry.10m"
SECRETS: Final = SIGNED.replay.keys
TRACE: Final = ("traceparent", b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-01")
ATTRIBUTES: Final[Headers] = [
    ("ce_specversion", b"1.0"),
    ("ce_id", b"e-1"),
    ("ce_type", b"order_placed"),
    ("ce_source", b"/shop"),
    ("ce_subject", b"order-1"),
    ("content-type", b"application/json"),
    TRACE,
]
BODY: Final = json.dumps({"order_id": "1"}).encode()


def signed() -> FakeRecord:
    source = FakeRecord("order_placed", 3, 41, b"order-1", BODY, list(ATTRIBUTES))
    copy = RetryCopy("billing", "charge", event_hash("e-1"), 0, 1, 0, origin_of(source))
    return FakeRecord(TOPIC, 0, 0, source.key, source.value, copy.headers(TOPIC, SECRETS))


def replaced(name: str, value: bytes) -> Callable[[Headers], Headers]:
    return lambda headers: [(each, value if each == name else old) for each, old in headers]


FORGERIES: Final[dict[str, Callable[[Headers], Headers]]] = {
    "another type": replaced("ce_type", b"order_refunded"),
    "another source": replaced("ce_source", b"/attacker"),
    "another field": replaced("ce_subject", b"order-2"),
    "another format": replaced("content-type", b"application/cloudevents+json"),
    "another trace": replaced("traceparent", b""),
    "a new attribute": lambda headers: [("ce_amount", b"0"), *headers],
    "a second value": lambda headers: [*headers[:7], ("ce_subject", b"order-2"), *headers[7:]],
    "a replay": lambda headers: [("idempotency-generation", b"9"), *headers],
    "one removed": lambda headers: [each for each in headers if each[0] != "ce_subject"],
    "another order": lambda headers: [headers[1], headers[0], *headers[2:]],
    "moved after those of the copy": lambda headers: [*headers[1:], headers[0]],
    "a name in two parts": lambda headers: [("ce_specversion1", b".0"), *headers[1:]],
}


def test_a_signed_copy_is_verified_with_its_headers() -> None:
    copy = copy_of(signed(), SECRETS)

    assert copy.origin.headers == list(ATTRIBUTES)


@pytest.mark.parametrize("forgery", FORGERIES)
def test_headers_of_a_signed_copy_cannot_be_changed(forgery: str) -> None:
    """With the format cloudevents, they contain fields of the event."""
    record = signed()
    headers = list(FORGERIES[forgery](record.headers))
    assert headers != list(record.headers)

    with pytest.raises(UnverifiedCopyError, match="signature is missing or invalid"):
        copy_of(FakeRecord(TOPIC, 0, 0, record.key, record.value, headers), SECRETS)


@pytest.mark.parametrize("key", [None, b"", b"order-2"])
def test_the_key_of_a_signed_copy_cannot_be_changed(key: bytes | None) -> None:
    """It decides which events wait for each other."""
    record = signed()

    with pytest.raises(UnverifiedCopyError, match="signature is missing or invalid"):
        copy_of(FakeRecord(TOPIC, 0, 0, key, record.value, record.headers), SECRETS)


@pytest.mark.parametrize("secrets", [SECRETS, ()])
def test_headers_after_those_of_the_copy_are_ignored(secrets: Sequence[bytes]) -> None:
    """Tracers that instrument the producer append headers, and so could anybody: the codec never gets these."""
    record = signed()
    appended = [*record.headers, TRACE, ("ce_subject", b"order-2")]

    copy = copy_of(FakeRecord(TOPIC, 0, 0, record.key, record.value, appended), secrets)

    assert copy.origin.headers == list(ATTRIBUTES)
