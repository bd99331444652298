"""Exemplars of histograms: recorded spans, by whose ids a reader gets from a slow bucket to a trace."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from time import time
from typing import Final, Generic, NamedTuple, TypeVar

from integr8s_idem.records import TraceLink

H = TypeVar("H", bound=Hashable)


class Exemplar(NamedTuple):
    """A recorded span whose duration is in a bucket of a histogram."""

    trace: TraceLink
    seconds: float
    at: float
    """The time at which it ended, in seconds since 1970."""
    scrape: int
    """How many scrapes there had been."""


class Exemplars(Generic[H]):
    """The exemplars of several histograms, one for each bucket that has one."""

    def __init__(self) -> None:
        self.scrapes: int = 0
        """After a scrape, each bucket takes a new exemplar; a busy service stores a few of them, not one per event."""
        self._kept: Final[dict[H, list[Exemplar | None]]] = {}

    def keep(self, histogram: H, bucket: int, buckets: int, seconds: float, trace: TraceLink) -> None:
        """Keep a recorded span as the exemplar of its bucket, unless the bucket has got one since the last scrape.

        Args:
            histogram: The histogram in which the duration was counted.
            bucket: Number of the bucket, from 0.
            buckets: How many buckets the histogram has, including that of longer durations.
            seconds: The duration.
            trace: The span.
        """
        kept = self._kept.get(histogram) or self._kept.setdefault(histogram, [None] * buckets)
        last = kept[bucket]
        if last is None or last.scrape != self.scrapes:
            kept[bucket] = Exemplar(trace, seconds, time(), self.scrapes)

    def of(self, histogram: H, buckets: int) -> Sequence[Exemplar | None]:
        """Return the exemplar of each bucket of a histogram that has so many."""
        return self._kept.get(histogram) or (None,) * buckets
