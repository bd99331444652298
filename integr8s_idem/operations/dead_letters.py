"""One dead letter as operators see it: why it is there, whose it is, where it came from.  Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from integr8s_idem.errors import ApplicationError
from integr8s_idem.keys import MAX_KEY_LENGTH
from integr8s_idem.worker.dead_letters import told_by_us
from integr8s_idem.worker.kafka_protocols import Partition, Record

_USAGE: Final = "write topic:partition:offset, as in order_placed.dlq:0:17"


class Place(NamedTuple):
    """Where one message stands."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"

    @property
    def at(self) -> Partition:
        """The partition that holds it."""
        return Partition(self.topic, self.partition)

    @staticmethod
    def of(text: str) -> Place:
        """`topic:partition:offset`; no topic's name holds a colon.

        Raises:
            ApplicationError: It is none.
        """
        topic, *numbers = text.split(":")
        if not topic or len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
            raise ApplicationError(f'"{text}" is no place of a letter; {_USAGE}')
        return Place(topic, int(numbers[0]), int(numbers[1]))


@dataclass(frozen=True, slots=True)
class Letter:
    """A message of a dead-letter topic.  What its headers do not say is empty, or `None`."""

    record: Record
    told: Mapping[str, bytes] = field(init=False, repr=False)
    """What whoever gave it up last has written, without the prefix of the headers' names."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "told", told_by_us(self.record))

    @property
    def place(self) -> Place:
        return Place(self.record.topic, self.record.partition, self.record.offset)

    @property
    def origin(self) -> Place | None:
        """Where the message stood that was given up."""
        partition, offset = self._number("partition"), self._number("offset")
        if not self.topic or partition is None or offset is None:
            return None
        return Place(self.topic, partition, offset)

    @property
    def topic(self) -> str:
        """The topic it came from."""
        return self._text("topic")

    @property
    def service(self) -> str:
        return self._text("service")

    @property
    def group(self) -> str:
        """The consumer group that gave it up."""
        return self._text("group")

    @property
    def handler(self) -> str:
        return self._text("handler")

    @property
    def reason(self) -> str:
        """`handler_failed`, `malformed`, …; empty for a message that no service of ours gave up."""
        return self._text("reason")

    @property
    def error_class(self) -> str:
        return self._text("error-class")

    @property
    def error(self) -> str:
        """The last error, in one line."""
        return self._text("error-message")

    @property
    def event_type(self) -> str:
        """As the service read it; before that was written into letters, as the message says itself."""
        return self._text("event-type") or _decoded(dict(self.record.headers).get("event_type"))

    @property
    def key(self) -> str:
        """The idempotency key as people read it."""
        return self._text("key")

    @property
    def record_key(self) -> str:
        """The full key of its record, in the first generation; empty where no guarded handler gave it up."""
        text = self._text("record")
        # Whoever may write to the topic may have written this: no store is asked for what is no key.
        return text if len(text) <= MAX_KEY_LENGTH and text.isascii() and text.isprintable() else ""

    @property
    def attempts(self) -> int | None:
        return self._number("attempts")

    @property
    def generation(self) -> int:
        """How often it had been replayed when it was given up."""
        return self._number("generation") or 0

    @property
    def at(self) -> datetime:
        """When it was dead-lettered, by the clock of the service or the broker, as the topic is set."""
        return _moment(self.record.timestamp)

    @property
    def published_at(self) -> datetime | None:
        """When the message that was given up had been published."""
        milliseconds = self._number("timestamp")
        return None if milliseconds is None else _moment(milliseconds)

    @property
    def size(self) -> int:
        """Bytes of its payload."""
        return len(self.record.value or b"")

    def summary(self) -> dict[str, Any]:
        """All but headers and payload, fit for JSON; times are ISO 8601, in UTC."""
        return {
            "place": str(self.place),
            "at": written(self.at),
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
            "published_at": written(self.published_at) if self.published_at else "",
            "bytes": self.size,
        }

    def whole(self) -> dict[str, Any]:
        """All of it, fit for JSON, byte for byte: what was text as text, anything else in base64."""
        record = self.record
        message = {
            "timestamp": record.timestamp,
            "key": encoded(record.key),
            "value": encoded(record.value),
            "headers": [[name, encoded(value)] for name, value in record.headers],
        }
        return {**self.summary(), "message": message}

    def _text(self, name: str) -> str:
        return _decoded(self.told.get(name))

    def _number(self, name: str) -> int | None:
        # Bounded: whoever may write to the topic can write a number of any length.
        told = self.told.get(name) or b""
        return int(told) if told.isdigit() and len(told) <= 19 else None


def encoded(value: bytes | None) -> dict[str, str] | None:
    """Bytes in JSON, losslessly: `{"text": …}` where they are UTF-8, `{"base64": …}` where not."""
    if value is None:
        return None
    try:
        return {"text": value.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def written(moment: datetime) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _decoded(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "backslashreplace")


def _moment(milliseconds: int) -> datetime:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):  # what a message says of its time is its producer's word
        return datetime.fromtimestamp(0, UTC)
