"""Dead letters: the message as it came, with headers that say why it is there; and the way back."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from integr8s_idem.config import KafkaSettings, ReplaySettings, Settings
from integr8s_idem.engine.store_client import describe_error
from integr8s_idem.errors import ApplicationError, UndecodableEventError
from integr8s_idem.keys import LAST_GENERATION
from integr8s_idem.worker.kafka_protocols import Record
from integr8s_idem.worker.replay_signatures import ReplayClaim, event_hash, signature_of

PREFIX: Final = "idempotency-dlq-"
"""What all our headers start with; those of the message stay as they are."""

DROPPED: Final = PREFIX + "dropped"
"""Header of a letter that would have been too large: which part of the message it lacks, once for each."""

BODY_BYTES: Final = PREFIX + "body-bytes"
"""Header of a letter without its body: how long that was, as a decimal number."""

BODY_SHA256: Final = PREFIX + "body-sha256"
"""Header of a letter without its body: what it hashes to, in hexadecimal."""

GENERATION: Final = "idempotency-generation"
"""Header of a message that is to be handled anew on purpose: how often it was, as a decimal number.

A record of an earlier generation, FAILED or COMPLETED, does not block it and stays as it is.
"""

REPLAY_GROUP: Final = "idempotency-replay-group"
"""Header of a message that is meant for one consumer group: all others have handled it, and pass it by."""

REPLAY_HANDLER: Final = "idempotency-replay-handler"
"""Header of a message that is meant for one handler of its group, by the handler's name."""

REPLAY_EVENT: Final = "idempotency-replay-event"
"""Header of a signed replay: the hash of the id of its event."""

REPLAY_SIGNATURE: Final = "idempotency-replay-signature"
"""Header of a signed replay.  The headers above are believed with it, and otherwise as `[replay] unsigned` says."""

_REPLAY: Final = frozenset({GENERATION, REPLAY_GROUP, REPLAY_HANDLER, REPLAY_EVENT, REPLAY_SIGNATURE})


def is_replay(record: Record) -> bool:
    """Whether `record` may be one that was published again on purpose; hardly any is, and that is seen at once."""
    for name, _ in record.headers:  # noqa: SIM110  # a generator costs every delivery twice as much
        if name.startswith("idempotency-"):
            return True
    return False


def claim_of(record: Record) -> ReplayClaim | None:
    """What the replay headers of `record` ask for; `None` if it has none.  An empty one counts as absent.

    Raises:
        UndecodableEventError: The generation is no number from 0 to 999.
    """
    generation, group, handler = (replay_header(record, name) for name in (GENERATION, REPLAY_GROUP, REPLAY_HANDLER))
    if not (generation or group or handler):
        return None
    return ReplayClaim(
        record.topic, group, handler, replay_header(record, REPLAY_EVENT), _number(generation) if generation else 0
    )


def replay_header(record: Record, header: str) -> bytes:
    """What the last header of this name says; empty if there is none, or one without a value."""
    for name, value in reversed(record.headers):
        if name == header:
            return value or b""
    return b""


def own_headers(record: Record) -> list[tuple[str, bytes]]:
    """The headers of the message itself, without those that dead letters and replays add."""
    return [(name, value) for name, value in record.headers if not _is_ours(name)]


def _number(generation: bytes) -> int:
    text = generation[:20]
    if not (text.isdigit() and len(text) <= len(str(LAST_GENERATION))):
        raise UndecodableEventError(
            "invalid", f"header {GENERATION} holds no number from 0 to {LAST_GENERATION}: {text!r}"
        )
    return int(text)


class Replay(NamedTuple):
    """A message to be published again; `await publisher.send(*replay)` does it."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


def replay_of(letter: Record, settings: Settings | None = None, *, to: str | None = None) -> Replay:
    """The message of a dead letter, to be handled anew by the handler that had given it up.

    It is as it came, but for its generation, one higher than the one that failed, and for the group and
    the handler it is meant for.  So other services and handlers of its topic, which have handled it, do
    not do it again; and one letter replayed twice is one generation, which is handled once.

    Args:
        letter: A message of a dead-letter topic.
        settings: Of the services.  The first secret of `[replay]` signs the message; without one it is not signed.
        to: The topic to publish to, if it is not the one whose dead letters are in the topic of `letter`.

    Raises:
        ApplicationError: It is no dead letter, or one with headers that are not ours; a part of it did not fit
            into the letter; it was replayed as often as can be counted; or its topic is no dead-letter topic.
        UndecodableEventError: Its generation is no number.
    """
    kafka, replay = (settings.kafka, settings.replay) if settings else (KafkaSettings(), ReplaySettings())
    told = told_by_us(letter)
    place = f"{letter.topic}[{letter.partition}]@{letter.offset}"
    if not _text(told.get("topic")):
        raise ApplicationError(f"{place} is no dead letter: it has no header {PREFIX}topic")
    if "dropped" in told:
        raise ApplicationError(
            f"the dead letter {place} is not the whole message, which was too large; publish that anew"
        )
    # As the service counted: what the message says of itself may be anybody's word.
    generation = _number(told.get("generation") or b"0") + 1
    if generation > LAST_GENERATION:
        raise ApplicationError(f"the dead letter {place} was replayed {LAST_GENERATION} times, the most there can be")
    claim = ReplayClaim(
        to or _source_of(letter, kafka.dead_letter_suffix),
        told.get("group") or b"",
        told.get("handler") or b"",
        told.get("event-hash") or b"",
        generation,
    )
    own = own_headers(letter)
    headers = [*own, *_headers_of(claim, letter.value, own, replay.keys)]
    return Replay(claim.topic, letter.key, letter.value, headers)


def _source_of(letter: Record, suffix: str) -> str:
    """The topic whose dead letters are in the topic of `letter`: its headers are anybody's word."""
    source = letter.topic.removesuffix(suffix)
    if source in ("", letter.topic):
        raise ApplicationError(
            f"{letter.topic} is not a dead-letter topic: its name does not end in {suffix} ([kafka] "
            "dead_letter_suffix). Name the topic to publish to: dlq replay --to TOPIC"
        )
    return source


def _headers_of(
    claim: ReplayClaim, value: bytes | None, own: Sequence[tuple[str, bytes]], secrets: Sequence[bytes]
) -> list[tuple[str, bytes]]:
    """The replay headers that make `claim`, signed with the first of `secrets` if there is one."""
    named = [(GENERATION, b"%d" % claim.generation), (REPLAY_GROUP, claim.group), (REPLAY_HANDLER, claim.handler)]
    if secrets:
        signature = signature_of(claim, value, own, secrets[0])
        named += [(REPLAY_EVENT, claim.event), (REPLAY_SIGNATURE, signature)]
    return [(name, text) for name, text in named if text]


def record_key_of(letter: Record) -> str:
    """The full key of the record of a dead letter: `IdempotencyManager.history_of` reads what became of it.

    Raises:
        ApplicationError: It names none: no guarded handler gave it up.
    """
    key = _text(told_by_us(letter).get("record"))
    if not key:
        place = f"{letter.topic}[{letter.partition}]@{letter.offset}"
        raise ApplicationError(f"{place} names no record: it has no header {PREFIX}record")
    return key


def _text(header: bytes | None) -> str:
    """What a header says; nothing if it is none that we wrote."""
    try:
        return (header or b"").decode()
    except UnicodeDecodeError:
        return ""


def told_by_us(letter: Record) -> dict[str, bytes]:
    """What the last to dead-letter it said: a letter that was copied back as it is has headers of two."""
    names = [name for name, _ in letter.headers]
    if PREFIX + "reason" not in names:
        return {}
    begin = len(names) - 1 - names[::-1].index(PREFIX + "reason")
    return {name.removeprefix(PREFIX): value for name, value in letter.headers[begin:] if name.startswith(PREFIX)}


def _is_ours(name: str) -> bool:
    return name.startswith(PREFIX) or name in _REPLAY


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Why a message is given up.  Texts are UTF-8, bounded; no payload beyond the message itself."""

    reason: str
    """One of a closed set, fit for a metric label: `handler_failed`, `malformed`, …"""
    error: BaseException | str
    handler: str = ""
    key: str = ""
    """The idempotency key as people read it."""
    record: str = ""
    """The full key of the record, in the first generation: `IdempotencyManager.history_of` takes it."""
    attempts: int = 0
    """Reservations of its key, as in its record; 0 if there was none.  After `CrashedTooOftenError` there was at least
    one more than runs: the last one was made to give the event up."""
    generation: int = 0
    """How often the message was replayed on purpose, as far as it says so."""
    event_type: str = ""
    """Empty where none could be read."""
    event_id: str = ""
    """The same."""

    def headers(self, record: Record, service: str, group: str) -> list[tuple[str, bytes]]:
        """The message's own headers, byte for byte, and ours behind them."""
        error = self.error
        told = {
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
        ours = [(PREFIX + name, text.encode("utf-8", "backslashreplace")) for name, text in told.items() if text]
        return [*record.headers, *ours]


class DeadLetterMessage:
    """A dead letter on its way to its topic, which may not take all of it."""

    def __init__(self, letter: DeadLetter, record: Record, service: str, group: str) -> None:
        self._theirs = list(record.headers)
        self.key = record.key
        self.value = record.value
        self.headers = letter.headers(record, service, group)

    def shed(self) -> bool:
        """Leave behind one part of the message, the largest as a rule, and say so.  `False`: nothing is left of it."""
        if self.value is not None:
            size, digest = str(len(self.value)).encode(), hashlib.sha256(self.value).hexdigest().encode()
            self.headers += [(DROPPED, b"value"), (BODY_BYTES, size), (BODY_SHA256, digest)]
            self.value = None
        elif self._theirs:
            self.headers = [*self.headers[len(self._theirs) :], (DROPPED, b"headers")]
            self._theirs = []
        elif self.key is not None:
            self.headers.append((DROPPED, b"key"))
            self.key = None
        else:
            return False
        return True
