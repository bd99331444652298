"""An observer that records what was counted."""

from __future__ import annotations

from collections import Counter

from integr8s_idem.telemetry import Gauge, Signal, SilentObserver


class CountingObserver(SilentObserver):
    def __init__(self) -> None:
        self.counts: Counter[Signal] = Counter()
        self.reasons: Counter[tuple[Signal, str, str]] = Counter()
        """Keyed by signal, event type and reason, if given."""
        self.gauges: dict[Gauge, float] = {}

    def count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        self.counts[signal] += amount
        if reason:
            self.reasons[signal, event_type, reason] += amount

    def measure(self, gauge: Gauge, value: float, part: str = "") -> None:
        self.gauges[gauge] = value
