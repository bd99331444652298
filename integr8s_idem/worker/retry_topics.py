"""Retry topics: their names, and which of them an event waits in.  No I/O.

An event that is retried later is copied to `<topic>.<group>.retry.<delay>`, so that later events of its partition need
not wait for it.  All copies of one topic wait equally long, so the first is due first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple

from integr8s_idem.config.durations import delay_in_name
from integr8s_idem.errors import ApplicationError

_TIER: Final = re.compile(r"[1-9][0-9]{0,4}[smhd]")
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")

MOST_FETCHED: Final = 10
"""Copies of one partition that are in flight at most.  The rest stays in the topic, so that waiting takes no memory."""


class RetryTopic(NamedTuple):
    """A topic in which copies of events wait."""

    name: str
    source: str
    """The topic of the events."""
    delay: timedelta


@dataclass(frozen=True, slots=True)
class RetryTopics:
    """The retry topics of one service."""

    group: str
    tiers: Sequence[str]
    """Delays as in the settings, ascending."""
    sources: Sequence[str]

    def check(self) -> None:
        """Check the names of the topics.

        Raises:
            ApplicationError: The brokers would refuse a name.
        """
        for topic in self.all():
            if _TOPIC.fullmatch(topic.name) is None:
                raise ApplicationError(
                    f"{topic.name} is not a valid name of a retry topic: a consumer group with retry topics has only "
                    "letters, digits, `.`, `_` and `-`, and the whole name at most 249 of them. Set group_id"
                )

    def all(self) -> list[RetryTopic]:
        """Return all topics, those of one source in the order of their delays."""
        return [self._topic(source, tier) for source in self.sources for tier in self.tiers]

    def choose(self, source: str, remaining: timedelta) -> RetryTopic:
        """Return the topic with the shortest delay that is at least `remaining`, or the longest."""
        topics = [self._topic(source, tier) for tier in self.tiers]
        return next((topic for topic in topics if topic.delay >= remaining), topics[-1])

    def find(self, name: str) -> RetryTopic | None:
        """Return the retry topic with this name, also if its delay is no longer in the settings."""
        for source in self.sources:
            prefix = f"{source}.{self.group}.retry."
            tier = name.removeprefix(prefix)
            if tier != name and _TIER.fullmatch(tier) is not None:
                return self._topic(source, tier)
        return None

    def retired(self, existing: Iterable[str]) -> list[RetryTopic]:
        """Return those of the topics that exist which are no longer in the settings."""
        current: Collection[str] = {topic.name for topic in self.all()}
        found = [self.find(name) for name in sorted(existing) if name not in current]
        return [topic for topic in found if topic is not None]

    def _topic(self, source: str, tier: str) -> RetryTopic:
        return RetryTopic(f"{source}.{self.group}.retry.{tier}", source, delay_in_name(tier))


@dataclass(slots=True, eq=False)
class RetryPartition:
    """What an assignment of a partition of a retry topic knows in addition."""

    topic: RetryTopic
    log_end: int = 0
    """The next offset of the log, or an earlier one, as of the last poll."""
    _waited: tuple[int, float] | None = None
    """The end of the log when a wait began, and that time by the event loop's clock."""

    def patience(self, offset: int, now: float) -> float:
        """Return how many seconds a copy still has to wait before it is copied to this topic again.

        It waits in this topic for the topic's delay.  Copies that were in the log when a wait began have waited with
        it, even if they are fetched only afterwards.
        """
        if self._waited is None or offset >= self._waited[0]:
            self._waited = max(self.log_end, offset + 1), now
        return max(self._waited[1] + self.topic.delay.total_seconds() - now, 0.0)
