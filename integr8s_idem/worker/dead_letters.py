"""Dead letters: the original message with headers that state why it failed, and their replay."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from integr8s_idem.config import KafkaSettings, ReplaySettings, Settings
from integr8s_idem.engine.error_text import describe_error
from integr8s_idem.errors import ApplicationError, UndecodableEventError
from integr8s_idem.keys import LAST_GENERATION
from integr8s_idem.worker.kafka_protocols import Record
from integr8s_idem.worker.replay_signatures import ReplayClaim, event_hash, signature_of

PREFIX: Final = "idempotency-dlq-"
"""Prefix of all headers that are added to a dead letter; the message's own headers are kept."""

DROPPED: Final = PREFIX + "dropped"
"""Header that names a part of the message that was dropped because the dead letter was too large; may be repeated."""

BODY_BYTES: Final = PREFIX + "body-bytes"
"""Header of a dead letter whose body was dropped: the body's length in bytes, in decimal."""

BODY_SHA256: Final = PREFIX + "body-sha256"
"""Header of a dead letter whose body was dropped: the body's SHA-256 hash, in hexadecimal."""

GENERATION: Final = "idempotency-generation"
"""Header of a replayed message: how many times it was replayed, in decimal.

Records of earlier generations, FAILED or COMPLETED, do not block it and are not changed.
"""

REPLAY_GROUP: Final = "idempotency-replay-group"
"""Header of a replay for one consumer group; other groups skip the message."""

REPLAY_HANDLER: Final = "idempotency-replay-handler"
"""Header of a replay for one handler of the group: the handler's name."""

REPLAY_EVENT: Final = "idempotency-replay-event"
"""Header of a signed replay: the hash of its event's id."""

REPLAY_SIGNATURE: Final = "idempotency-replay-signature"
"""Header of a signed replay.  Without it, `[replay] unsigned` decides whether the headers above are honored."""

RETRY_PREFIX: Final = "idempotency-retry-"
"""Prefix of all headers that are added to a copy in a retry topic; the message's own headers are kept."""

UNVERIFIED_COPY: Final = "unverified_copy"
"""Reason of the dead letter of a message in a retry topic that is not a valid copy.

Nothing tells which work it is for, nor that this work has failed: its replay is one more delivery of the event.
"""

_REPLAY: Final = frozenset({GENERATION, REPLAY_GROUP, REPLAY_HANDLER, REPLAY_EVENT, REPLAY_SIGNATURE})


def is_replay(record: Record) -> bool:
    """Whether `record` may be a replay; a fast check, since hardly any record is."""
    for name, _ in record.headers:  # noqa: SIM110  # a generator costs every delivery twice as much
        if name.startswith("idempotency-"):
            return True
    return False


def claim_of(record: Record) -> ReplayClaim | None:
    """Return what the replay headers of `record` claim, or `None` if it has none.  Empty headers count as absent.

    Raises:
        UndecodableEventError: The generation is not a number from 0 to 999.
    """
    generation, group, handler = (replay_header(record, name) for name in (GENERATION, REPLAY_GROUP, REPLAY_HANDLER))
    if not (generation or group or handler):
        return None
    return ReplayClaim(
        record.topic, group, handler, replay_header(record, REPLAY_EVENT), _number(generation) if generation else 0
    )


def replay_header(record: Record, header: str) -> bytes:
    """Return the value of the last header with this name, or empty bytes."""
    for name, value in reversed(record.headers):
        if name == header:
            return value or b""
    return b""


def own_headers(record: Record) -> list[tuple[str, bytes]]:
    """Return the headers of the original message, without those that dead letters, replays and retries add."""
    return without_added(record.headers)


def without_added(headers: Iterable[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Return the headers whose names are none of those that dead letters, replays and retries add."""
    return [(name, value) for name, value in headers if not _is_added(name)]


def _number(generation: bytes) -> int:
    text = generation[:20]
    if not (text.isdigit() and len(text) <= len(str(LAST_GENERATION))):
        raise UndecodableEventError(
            "invalid", f"header {GENERATION} is not a number from 0 to {LAST_GENERATION}: {text!r}"
        )
    return int(text)


class Replay(NamedTuple):
    """A message to replay: `await publisher.send(*replay)`."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


def replay_of(dead_letter: Record, settings: Settings | None = None, *, to: str | None = None) -> Replay:
    """Return the message that replays a dead letter to the handler that failed.

    It is the original message with replay headers: the next generation, and the consumer group and handler that
    failed.  Other services and handlers of the topic do not handle it again.  Replaying a dead letter twice yields the
    same generation, which is handled once.  That of an unverified copy is replayed in its first generation, so that
    only handlers that have not handled its event run.

    Args:
        dead_letter: A message of a dead-letter topic.
        settings: Settings of the services.  The first secret of `[replay]` signs the message; without a secret it is
            not signed.
        to: The topic to publish to; by default, the topic that the dead-letter topic belongs to.

    Raises:
        ApplicationError: The message is not a valid dead letter, a part of the original message was dropped, it was
            replayed too many times, or its topic is not a dead-letter topic.
        UndecodableEventError: Its generation is not a number.
    """
    kafka, replay = (settings.kafka, settings.replay) if settings else (KafkaSettings(), ReplaySettings())
    fields = dead_letter_fields(dead_letter)
    place = f"{dead_letter.topic}[{dead_letter.partition}]@{dead_letter.offset}"
    if not _text(fields.get("topic")):
        raise ApplicationError(f"{place} is not a dead letter: header {PREFIX}topic is missing")
    if "dropped" in fields:
        raise ApplicationError(
            f"the dead letter {place} does not contain the whole message, which was too large; publish the original "
            "message again"
        )
    # The generation that the service counted: any producer can set the message's own replay headers.
    generation = _number(fields.get("generation") or b"0") + (_text(fields.get("reason")) != UNVERIFIED_COPY)
    if generation > LAST_GENERATION:
        raise ApplicationError(f"the dead letter {place} was already replayed {LAST_GENERATION} times, the maximum")
    claim = ReplayClaim(
        to or _source_of(dead_letter, kafka.dead_letter_suffix),
        fields.get("group") or b"",
        fields.get("handler") or b"",
        fields.get("event-hash") or b"",
        generation,
    )
    own = own_headers(dead_letter)
    headers = [*own, *_headers_of(claim, dead_letter.value, own, replay.keys)]
    return Replay(claim.topic, dead_letter.key, dead_letter.value, headers)


def _source_of(dead_letter: Record, suffix: str) -> str:
    """Return the topic that the dead-letter topic belongs to; headers are not trusted, since any producer sets them."""
    source = dead_letter.topic.removesuffix(suffix)
    if source in ("", dead_letter.topic):
        raise ApplicationError(
            f"{dead_letter.topic} is not a dead-letter topic: its name does not end in {suffix} ([kafka] "
            "dead_letter_suffix). Name the topic to publish to: dlq replay --to TOPIC"
        )
    return source


def _headers_of(
    claim: ReplayClaim, value: bytes | None, own: Sequence[tuple[str, bytes]], secrets: Sequence[bytes]
) -> list[tuple[str, bytes]]:
    """Return the replay headers for `claim`, signed with the first of `secrets` if there is one."""
    named = [(GENERATION, b"%d" % claim.generation), (REPLAY_GROUP, claim.group), (REPLAY_HANDLER, claim.handler)]
    if secrets:
        signature = signature_of(claim, value, own, secrets[0])
        named += [(REPLAY_EVENT, claim.event), (REPLAY_SIGNATURE, signature)]
    return [(name, text) for name, text in named if text]


def record_key_of(dead_letter: Record) -> str:
    """Return the full key of a dead letter's record, to pass to `IdempotencyManager.history_of`.

    Raises:
        ApplicationError: The dead letter has no record: it did not come from a guarded handler.
    """
    key = _text(dead_letter_fields(dead_letter).get("record"))
    if not key:
        place = f"{dead_letter.topic}[{dead_letter.partition}]@{dead_letter.offset}"
        raise ApplicationError(f"{place} has no record: header {PREFIX}record is missing")
    return key


def _text(header: bytes | None) -> str:
    """Return the text of a header; empty if it is missing or not valid UTF-8."""
    try:
        return (header or b"").decode()
    except UnicodeDecodeError:
        return ""


def dead_letter_fields(record: Record) -> dict[str, bytes]:
    """Return the dead-letter headers, without their prefix.

    A dead letter that was copied to its topic unchanged and failed again has two sets of headers; the last one counts.
    """
    names = [name for name, _ in record.headers]
    if PREFIX + "reason" not in names:
        return {}
    begin = len(names) - 1 - names[::-1].index(PREFIX + "reason")
    return {name.removeprefix(PREFIX): value for name, value in record.headers[begin:] if name.startswith(PREFIX)}


def _is_added(name: str) -> bool:
    return name.startswith((PREFIX, RETRY_PREFIX)) or name in _REPLAY


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Why a message is dead-lettered.  Texts are bounded, in UTF-8, and contain no payload."""

    reason: str
    """Label of the metric, from a closed set: `handler_failed`, `malformed`, …"""
    error: BaseException | str
    handler: str = ""
    key: str = ""
    """The idempotency key in readable form."""
    record: str = ""
    """The full key of the record of the first generation, to pass to `IdempotencyManager.history_of`."""
    attempts: int = 0
    """Number of the last attempt; 0 if there was none.  After `CrashedTooOftenError` it is higher than the number of
    runs: the last reservation only recorded the failure."""
    generation: int = 0
    """How many times the message was replayed, according to its headers."""
    event_type: str = ""
    """Empty if it could not be read."""
    event_id: str = ""
    """Empty if it could not be read."""

    def log_fields(self) -> dict[str, object]:
        """Return the fields of log records about it."""
        return {
            "event_id": self.event_id,
            "event_type": self.event_type,
            "handler": self.handler,
            "attempt": self.attempts or None,
        }

    def headers(self, record: Record, service: str, group: str) -> list[tuple[str, bytes]]:
        """Return the message's own headers unchanged, followed by those of the dead letter."""
        error = self.error
        fields = {
            "reason": self.reason,
            "error-class": type(error).__name__ if isinstance(error, BaseException) else "",
            "error-message": describe_error(error) if isinstance(error, BaseException) else error,
            "service": service,
            "group": group,
            "handler": self.handler,
            "event-type": self.event_type,
            "event-hash": event_hash(self.event_id).decode() if self.event_id else "",
            "key": self.key,
            "record": self.record,
            "attempts": str(self.attempts) if self.attempts else "",
            "generation": str(self.generation),
            "topic": record.topic,
            "partition": str(record.partition),
            "offset": str(record.offset),
            "timestamp": str(record.timestamp),
            "failed-at": str(int(time.time() * 1000)),
        }
        added = [(PREFIX + name, text.encode("utf-8", "backslashreplace")) for name, text in fields.items() if text]
        return [*record.headers, *added]


class DeadLetterMessage:
    """A message for a dead-letter topic, which can be shortened if the broker refuses it as too large."""

    def __init__(self, dead_letter: DeadLetter, record: Record, service: str, group: str) -> None:
        self._original_headers = list(record.headers)
        self.key = record.key
        self.value = record.value
        self.headers = dead_letter.headers(record, service, group)

    def drop_part(self) -> bool:
        """Drop the body, the original headers or the key, and add a header that names it; `False` if none is left."""
        if self.value is not None:
            size, digest = str(len(self.value)).encode(), hashlib.sha256(self.value).hexdigest().encode()
            self.headers += [(DROPPED, b"value"), (BODY_BYTES, size), (BODY_SHA256, digest)]
            self.value = None
        elif self._original_headers:
            self.headers = [*self.headers[len(self._original_headers) :], (DROPPED, b"headers")]
            self._original_headers = []
        elif self.key is not None:
            self.headers.append((DROPPED, b"key"))
            self.key = None
        else:
            return False
        return True
