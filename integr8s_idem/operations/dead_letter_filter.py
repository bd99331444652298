"""Which dead letters are meant: by service, error, time and so on.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, Final

from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.dead_letters import Letter, written

_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGE: Final = re.compile(r"(\d{1,6})([smhdw])")


def moment(text: str, now: datetime) -> datetime:
    """A time as people write it: an age, as in `2h`, or ISO 8601, in UTC if it names no zone.

    Raises:
        ApplicationError: It is neither.
    """
    age = _AGE.fullmatch(text.strip())
    try:
        if age is not None:
            return now - timedelta(**{_UNITS[age[2]]: int(age[1])})
        told = datetime.fromisoformat(text.strip())
        return (told if told.tzinfo is not None else told.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ApplicationError(
            f'"{text}" is no time; write an age, as in 30m, 2h or 7d, or ISO 8601, as in 2026-05-01T12:00'
        ) from None


@dataclass(frozen=True, slots=True)
class Choice:
    """Letters that fit all of it; within one part any will do.  Patterns know `*` and `?`."""

    services: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    """The class of the error, or a part of its text, in either case."""
    event_types: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    """The idempotency key, that of its record, or Kafka's."""
    since: datetime | None = None
    """When they were dead-lettered, at the earliest."""
    until: datetime | None = None
    """When they were dead-lettered, and not at or after this."""

    def takes(self, letter: Letter) -> bool:
        """Whether `letter` is meant."""
        return (
            (self.since is None or letter.at >= self.since)
            and (self.until is None or letter.at < self.until)
            and _fits(self.services, (letter.service,))
            and _fits(self.reasons, (letter.reason,))
            and _fits(self.event_types, (letter.event_type,))
            and (not self.errors or any(_is_about(wanted, letter) for wanted in self.errors))
            and (not self.keys or _fits(self.keys, (letter.key, letter.record_key, _kafka_key(letter))))
        )

    def as_json(self) -> dict[str, Any]:
        """What is asked for, and nothing else."""
        asked: dict[str, Any] = {
            "service": self.services,
            "reason": self.reasons,
            "error": self.errors,
            "event_type": self.event_types,
            "key": self.keys,
            "since": written(self.since) if self.since else "",
            "until": written(self.until) if self.until else "",
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asked.items() if value}


def _fits(patterns: Iterable[str], texts: Iterable[str]) -> bool:
    """Whether a text is one of them, or like one; without any, everything fits."""
    wanted = tuple(patterns)
    return not wanted or any(text and _is_like(text, one) for text in texts for one in wanted)


def _is_like(text: str, pattern: str) -> bool:
    # Brackets are no pattern here: keys hold them.
    return text == pattern or fnmatchcase(text, pattern.replace("[", "[[]"))


def _is_about(wanted: str, letter: Letter) -> bool:
    return _is_like(letter.error_class, wanted) or wanted.casefold() in letter.error.casefold()


def _kafka_key(letter: Letter) -> str:
    return (letter.record.key or b"").decode("utf-8", "backslashreplace")
