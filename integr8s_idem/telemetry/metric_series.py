"""The series of a service and their values, as plain numbers.

Events are frequent and scrapes are rare.  An event therefore only adds to plain numbers, from which a scrape builds the
metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from threading import Lock
from time import time
from typing import Final, TypeAlias

from integr8s_idem.records import TraceLink
from integr8s_idem.telemetry import Phase, Signal
from integr8s_idem.telemetry.convention_metrics import ConventionSeries
from integr8s_idem.telemetry.exemplars import Exemplars
from integr8s_idem.telemetry.metric_labels import (
    DEAD_LETTER_REASONS,
    MAX_REASONS,
    UNDECODABLE_REASONS,
    WITH_REASON,
    WITHOUT_EVENT_TYPE,
    BoundedLabels,
    initial_reasons,
)
from integr8s_idem.telemetry.tallies import Tallies

BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds in seconds: from a round trip to a store up to a handler that takes as long as the default lease."""

EMPTY_ROW: Final = (0.0,) * (len(BUCKETS) + 2)
"""A histogram without durations: a count for each bucket and for longer durations, and the sum."""

Counted: TypeAlias = Signal | tuple[Signal, str]
"""A counter of an event type, with the reason if it has one."""
Measured: TypeAlias = Phase | None
"""A histogram of an event type; `None` is that of whole deliveries."""


def counted(signal: Signal, reason: str) -> Counted:
    """Return the counter of a signal."""
    return (signal, reason) if signal in WITH_REASON else signal


class ServiceSeries:
    """The series of a service and their values."""

    def __init__(self) -> None:
        self.tallies: Tallies[Counted, Measured] = Tallies()
        self.counters: dict[tuple[Signal, str, str], float] = {}
        """Creation time of each counter, by signal, event type and reason."""
        self.histograms: dict[tuple[Measured, str], float] = {}
        """Creation time of each histogram, by phase and event type."""
        self.exemplars: Exemplars[tuple[Measured, str]] = Exemplars()
        """By phase and event type."""
        self.conventions = ConventionSeries()
        self._event_types = BoundedLabels()
        self._topics = BoundedLabels()
        self._reasons = BoundedLabels(MAX_REASONS, known=(*UNDECODABLE_REASONS, *DEAD_LETTER_REASONS))
        self._lock = Lock()
        for signal in Signal:
            self._start_counters(signal, "")

    def count(self, signal: Signal, event_type: str, amount: int, reason: str) -> None:
        """Add `amount` to a counter, which is created if it does not exist or has no value in this thread."""
        label, why = self._event_type("" if signal in WITHOUT_EVENT_TYPE else event_type, signal), ""
        if signal in WITH_REASON:
            with self._lock:
                why = self._reasons.label(reason)
        self.counters.setdefault((signal, label, why), time())
        counts = self.tallies.here.counts.setdefault(label, {})
        name = counted(signal, why)
        counts[name] = counts.get(name, 0) + amount

    def times(self, measured: Measured, event_type: str) -> list[float]:
        """Return this thread's row of a histogram, which is created if it does not exist."""
        label = self._event_type(event_type)
        self.histograms.setdefault((measured, label), time())
        return self.tallies.here.times.setdefault(label, {}).setdefault(measured, [*EMPTY_ROW])

    def observe(self, measured: Measured, event_type: str, seconds: float, times: int = 1) -> None:
        """Add a duration to a histogram, `times` times."""
        try:
            row = self.tallies.here.times[event_type][measured]
        except KeyError:
            row = self.times(measured, event_type)
        row[bisect_left(BUCKETS, seconds)] += times
        row[-1] += seconds * times

    def exemplify(self, measured: Measured, event_type: str, seconds: float, trace: TraceLink) -> None:
        """Keep a recorded span as the exemplar of its bucket, unless the bucket has got one since the last scrape."""
        histogram = (measured, self._event_type(event_type))
        self.exemplars.keep(histogram, bisect_left(BUCKETS, seconds), len(BUCKETS) + 1, seconds, trace)

    def topic(self, name: str) -> str:
        """Return the label for a topic."""
        with self._lock:
            return self._topics.label(name)

    def _event_type(self, event_type: str, signal: Signal | None = None) -> str:
        with self._lock:
            label = self._event_types.label(event_type)
        # A type that the service only publishes needs no other counters.
        if signal is not Signal.PUBLISHED and (Signal.DELIVERED, label, "") not in self.counters:
            for signal in Signal:
                if signal not in WITHOUT_EVENT_TYPE:
                    self._start_counters(signal, label)
        return label

    def _start_counters(self, signal: Signal, label: str) -> None:
        for reason in initial_reasons(signal, label):
            self.counters.setdefault((signal, label, reason), time())
