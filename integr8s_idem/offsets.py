"""Offsets of those who commit by themselves: how far each partition is done.  Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Protocol


class Placed(Protocol):
    """Where a record of Kafka's lies, as aiokafka's `ConsumerRecord` says."""

    @property
    def topic(self) -> str:
        """Its name."""
        ...

    @property
    def partition(self) -> int:
        """From 0."""
        ...

    @property
    def offset(self) -> int:
        """From 0, within the partition."""
        ...


def committable_offsets(
    records: Iterable[Placed],
    undone: Container[tuple[str, int, int]],
    *,
    positions: Mapping[tuple[str, int], int] | None = None,
) -> dict[tuple[str, int], int]:
    """The offset to commit for each partition, after `records` were fetched and all but `undone` were settled.

    Only what lies before the first record that is not settled may be committed: a commit says that all before it is
    done.  Offsets may have gaps, of compaction and of transactions.

    Args:
        records: What was fetched since the last commit, of any number of partitions, in any order.
        undone: Topic, partition and offset of those that are not settled.
        positions: The consumer's position in each partition, asked for after `records` were fetched and before
            anything else is.  A partition without an unsettled record is committed up to there, past transaction
            markers and aborted messages.  Records before a position must be settled, or be among `records`.

    Returns:
        The next offset to read, by topic and partition; partitions of which nothing may be committed are left out.
    """
    places: dict[tuple[str, int], list[int]] = {}
    for record in records:
        places.setdefault((record.topic, record.partition), []).append(record.offset)
    reached = positions or {}
    found = {place: position for place, position in reached.items() if place not in places and position > 0}
    for (topic, partition), offsets in places.items():
        first_undone = min((each for each in offsets if (topic, partition, each) in undone), default=None)
        if first_undone is None:
            found[topic, partition] = max(max(offsets) + 1, reached.get((topic, partition), 0))
        elif first_undone > min(offsets):
            found[topic, partition] = first_undone
    return found
