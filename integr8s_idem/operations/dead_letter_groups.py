"""Group dead letters by handler and error, in bounded memory.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any, Final, NamedTuple

from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.dead_letter_counts import MAX_GROUPS, OTHERS
from integr8s_idem.operations.dead_letters import Place, StoredDeadLetter, format_time
from integr8s_idem.operations.error_patterns import pattern_of

_ID_LENGTH: Final = 12
_ID: Final = re.compile(rf"[0-9a-f]{{{_ID_LENGTH}}}")


class ErrorGroup(NamedTuple):
    """Dead letters of the same handler with the same error, except for what varies in its message."""

    service: str
    handler: str
    """Empty for messages that no handler has seen, such as malformed ones."""
    reason: str
    error_class: str
    pattern: str
    """The message of the error, with placeholders."""

    @staticmethod
    def of(dead_letter: StoredDeadLetter) -> ErrorGroup:
        return ErrorGroup(
            dead_letter.service,
            dead_letter.handler,
            dead_letter.reason,
            dead_letter.error_class,
            pattern_of(dead_letter.error),
        )

    @property
    def id(self) -> str:
        """12 hexadecimal digits that depend on nothing but its fields: the same at every time and on every machine.

        Empty for those beyond the limit, which cannot be selected together.
        """
        if self == _OTHERS:
            return ""
        encoded = "\0".join(self).encode("utf-8", "backslashreplace")
        return sha256(encoded).hexdigest()[:_ID_LENGTH]


_OTHERS: Final = ErrorGroup(OTHERS, OTHERS, OTHERS, OTHERS, OTHERS)


def checked_group_id(text: str) -> str:
    """Return `text` if it is the id of a group.

    Raises:
        ApplicationError: It has another form.
    """
    if _ID.fullmatch(text) is None:
        raise ApplicationError(f'invalid group "{text}"; `integr8s-idem dlq list --group` prints the ids of groups')
    return text


@dataclass(slots=True)
class GroupSummary:
    """How many dead letters of a group there are, and since when."""

    count: int
    first: datetime
    """When the earliest was dead-lettered, by the clock of the service or the broker."""
    last: datetime
    example: Place
    """Place of the latest, whose error is not kept: its values may be personal data."""


class GroupedDeadLetters:
    """The groups of dead letters, with their counts, times and examples."""

    def __init__(self) -> None:
        self._groups: dict[ErrorGroup, GroupSummary] = {}

    @property
    def total(self) -> int:
        """Number of dead letters."""
        return sum(summary.count for summary in self._groups.values())

    def add(self, dead_letter: StoredDeadLetter) -> None:
        """Add one dead letter."""
        group, at = ErrorGroup.of(dead_letter), dead_letter.at
        if group not in self._groups and len(self._groups) >= MAX_GROUPS:
            group = _OTHERS
        summary = self._groups.get(group)
        if summary is None:
            self._groups[group] = GroupSummary(1, at, at, dead_letter.place)
            return
        summary.count += 1
        summary.first = min(summary.first, at)
        if at >= summary.last:
            summary.last, summary.example = at, dead_letter.place

    def rows(self) -> Sequence[tuple[ErrorGroup, GroupSummary]]:
        """Return the groups, the largest first, and of equal ones the latest first."""
        return sorted(self._groups.items(), key=lambda row: (row[1].count, row[1].last), reverse=True)

    def as_json(self) -> list[dict[str, Any]]:
        """Return the groups, JSON-serializable; times are ISO 8601 in UTC."""
        return [
            {
                "group": group.id,
                **group._asdict(),
                "dead_letters": summary.count,
                "first": format_time(summary.first),
                "last": format_time(summary.last),
                "example": str(summary.example),
            }
            for group, summary in self.rows()
        ]
