"""Offsets of those who commit by themselves: how far each partition is done.  Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable
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
    records: Iterable[Placed], undone: Container[tuple[str, int, int]]
) -> dict[tuple[str, int], int]:
    """The offset to commit for each partition, after `records` were fetched and all but `undone` were settled.

    Only what lies before the first record that is not settled may be committed: a commit says that all before it is
    done.  Offsets may have gaps, of compaction and of transactions.

    Args:
        records: What was fetched since the last commit, of any number of partitions, in any order.
        undone: Topic, partition and offset of those that are not settled.

    Returns:
        The next offset to read, by topic and partition; partitions of which nothing may be committed are left out.
    """
    places: dict[tuple[str, int], list[int]] = {}
    for record in records:
        places.setdefault((record.topic, record.partition), []).append(record.offset)
    found: dict[tuple[str, int], int] = {}
    for (topic, partition), offsets in places.items():
        first_undone = min((each for each in offsets if (topic, partition, each) in undone), default=None)
        if first_undone is None:
            found[topic, partition] = max(offsets) + 1
        elif first_undone > min(offsets):
            found[topic, partition] = first_undone
    return found
