"""Batches cut so that one statement can take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from integr8s_idem.records import Completion, Failure

MOST_ROWS: Final = 500
"""Rows of one statement: below the parameters that SQLite and PostgreSQL take (32 766), and SQLite's 500 SELECTs."""

MOST_BYTES: Final = 4 * 2**20
"""Results of one statement together."""

SettledT = TypeVar("SettledT", bound=Completion | Failure)


def rounds(keys: Sequence[str]) -> list[list[int]]:
    """Indexes of `keys` in rounds without a key twice, each in the order of its keys.

    So two batches lock the rows that both want in one order, and neither waits for the other for ever.
    """
    if len(keys) == 1:
        return [[0]]
    found: list[list[int]] = []
    seen: dict[str, int] = {}
    for index, key in enumerate(keys):
        number = seen[key] = seen.get(key, -1) + 1
        if number == len(found):
            found.append([])
        found[number].append(index)
    ordered = (sorted(one, key=keys.__getitem__) for one in found)
    return [one[start : start + MOST_ROWS] for one in ordered for start in range(0, len(one), MOST_ROWS)]


def slices(settled: Sequence[SettledT]) -> Iterator[Sequence[SettledT]]:
    """`settled` in parts of a bounded size, one at least in each."""
    part: list[SettledT] = []
    size = 0
    for one in settled:
        more = len(one.result.body) if isinstance(one, Completion) and one.result else 0
        if part and size + more > MOST_BYTES:
            yield part
            part, size = [], 0
        part.append(one)
        size += more
    if part:
        yield part
