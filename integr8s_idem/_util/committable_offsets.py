"""Compute the offsets to commit, for code that commits itself.  Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Protocol


class Placed(Protocol):
    """The position of a Kafka record, such as an aiokafka `ConsumerRecord`."""

    @property
    def topic(self) -> str:
        """The name of the topic."""
        ...

    @property
    def partition(self) -> int:
        """The partition, from 0."""
        ...

    @property
    def offset(self) -> int:
        """The offset in the partition, from 0."""
        ...


def committable_offsets(
    records: Iterable[Placed], undone: Container[tuple[str, int, int]]
) -> dict[tuple[str, int], int]:
    """Return the offset to commit for each partition, after all of `records` except `undone` were settled.

    Only records before the first unsettled one can be committed, since a commit covers all records before its
    offset.  Offsets may have gaps due to compaction and transactions.

    Args:
        records: The records fetched since the last commit, from any partitions, in any order.
        undone: Topic, partition and offset of the records that are not settled.

    Returns:
        The next offset to read, by topic and partition, without partitions that have nothing to commit.
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
