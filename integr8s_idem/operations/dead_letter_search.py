"""Search dead-letter topics: fix the offset ranges to read, then return matching dead letters page by page."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from integr8s_idem.config import Settings
from integr8s_idem.operations.dead_letter_filter import DeadLetterFilter
from integr8s_idem.operations.dead_letter_reader import DeadLetterReader, OffsetRange, Page
from integr8s_idem.operations.dead_letter_topics import dead_letter_topics, no_topics_note, platform_topics
from integr8s_idem.operations.dead_letters import Place
from integr8s_idem.runtime import Platform
from integr8s_idem.worker.kafka_protocols import Partition


@dataclass(frozen=True)
class Search:
    """The options of a search."""

    settings: Settings
    platform: Platform | None = None
    """Search the dead-letter topics of the topics that its services read."""
    topics: tuple[str, ...] = ()
    """Search these topics."""
    places: tuple[Place, ...] = ()
    """Return only the dead letters at these places."""
    filter: DeadLetterFilter = field(default_factory=DeadLetterFilter)
    limit: int | None = None
    """Maximum number of dead letters."""

    def as_json(self) -> dict[str, Any]:
        """Return the options that are set, for an audit line."""
        places = [str(place) for place in self.places]
        options = {"topics": list(self.topics), "places": places, "limit": self.limit, **self.filter.as_json()}
        return {name: value for name, value in options.items() if value}


@dataclass(frozen=True)
class SearchPlan:
    """The offset ranges to read.  Messages published later are excluded, so that every search ends."""

    offset_ranges: tuple[OffsetRange, ...]
    topics: frozenset[str]
    """All visible topics of the cluster."""
    note: str = ""
    """Why there may be no dead letters at all."""

    @property
    def length(self) -> int:
        """Number of offsets to read."""
        return sum(offset_range.length for offset_range in self.offset_ranges)

    @property
    def dead_letter_topics(self) -> Sequence[str]:
        """The dead-letter topics to read."""
        return list(dict.fromkeys(offset_range.partition.topic for offset_range in self.offset_ranges))


async def plan_search(search: Search, reader: DeadLetterReader) -> SearchPlan:
    """Return the offset ranges to read.

    Raises:
        ApplicationError: A named topic or place does not exist.
        BrokerUnavailableError: The brokers do not answer.
    """
    partitions = await reader.partitions()
    if search.places:
        return SearchPlan(await reader.offset_ranges_of(search.places, partitions), frozenset(partitions))
    read = await platform_topics(search.platform, search.settings) if search.platform and not search.topics else None
    topics = dead_letter_topics(search.settings.kafka, partitions, named=search.topics, read=read)
    if not topics:
        return SearchPlan((), frozenset(partitions), no_topics_note(search.settings.kafka, read))
    chosen = [Partition(topic, number) for topic in topics for number in partitions[topic]]
    return SearchPlan(await reader.offset_ranges(chosen, search.filter.since), frozenset(partitions))


async def pages(search: Search, plan: SearchPlan, reader: DeadLetterReader) -> AsyncGenerator[Page, None]:
    """Yield the matching dead letters.  A page without any reports progress."""
    remaining = search.limit
    async with aclosing(reader.pages(plan.offset_ranges)) as unfiltered:
        async for page in unfiltered:
            matching = [dead_letter for dead_letter in page.dead_letters if search.filter.matches(dead_letter)]
            dead_letters = matching[:remaining]
            yield Page(dead_letters, page.offsets_read)
            if remaining is not None:
                remaining -= len(dead_letters)
                if remaining <= 0:
                    return
