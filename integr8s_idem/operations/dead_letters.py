"""A dead letter as operators see it: why and by whom it was dead-lettered, and its original message.  Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from integr8s_idem.errors import ApplicationError
from integr8s_idem.keys import MAX_KEY_LENGTH
from integr8s_idem.worker.dead_letters import dead_letter_fields
from integr8s_idem.worker.kafka_protocols import Partition, Record

_USAGE: Final = "write topic:partition:offset, as in order_placed.dlq:0:17"


class Place(NamedTuple):
    """The topic, partition and offset of a message."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"

    @property
    def at(self) -> Partition:
        """The partition that contains the message."""
        return Partition(self.topic, self.partition)

    @staticmethod
    def of(text: str) -> Place:
        """Parse `topic:partition:offset`; topic names cannot contain colons.

        Raises:
            ApplicationError: `text` has another form.
        """
        topic, *numbers = text.split(":")
        if not topic or len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
            raise ApplicationError(f'invalid place "{text}"; {_USAGE}')
        return Place(topic, int(numbers[0]), int(numbers[1]))


@dataclass(frozen=True, slots=True)
class StoredDeadLetter:
    """A message in a dead-letter topic.  Properties that its headers lack are empty or `None`."""

    record: Record
    fields: Mapping[str, bytes] = field(init=False, repr=False)
    """Headers of the service that dead-lettered the message last, without the prefix of their names."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", dead_letter_fields(self.record))

    @property
    def place(self) -> Place:
        return Place(self.record.topic, self.record.partition, self.record.offset)

    @property
    def origin(self) -> Place | None:
        """The place of the original message."""
        partition, offset = self._number("partition"), self._number("offset")
        if not self.topic or partition is None or offset is None:
            return None
        return Place(self.topic, partition, offset)

    @property
    def topic(self) -> str:
        """The original topic."""
        return self._text("topic")

    @property
    def service(self) -> str:
        return self._text("service")

    @property
    def group(self) -> str:
        """The consumer group that dead-lettered the message."""
        return self._text("group")

    @property
    def handler(self) -> str:
        return self._text("handler")

    @property
    def reason(self) -> str:
        """`handler_failed`, `malformed`, …; empty for a message that this library did not write."""
        return self._text("reason")

    @property
    def error_class(self) -> str:
        return self._text("error-class")

    @property
    def error(self) -> str:
        """The last error, on one line."""
        return self._text("error-message")

    @property
    def event_type(self) -> str:
        """The event type that the service decoded; for older dead letters, the message's own header."""
        return self._text("event-type") or _decoded(dict(self.record.headers).get("event_type"))

    @property
    def key(self) -> str:
        """The idempotency key in readable form."""
        return self._text("key")

    @property
    def record_key(self) -> str:
        """The full key of its first generation's record; empty if no guarded handler dead-lettered the message."""
        text = self._text("record")
        # The header is not trustworthy, since others may write to the topic: never query a store for an invalid key.
        return text if len(text) <= MAX_KEY_LENGTH and text.isascii() and text.isprintable() else ""

    @property
    def attempts(self) -> int | None:
        return self._number("attempts")

    @property
    def generation(self) -> int:
        """Number of replays before the message was dead-lettered."""
        return self._number("generation") or 0

    @property
    def at(self) -> datetime:
        """When it was dead-lettered, by the clock of the service or the broker, depending on the topic's settings."""
        return _moment(self.record.timestamp)

    @property
    def published_at(self) -> datetime | None:
        """When the original message was published."""
        milliseconds = self._number("timestamp")
        return None if milliseconds is None else _moment(milliseconds)

    @property
    def size(self) -> int:
        """Size of its payload in bytes."""
        return len(self.record.value or b"")

    def summary(self) -> dict[str, Any]:
        """Return everything but headers and payload, JSON-serializable; times are ISO 8601 in UTC."""
        return {
            "place": str(self.place),
            "at": format_time(self.at),
            "service": self.service,
            "group": self.group,
            "handler": self.handler,
            "reason": self.reason,
            "error_class": self.error_class,
            "error": self.error,
            "event_type": self.event_type,
            "key": self.key,
            "record": self.record_key,
            "attempts": self.attempts,
            "generation": self.generation,
            "origin": str(self.origin) if self.origin else "",
            "published_at": format_time(self.published_at) if self.published_at else "",
            "bytes": self.size,
        }

    def as_json(self) -> dict[str, Any]:
        """Return everything, JSON-serializable and lossless: text as text, other bytes in base64."""
        record = self.record
        message = {
            "timestamp": record.timestamp,
            "key": encode_bytes(record.key),
            "value": encode_bytes(record.value),
            "headers": [[name, encode_bytes(value)] for name, value in record.headers],
        }
        return {**self.summary(), "message": message}

    def _text(self, name: str) -> str:
        return _decoded(self.fields.get(name))

    def _number(self, name: str) -> int | None:
        # Bounded: the header may contain a number of any length.
        digits = self.fields.get(name) or b""
        return int(digits) if digits.isdigit() and len(digits) <= 19 else None


def encode_bytes(value: bytes | None) -> dict[str, str] | None:
    """Encode bytes for JSON without loss: `{"text": …}` if they are UTF-8, `{"base64": …}` otherwise."""
    if value is None:
        return None
    try:
        return {"text": value.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def format_time(moment: datetime) -> str:
    """Format a time as ISO 8601 in UTC, with milliseconds."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _decoded(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "backslashreplace")


def _moment(milliseconds: int) -> datetime:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):  # the producer may have set any timestamp
        return datetime.fromtimestamp(0, UTC)
