"""Any message decodes to an event or is rejected with a known reason, in bounded time, and equally by all readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, Literal

from pydantic import Field

from integr8s_idem.engine.error_text import LONGEST_ERROR
from integr8s_idem.errors import InvalidKeyError, UndecodableEventError
from integr8s_idem.events import BaseEvent, EventDecoder, _read_carefully, encode_event, event_headers, read_json
from integr8s_idem.keys import MAX_KEY_LENGTH, KeySpace
from integr8s_idem.keys.event_keys import KeyResolver, KeyStrategy
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver
from integr8s_idem.worker.dead_letters import DeadLetter, claim_of
from tests.campaigns.figures import Figures
from tests.fuzz.claims import must
from tests.fuzz.mutators import TEXTS, damaged, document, text, value
from tests.support.fake_consumer import FakeRecord


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str
    amount: float = 0.0
    lines: list[dict[str, Any]] = Field(default_factory=list)
    extra: Any = None


DECODER = EventDecoder([OrderPlaced])
REASONS = frozenset({"empty", "malformed", "missing_id", "unknown_type", "unsupported_version", "invalid"})
_SPACE = KeySpace("idempotency", "billing")
_RESOLVERS = (
    KeyResolver(),
    KeyResolver(KeyStrategy.CONTENT_HASH),
    KeyResolver(KeyStrategy.CONTENT_HASH, frozenset({"order_id"})),
    KeyResolver(KeyStrategy.CUSTOM, custom=lambda event: getattr(event, "order_id", "")),
)
_HEADERS = ("idempotency-generation", "traceparent", "tracestate", "event_id", "event_type", "", "é", "x" * 300)
_OBSERVER = OpenTelemetryObserver("billing")


def message(random: Random) -> bytes:
    """Return the body of an event, valid or damaged."""
    table: dict[str, Any] = {
        "event_id": f"0192-{random.randrange(10**6)}",
        "event_type": "order_placed",
        "event_version": "1.0",
        "timestamp": "2030-01-01T00:00:00Z",
        "aggregate_id": None,
        "metadata": {"service_name": "shop", "user_id": "7"},
        "order_id": random.choice(TEXTS),
        "amount": random.random(),
        "lines": [{"sku": str(number), "n": number} for number in range(random.randint(0, 3))],
        "extra": value(random),
    }
    raw = document(random, table)
    return damaged(random, raw) if random.random() < 0.3 else raw


def decoded(random: Random) -> Figures:
    """Decode a message, derive keys and encode it again."""
    raw = message(random)
    must(_outcome(read_json, raw) == _outcome(_read_carefully, raw), raw)
    try:
        event = DECODER.decode(raw)
    except UndecodableEventError as error:
        must(error.reason in REASONS and len(str(error)) < 1_000, error)
        return Figures({f"refused_{error.reason}": 1})
    assert isinstance(event, OrderPlaced)
    first, last = (json.loads(raw, object_pairs_hook=hook) for hook in (_first_wins, dict))
    assert first["event_id"] == last["event_id"] == event.event_id, "two readers see different ids"
    assert repr(first) == repr(last), "two readers see different events"
    again = DECODER.decode(encode_event(event))
    assert again == event
    assert all(isinstance(value, bytes) for _, value in event_headers(event))
    for resolver in _RESOLVERS:
        _keyed(resolver, event, again)
    return Figures(accepted=1)


def _outcome(read: Callable[[bytes], object], raw: bytes) -> str:
    try:
        return repr(read(raw))
    except UndecodableEventError as error:
        return f"{error.reason}: {error.detail}"


def _keyed(resolver: KeyResolver, event: BaseEvent, again: BaseEvent) -> None:
    try:
        keyed = resolver.resolve("charge", event)
    except InvalidKeyError as error:
        must(len(str(error)) < 1_000, error)
        return
    full = _SPACE.full(keyed.key)
    assert full.isascii(), full
    assert full.isprintable(), full
    assert len(full) <= MAX_KEY_LENGTH, full
    assert resolver.resolve("charge", again) == keyed, "the key of an event changes when it is encoded and decoded"


def _first_wins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(reversed(pairs)) if len({name for name, _ in pairs}) < len(pairs) else dict(pairs)


def with_headers(random: Random) -> Figures:
    """Read arbitrary headers: the generation or its rejection, the parent span, and their copies in the dead letter."""
    headers: Any = [
        (random.choice(_HEADERS), random.choice((None, b"", b"1", b"\xff", text(random).encode("utf-8", "replace"))))
        for _ in range(random.choice((0, 1, 3, 3, 200)))
    ]
    record = FakeRecord("orders", 0, 0, None, b"x", headers)
    try:
        claim = claim_of(record)
        assert claim is None or 0 <= claim.generation <= 999
    except UndecodableEventError as error:
        must(error.reason == "invalid" and len(str(error)) < 500, error)
    with _OBSERVER.processing(record, "order_placed", "event-1"):
        pass
    written = DeadLetter("malformed", ValueError(text(random, 20))).headers(record, "billing", "billing")
    assert written[: len(headers)] == headers
    # An escaped surrogate takes six bytes.
    assert all(len(value) <= 6 * LONGEST_ERROR for _, value in written[len(headers) :])
    return Figures(headers=1)
