"""Dead letters counted by service, reason and error, in bounded memory.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from integr8s_idem.operations.dead_letters import Letter

MOST_GROUPS: Final = 1_000
"""Different ones that are told apart: whoever may write to the topic can make up any number of them."""

OTHERS: Final = "(others)"


class Group(NamedTuple):
    """What letters have in common."""

    topic: str
    """The dead-letter topic."""
    service: str
    reason: str
    error_class: str

    @staticmethod
    def of(letter: Letter) -> Group:
        return Group(letter.record.topic, letter.service, letter.reason, letter.error_class)


class Tally:
    """How many letters each group has."""

    def __init__(self) -> None:
        self._counts: Counter[Group] = Counter()

    @property
    def total(self) -> int:
        return self._counts.total()

    def add(self, group: Group) -> None:
        """One letter more."""
        if group not in self._counts and len(self._counts) >= MOST_GROUPS:
            group = Group(group.topic, OTHERS, OTHERS, OTHERS)
        self._counts[group] += 1

    def rows(self) -> Sequence[tuple[Group, int]]:
        """The largest first."""
        return self._counts.most_common()

    def as_json(self) -> list[dict[str, Any]]:
        return [{**group._asdict(), "letters": count} for group, count in self.rows()]
