"""A search for dead letters: where they stand at one moment, and those that are meant, page by page."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from integr8s_idem.config import Settings
from integr8s_idem.operations.dead_letter_filter import Choice
from integr8s_idem.operations.dead_letter_reader import DeadLetterReader, OffsetRange, Page
from integr8s_idem.operations.dead_letter_topics import dead_letter_topics, none_there, topics_of
from integr8s_idem.operations.dead_letters import Place
from integr8s_idem.runtime import Platform
from integr8s_idem.worker.kafka_protocols import Partition


@dataclass(frozen=True)
class Search:
    """What people ask for."""

    settings: Settings
    platform: Platform | None = None
    """Look into the dead-letter topics of what its services read."""
    topics: tuple[str, ...] = ()
    """Look into these."""
    places: tuple[Place, ...] = ()
    """Look at these letters, and at nothing else."""
    choice: Choice = field(default_factory=Choice)
    limit: int | None = None
    """Most letters, if there is a limit."""

    def as_json(self) -> dict[str, Any]:
        """What was asked for, for an audit line."""
        places = [str(place) for place in self.places]
        asked = {"topics": list(self.topics), "places": places, "limit": self.limit, **self.choice.as_json()}
        return {name: value for name, value in asked.items() if value}


@dataclass(frozen=True)
class Found:
    """Where there is something to be read.  Letters that come later are not in it, so that every search ends."""

    stretches: tuple[OffsetRange, ...]
    topics: frozenset[str]
    """All topics of the cluster that we may see."""
    note: str = ""
    """Why there may be no letters at all."""

    @property
    def length(self) -> int:
        """Offsets to be passed."""
        return sum(stretch.length for stretch in self.stretches)

    @property
    def named(self) -> Sequence[str]:
        """The dead-letter topics."""
        return list(dict.fromkeys(stretch.partition.topic for stretch in self.stretches))


async def found_by(search: Search, box: DeadLetterReader) -> Found:
    """Where there is something to be read.

    Raises:
        ApplicationError: A topic or a place that is named is not there.
        BrokerUnavailableError: No answer.
    """
    there = await box.partitions()
    if search.places:
        return Found(await box.stretches_of(search.places, there), frozenset(there))
    read = await topics_of(search.platform, search.settings) if search.platform and not search.topics else None
    topics = dead_letter_topics(search.settings.kafka, there, named=search.topics, read=read)
    if not topics:
        return Found((), frozenset(there), none_there(search.settings.kafka, read))
    partitions = [Partition(topic, number) for topic in topics for number in there[topic]]
    return Found(await box.stretches(partitions, search.choice.since), frozenset(there))


async def pages(search: Search, found: Found, box: DeadLetterReader) -> AsyncGenerator[Page, None]:
    """The letters that are meant.  A page may be empty: it tells how far the search has come."""
    left = search.limit
    async with aclosing(box.pages(found.stretches)) as everything:
        async for page in everything:
            letters = [letter for letter in page.letters if search.choice.takes(letter)][:left]
            yield Page(letters, page.passed)
            if left is not None:
                left -= len(letters)
                if left <= 0:
                    return
