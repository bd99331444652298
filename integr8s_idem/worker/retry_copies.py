"""Copies of events in retry topics: the original message with headers that state whose retry it is.  No I/O."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from integr8s_idem.keys import LAST_GENERATION
from integr8s_idem.worker.dead_letters import RETRY_PREFIX, own_headers, without_added
from integr8s_idem.worker.kafka_protocols import Record
from integr8s_idem.worker.replay_signatures import copy_signature, event_hash

_SIGNATURE: Final = RETRY_PREFIX + "signature"
_NUMBERS: Final = ("generation", "attempt", "aborted", "partition", "offset", "timestamp")
_LARGEST: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Origin:
    """The message that was copied, as it was read from its topic."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]


class UnverifiedCopyError(Exception):
    """A message in a retry topic that no worker has copied there."""


@dataclass(frozen=True, slots=True)
class RetryCopy:
    """One handler's retry of one event."""

    group: str
    handler: str
    event: bytes
    """`event_hash` of the event's id."""
    generation: int
    attempt: int
    """Number of the attempt that has failed."""
    aborted: int
    """How many of the attempts do not count: the database rolled them back, or they were released unstarted."""
    origin: Origin

    def headers(self, topic: str, secrets: Sequence[bytes]) -> list[tuple[str, bytes]]:
        """Return the headers of the message in a retry topic, signed with the first of `secrets`, if there is one."""
        origin, fields = self.origin, self._fields()
        headers = [*origin.headers, *((RETRY_PREFIX + name, value) for name, value in fields.items())]
        if secrets:
            headers.append((_SIGNATURE, self.signature(topic, origin.headers, secrets[0])))
        return headers

    def signature(self, topic: str, headers: Iterable[tuple[str, bytes]], secret: bytes) -> bytes:
        """Return the signature of this copy in a retry topic.  `headers`: those of the original message."""
        origin, fields = self.origin, tuple(self._fields().values())
        return copy_signature(topic, fields, origin.key, origin.value, headers, secret)

    def _fields(self) -> dict[str, bytes]:
        origin = self.origin
        fields = {
            "group": self.group,
            "handler": self.handler,
            "event": self.event.decode(),
            "generation": str(self.generation),
            "attempt": str(self.attempt),
            "aborted": str(self.aborted),
            "topic": origin.topic,
            "partition": str(origin.partition),
            "offset": str(origin.offset),
            "timestamp": str(origin.timestamp),
        }
        return {name: text.encode("utf-8", "backslashreplace") for name, text in fields.items()}

    def check(self, event_id: str) -> None:
        """Check that it was made for the event with this id.

        Raises:
            UnverifiedCopyError: It was made for another one.
        """
        if self.event != event_hash(event_id):
            raise UnverifiedCopyError("it was made for another event")


def origin_of(record: Record) -> Origin:
    """Return the parts of a message that its copies keep."""
    return Origin(
        record.topic,
        record.partition,
        record.offset,
        record.timestamp,
        record.key,
        record.value,
        own_headers(record),
    )


def copy_of(record: Record, secrets: Iterable[bytes]) -> RetryCopy:
    """Return the copy that a message in a retry topic is.

    Raises:
        UnverifiedCopyError: Headers are missing or invalid; or there are `secrets`, and none of them has signed it.
    """
    found = {
        name.removeprefix(RETRY_PREFIX): value or b"" for name, value in record.headers if name.startswith(RETRY_PREFIX)
    }
    signature, own = found.pop("signature", b""), _headers_of_the_original(record)
    copy, known = _parsed(record, found, own), tuple(secrets)
    if known and not any(hmac.compare_digest(copy.signature(record.topic, own, secret), signature) for secret in known):
        raise UnverifiedCopyError("its signature is missing or invalid" if signature else "it is not signed")
    return copy


def _headers_of_the_original(record: Record) -> list[tuple[str, bytes]]:
    """Return the headers before those of the copy.

    Tracers that instrument the producer append headers to each message.  These are not signed, so only tracers read
    them.
    """
    return list(takewhile(lambda header: not header[0].startswith(RETRY_PREFIX), record.headers))


def _parsed(record: Record, found: Mapping[str, bytes], own: Iterable[tuple[str, bytes]]) -> RetryCopy:
    try:
        text = {name: value.decode() for name, value in found.items()}
        numbers = {name: int(text[name]) for name in _NUMBERS}
        if not all(text[name].isdigit() and number <= _LARGEST for name, number in numbers.items()):
            raise ValueError("a number is out of range")
        if numbers["generation"] > LAST_GENERATION:
            raise ValueError("the generation is out of range")
        origin = Origin(
            text["topic"],
            numbers["partition"],
            numbers["offset"],
            numbers["timestamp"],
            record.key,
            record.value,
            without_added(own),
        )
        return RetryCopy(
            text["group"],
            text["handler"],
            found["event"],
            numbers["generation"],
            numbers["attempt"],
            numbers["aborted"],
            origin,
        )
    except (KeyError, ValueError) as error:
        raise UnverifiedCopyError(f"its headers {RETRY_PREFIX}* are missing or invalid ({error})") from error
