"""Count dead letters by service, reason and error, in bounded memory.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from integr8s_idem.operations.dead_letters import StoredDeadLetter

MAX_GROUPS: Final = 1_000
"""Number of distinct groups that are counted.  Anyone who can write to the topic can invent more."""

OTHERS: Final = "(others)"


class Group(NamedTuple):
    """Dead letters with the same topic, service, reason and error class."""

    topic: str
    """The dead-letter topic."""
    service: str
    reason: str
    error_class: str

    @staticmethod
    def of(dead_letter: StoredDeadLetter) -> Group:
        return Group(dead_letter.record.topic, dead_letter.service, dead_letter.reason, dead_letter.error_class)


class Tally:
    """The number of dead letters in each group."""

    def __init__(self) -> None:
        self._counts: Counter[Group] = Counter()

    @property
    def total(self) -> int:
        return self._counts.total()

    def add(self, group: Group) -> None:
        """Count one dead letter."""
        if group not in self._counts and len(self._counts) >= MAX_GROUPS:
            group = Group(group.topic, OTHERS, OTHERS, OTHERS)
        self._counts[group] += 1

    def rows(self) -> Sequence[tuple[Group, int]]:
        """Return the groups with their counts, the largest first."""
        return self._counts.most_common()

    def as_json(self) -> list[dict[str, Any]]:
        return [{**group._asdict(), "dead_letters": count} for group, count in self.rows()]
