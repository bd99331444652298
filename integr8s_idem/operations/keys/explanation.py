"""`keys explain`: find the records of an event by any name, and describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.failures import FailureRule
from integr8s_idem.operations.keys.key_parser import (
    ParsedKey,
)
from integr8s_idem.operations.keys.record_reader import AnyRecord


@dataclass(frozen=True)
class RecordExplanation:
    """A record with the other records of its work."""

    parsed: ParsedKey
    found: AnyRecord
    config: IdempotencyConfig
    """The configuration of its service."""
    next_delivery: str
    """What would happen to the next delivery."""
    generations: dict[int, AnyRecord] = field(default_factory=dict)
    """The other generations of the same work."""
    steps: dict[int, AnyRecord] = field(default_factory=dict)
    dead_letters: str = ""
    """The topic of its dead letter, if it failed."""
    rules: tuple[FailureRule, ...] | None = ()
    """The handler's rules for errors, before the default ones; `None` if they are unknown."""

    other_payloads: str = "other payloads with this key are refused"
    """What happens to deliveries with another payload."""

    @property
    def replayed(self) -> tuple[int, AnyRecord] | None:
        """The newest later generation and its record."""
        return newest_after(self.parsed.generation, self.generations)


def newest_after(generation: int, generations: Mapping[int, AnyRecord]) -> tuple[int, AnyRecord] | None:
    """Return the newest generation after `generation` and its record."""
    newest = max(generations, default=generation)
    return (newest, generations[newest]) if newest > generation else None


@dataclass(frozen=True)
class MissingRecord:
    """A handler without a record of the work."""

    service: str
    handler: str
    event_type: str
    key: str
    """The full key; empty for a handler that is not guarded."""
    next_delivery: str


@dataclass
class Explanation:
    """The answer of `keys explain`."""

    asked: str
    read_as: str
    records: list[RecordExplanation] = field(default_factory=list)
    absent: list[MissingRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    more: int = 0
    """Number of other records that were found."""
