"""Split batches into calls that Redis answers quickly.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

MOST_KEYS: Final = 1_000
"""Keys per call: about 5 ms of server time."""

MOST_BYTES: Final = 4 * 1024 * 1024
"""Argument bytes per call, unless a single argument exceeds it."""


def slices(sizes: Sequence[int]) -> Iterator[slice]:
    """Split a batch in order, by the number of keys and by `sizes`, the bytes of their arguments."""
    count = len(sizes)
    if count <= MOST_KEYS and sum(sizes) <= MOST_BYTES:
        if count:
            yield slice(0, count)
        return
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and (index - start >= MOST_KEYS or total + size > MOST_BYTES):
            yield slice(start, index)
            start, total = index, 0
        total += size
    yield slice(start, count)
