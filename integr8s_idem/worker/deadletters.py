"""Dead letters: the message as it came, with headers that say why it is there; and the way back."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Final, NamedTuple

from integr8s_idem.errors import ApplicationError, UndecodableEventError
from integr8s_idem.keys import LAST_GENERATION
from integr8s_idem.ledger import describe_error
from integr8s_idem.worker.records import Record

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


def is_replay(record: Record) -> bool:
    """Whether `record` may be one that was published again on purpose; hardly any is, and that is seen at once."""
    return any(name.startswith("idempotency-") for name, _ in record.headers)


def generation_of(record: Record) -> int:
    """How often `record` was replayed on purpose; 0 for all that come by themselves.

    Raises:
        UndecodableEventError: The header holds no number from 0 to 999.
    """
    told = _last(record, GENERATION)
    if told is None:
        return 0
    text = told[:20]
    if not (text.isdigit() and len(text) <= len(str(LAST_GENERATION))):
        raise UndecodableEventError(
            "invalid", f"header {GENERATION} holds no number from 0 to {LAST_GENERATION}: {text!r}"
        )
    return int(text)


def is_meant_for(group: str, record: Record) -> bool:
    """Whether `group` is to handle `record`: always, unless it is a replay for another one."""
    told = _last(record, REPLAY_GROUP)
    return told is None or told == group.encode("utf-8", "backslashreplace")


def handler_meant(record: Record) -> str | None:
    """The name of the only handler that `record` is for; `None` for all of them."""
    told = _last(record, REPLAY_HANDLER)
    return None if told is None else told.decode("utf-8", "backslashreplace")


class Replay(NamedTuple):
    """A message to be published again; `await publisher.send(*replay)` does it."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


def replay_of(letter: Record) -> Replay:
    """The message of a dead letter, to be handled anew by the handler that had given it up.

    It is as it came, but for its generation, one higher than the one that failed, and for the group and
    the handler it is meant for.  So other services and handlers of its topic, which have handled it, do
    not do it again; and one letter replayed twice is one generation, which is handled once.

    Raises:
        ApplicationError: It is no dead letter, or one with headers that are not ours; a part of it did not fit
            into the letter; or it was replayed as often as can be counted.
        UndecodableEventError: Its generation is no number.
    """
    told = told_by_us(letter)
    place = f"{letter.topic}[{letter.partition}]@{letter.offset}"
    topic = _text(told.get("topic"))
    if not topic:
        raise ApplicationError(f"{place} is no dead letter: it has no header {PREFIX}topic")
    if "dropped" in told:
        raise ApplicationError(
            f"the dead letter {place} is not the whole message, which was too large; publish that anew"
        )
    generation = generation_of(letter) + 1
    if generation > LAST_GENERATION:
        raise ApplicationError(f"the dead letter {place} was replayed {LAST_GENERATION} times, the most there can be")
    headers = [(name, value) for name, value in letter.headers if not _is_ours(name)]
    headers.append((GENERATION, str(generation).encode()))
    for header, target in ((REPLAY_GROUP, told.get("group")), (REPLAY_HANDLER, told.get("handler"))):
        if target:
            headers.append((header, target))
    return Replay(topic, letter.key, letter.value, headers)


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
    return name.startswith(PREFIX) or name in (GENERATION, REPLAY_GROUP, REPLAY_HANDLER)


def _last(record: Record, header: str) -> bytes | None:
    """The header that counts, if one name stands there several times; a null value counts as empty."""
    for name, value in reversed(record.headers):
        if name == header:
            return value or b""
    return None


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


class Parcel:
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
