"""Split batches into parts that fit into one statement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from integr8s_idem.records import Completion, Failure

MAX_ROWS: Final = 500
"""Maximum rows per statement, because of the limits of PostgreSQL (32 766 parameters) and SQLite (500 SELECTs)."""

MAX_BYTES: Final = 4 * 2**20
"""Total size of the results in one statement."""

OutcomeT = TypeVar("OutcomeT", bound=Completion | Failure)


def unique_key_batches(keys: Sequence[str]) -> list[list[int]]:
    """Split the indexes of `keys` into batches without duplicate keys, each sorted by key.

    Sorting makes concurrent batches lock shared rows in the same order, so they cannot deadlock.
    """
    if len(keys) == 1:
        return [[0]]
    batches: list[list[int]] = []
    seen: dict[str, int] = {}
    for index, key in enumerate(keys):
        number = seen[key] = seen.get(key, -1) + 1
        if number == len(batches):
            batches.append([])
        batches[number].append(index)
    ordered = (sorted(batch, key=keys.__getitem__) for batch in batches)
    return [batch[start : start + MAX_ROWS] for batch in ordered for start in range(0, len(batch), MAX_ROWS)]


def size_limited_batches(outcomes: Sequence[OutcomeT]) -> Iterator[Sequence[OutcomeT]]:
    """Split `outcomes` into batches of limited size, with at least one outcome in each."""
    batch: list[OutcomeT] = []
    batch_size = 0
    for outcome in outcomes:
        size = len(outcome.result.body) if isinstance(outcome, Completion) and outcome.result else 0
        if batch and batch_size + size > MAX_BYTES:
            yield batch
            batch, batch_size = [], 0
        batch.append(outcome)
        batch_size += size
    if batch:
        yield batch
