"""The questions, one file each, and the figures that they answer with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from benchmarks import batches, costs, deployments, footprint, growth, kafka, local, single, transactions
from benchmarks.measuring import Flat
from benchmarks.rounds import Options, Tell


@dataclass(frozen=True)
class Question:
    """One file."""

    keys: tuple[str, ...]
    """Its figures, with a target or without."""
    measured: Callable[[Options, Tell], Awaitable[Flat]]


QUESTIONS: Final[Mapping[str, Question]] = {
    "single": Question(single.KEYS, single.measured),
    "local": Question(local.KEYS, local.measured),
    "batches": Question(batches.KEYS, batches.measured),
    "kafka": Question(kafka.KEYS, kafka.measured),
    "costs": Question((), costs.measured),
    "deployments": Question((), deployments.measured),
    "footprint": Question(footprint.KEYS, footprint.measured),
    "growth": Question(growth.KEYS, growth.measured),
    "transactions": Question(transactions.KEYS, transactions.measured),
}
KEYS: Final = tuple(key for question in QUESTIONS.values() for key in question.keys)
