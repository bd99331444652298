"""The messages that a version writes to Kafka: events, dead letters, replays, and copies in retry topics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

from integr8s_idem.config import KafkaSettings
from integr8s_idem.errors import PermanentError
from integr8s_idem.events import BaseEvent, EventMetadata
from integr8s_idem.handlers.outgoing import Outgoing
from integr8s_idem.worker.dead_letters import PREFIX as DLQ
from integr8s_idem.worker.dead_letters import DeadLetter, DeadLetterMessage, replay_of
from integr8s_idem.worker.publisher import EventPublisher
from integr8s_idem.worker.replay_signatures import event_hash
from integr8s_idem.worker.retry_copies import RetryCopy, copy_of, origin_of
from tests.support.fake_consumer import FakeRecord
from tests.support.replays import SIGNED

SERVICE: Final = "billing"
GROUP: Final = "billing-höst"
HANDLER: Final = "charge"
TOPIC: Final = "golden.golden_placed"
RETRY_TOPIC: Final = f"{TOPIC}.billing.retry.10m"

FAILED_AT: Final = f"{DLQ}failed-at"
"""The header with the time of a failure, the only one that differs between two runs."""


class Placed(BaseEvent):
    event_type: Literal["golden_placed"] = "golden_placed"
    order_id: str
    note: str | None = None


class Shipped(BaseEvent):
    event_type: Literal["golden_shipped"] = "golden_shipped"
    parcels: tuple[int, ...] = ()


EVENTS: Final = {
    "event": Placed(
        event_id="e-1",
        timestamp=datetime(2026, 1, 1, tzinfo=UTC),
        aggregate_id="höst:7",
        metadata=EventMetadata(service_name="shop", correlation_id="c-1", user_id="u-1"),
        order_id="7",
        note="Zoë \N{SNOWMAN}",
    ),
    "event without key and correlation": Placed(
        event_id="e-2", timestamp=datetime(2026, 1, 1, 12, 30, 0, 500_000, tzinfo=UTC), order_id="8"
    ),
}

ERROR: Final = PermanentError("no such account: Zoë \N{SNOWMAN}")
RECORD: Final = "idempotency:billing:charge:golden_placed:id:e-1"


def messages() -> dict[str, dict[str, Any]]:
    """Return each message with its topic, key, body and headers, as JSON."""
    publisher = EventPublisher(KafkaSettings(topic_prefix="golden."))
    found: dict[str, Any] = {name: publisher.message(event) for name, event in EVENTS.items()}
    found |= dict(_published_by_a_handler(publisher))
    found |= dict(_dead_letters(found["event"]))
    found |= dict(_replays(found))
    found |= dict(_copies(found["event"]))
    return {name: _described(message) for name, message in found.items()}


def _published_by_a_handler(publisher: EventPublisher) -> Iterator[tuple[str, Any]]:
    outgoing, timestamp = Outgoing(), datetime(2026, 1, 2, tzinfo=UTC)
    outgoing.publish(Shipped(timestamp=timestamp, aggregate_id="7", parcels=(1, 2)))
    outgoing.publish(Shipped(timestamp=timestamp))
    for event in outgoing.finished(EVENTS["event"], RECORD, SERVICE):
        yield f"published event with {len(getattr(event, 'parcels'))} parcels", publisher.message(event)  # noqa: B009  # its class


def _dead_letters(event: Any) -> Iterator[tuple[str, Any]]:
    source = FakeRecord(TOPIC, 3, 41, event.key, event.value, event.headers)
    failed = DeadLetter(
        "handler_failed", ERROR, HANDLER, "golden_placed:e-1", RECORD, 5, event_type="golden_placed", event_id="e-1"
    )
    unreadable = FakeRecord(TOPIC, 3, 42, None, b"{", [("event_id", b"\xff"), ("own", b"")])
    yield "dead letter", _dead_letter(failed, source)
    yield "dead letter of an unreadable message", _dead_letter(DeadLetter("malformed", "not JSON"), unreadable)
    replayed = FakeRecord(TOPIC, 3, 43, event.key, event.value, [*event.headers, ("idempotency-generation", b"1")])
    second = DeadLetter("handler_failed", ERROR, HANDLER, "golden_placed:e-1;1", RECORD, 1, 1, "golden_placed", "e-1")
    yield "dead letter of a replay", _dead_letter(second, replayed)
    for parts, name in enumerate(("body", "body and headers", "body, headers and key"), start=1):
        yield f"dead letter without {name}", _dead_letter(failed, source, drops=parts)


def _dead_letter(dead_letter: DeadLetter, source: FakeRecord, *, drops: int = 0) -> FakeRecord:
    message = DeadLetterMessage(dead_letter, source, SERVICE, GROUP)
    for _ in range(drops):
        assert message.drop_part()
    headers = [(name, b"1893456000000" if name == FAILED_AT else value) for name, value in message.headers]
    return FakeRecord(f"{TOPIC}.dlq", 0, 0, message.key, message.value, headers)


def _replays(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in ("dead letter", "dead letter of a replay", "dead letter of an unreadable message"):
        yield f"replay of a {name}", replay_of(found[name])
        yield f"signed replay of a {name}", replay_of(found[name], SIGNED)


def _copies(event: Any) -> Iterator[tuple[str, Any]]:
    tracing = [("traceparent", b"00-" + b"ab" * 16 + b"-" + b"cd" * 8 + b"-01"), ("own", b"")]
    source = FakeRecord(TOPIC, 3, 41, event.key, event.value, [*event.headers, *tracing])
    signed = _copy(source, attempt=1, secrets=SIGNED.replay.keys)
    yield "copy", _copy(source, attempt=1)
    yield "signed copy", signed
    # Copied once more, to the same topic, since it was not due.
    again = copy_of(signed, SIGNED.replay.keys).headers(RETRY_TOPIC, SIGNED.replay.keys)
    yield "signed copy of a copy", FakeRecord(RETRY_TOPIC, 0, 0, signed.key, signed.value, again)
    unread = FakeRecord(TOPIC, 3, 42, None, None, [])
    yield "signed copy without key, body and headers", _copy(unread, attempt=12, secrets=SIGNED.replay.keys)


def _copy(source: FakeRecord, *, attempt: int, secrets: Sequence[bytes] = ()) -> FakeRecord:
    copy = RetryCopy(GROUP, HANDLER, event_hash("e-1"), 2, attempt, 1, origin_of(source))
    return FakeRecord(RETRY_TOPIC, 0, 0, source.key, source.value, copy.headers(RETRY_TOPIC, secrets))


def _described(message: Any) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "key": _text(message.key),
        "value": _text(message.value),
        "headers": [[name, _text(value)] for name, value in message.headers],
    }


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "surrogateescape")


def record_of(described: dict[str, Any]) -> FakeRecord:
    """Return a message of a file as a consumer gets it."""
    headers = [(name, _bytes(value) or b"") for name, value in described["headers"]]
    return FakeRecord(described["topic"], 0, 0, _bytes(described["key"]), _bytes(described["value"]), headers)


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode("utf-8", "surrogateescape")
