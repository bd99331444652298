"""Filter dead letters by service, reason, error, group, event type, key and time.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, Final

from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.dead_letter_groups import ErrorGroup
from integr8s_idem.operations.dead_letters import StoredDeadLetter, format_time

_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGE: Final = re.compile(r"(\d{1,6})([smhdw])")


def parse_time(text: str, now: datetime) -> datetime:
    """Parse an age such as `2h`, or an ISO 8601 time, in UTC unless it names a time zone.

    Raises:
        ApplicationError: `text` is neither.
    """
    age = _AGE.fullmatch(text.strip())
    try:
        if age is not None:
            return now - timedelta(**{_UNITS[age[2]]: int(age[1])})
        time = datetime.fromisoformat(text.strip())
        return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ApplicationError(
            f'invalid time "{text}"; write an age such as 30m, 2h or 7d, or ISO 8601 such as 2026-05-01T12:00'
        ) from None


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Matches dead letters that satisfy every field that is set; one of its values suffices.

    Patterns may contain `*` and `?`.
    """

    services: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    """Patterns of the error's class, or parts of its message, ignoring case."""
    event_types: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    """Patterns of the idempotency key, the record's key or the Kafka key."""
    groups: tuple[str, ...] = ()
    """Ids of groups of the same handler and error."""
    since: datetime | None = None
    """Dead-lettered at or after this time."""
    until: datetime | None = None
    """Dead-lettered before this time."""

    def matches(self, dead_letter: StoredDeadLetter) -> bool:
        """Return whether `dead_letter` satisfies the filter."""
        return (
            (self.since is None or dead_letter.at >= self.since)
            and (self.until is None or dead_letter.at < self.until)
            and _any_matches(self.services, (dead_letter.service,))
            and _any_matches(self.reasons, (dead_letter.reason,))
            and _any_matches(self.event_types, (dead_letter.event_type,))
            and (not self.errors or any(_matches_error(error, dead_letter) for error in self.errors))
            and _any_matches(self.keys, (dead_letter.key, dead_letter.record_key, _kafka_key(dead_letter)))
            and (not self.groups or ErrorGroup.of(dead_letter).id in self.groups)
        )

    def as_json(self) -> dict[str, Any]:
        """Return the fields that are set, JSON-serializable."""
        fields: dict[str, Any] = {
            "service": self.services,
            "reason": self.reasons,
            "error": self.errors,
            "event_type": self.event_types,
            "key": self.keys,
            "group": self.groups,
            "since": format_time(self.since) if self.since else "",
            "until": format_time(self.until) if self.until else "",
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items() if value}


def _any_matches(patterns: Iterable[str], texts: Iterable[str]) -> bool:
    """Return whether one of `texts` matches one of `patterns`; without patterns everything matches."""
    wanted = tuple(patterns)
    return not wanted or any(text and _matches(text, pattern) for text in texts for pattern in wanted)


def _matches(text: str, pattern: str) -> bool:
    # Keys contain brackets, so brackets are taken literally.
    return text == pattern or fnmatchcase(text, pattern.replace("[", "[[]"))


def _matches_error(pattern: str, dead_letter: StoredDeadLetter) -> bool:
    return _matches(dead_letter.error_class, pattern) or pattern.casefold() in dead_letter.error.casefold()


def _kafka_key(dead_letter: StoredDeadLetter) -> str:
    return (dead_letter.record.key or b"").decode("utf-8", "backslashreplace")
