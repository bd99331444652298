"""Counters, gauges and histograms for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType
from typing import Final

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry

from integr8s_idem.records import Database, TraceLink
from integr8s_idem.telemetry import (
    SILENT_PHASE,
    Gauge,
    Observation,
    Past,
    Phase,
    ReceivedMessage,
    Signal,
    SilentObserver,
    Span,
    StoreTimer,
)
from integr8s_idem.telemetry.convention_metrics import DatabaseTimer
from integr8s_idem.telemetry.metric_series import Measured, ServiceSeries
from integr8s_idem.telemetry.metrics_collector import series_of

_SILENT_SPAN: Final = SILENT_PHASE.__enter__()


class PrometheusObserver(SilentObserver):
    """Exports the metrics of one service to `registry`.  Thread-safe.

    Counters of the service start at 0 immediately, those of an event type when the type is first seen, for each reason,
    so that the first dead letter is an increase.  A gauge is absent until it is measured.  Several observers of one
    service share their series.
    """

    def __init__(self, service: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._name = service
        self._service, self._page = series_of(service, registry)
        self._here = self._service.tallies.here
        self._gauges: dict[tuple[Gauge, str], prometheus_client.Gauge] = {}

    def processing(self, message: ReceivedMessage, event_type: str, event_id: str) -> AbstractContextManager[Span]:
        """Measure the duration of a delivery whose event type is known."""
        return _Timed(self._service, None, event_type) if event_type else SILENT_PHASE

    def phase(
        self, phase: Phase, event_type: str = "", *, attempt: int = 0, handler: str = "", past: Past | None = None
    ) -> AbstractContextManager[Span]:
        """Measure the duration of a phase, failed or not."""
        return _Timed(self._service, phase, event_type, past)

    def shared(self, phase: Phase, event_types: Sequence[str], *, since: float) -> None:
        """Measure the duration of a phase that several deliveries have shared; it counts for each of them."""
        seconds = perf_counter() - since
        for event_type in set(event_types):
            self._service.observe(phase, event_type, seconds, event_types.count(event_type))

    def count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        """Add `amount` to the counter of `signal`; `reason` is a label if the signal has reasons."""
        try:
            self._here.counts[event_type][signal] += amount
        except KeyError:
            self._service.count(signal, event_type, amount, reason)

    def measure(self, gauge: Gauge, value: float, part: str = "") -> None:
        """Set `gauge` to `value`."""
        child = self._gauges.get((gauge, part))
        (child or self._gauge(gauge, part)).set(value)

    def observed(self, event_type: str, observation: Observation) -> None:
        """Count an observed delivery."""
        self._service.note_observation(event_type, observation)

    def store_timer(self, database: Callable[[], Database]) -> StoreTimer | None:
        """Measure the calls to a store."""
        return DatabaseTimer(self._service.conventions, database)

    def _gauge(self, gauge: Gauge, part: str) -> prometheus_client.Gauge:
        topic = self._service.topic(part)
        labels = (self._name, topic) if gauge is Gauge.CONSUMER_LAG else (self._name,)
        child = self._page.gauges[gauge].labels(*labels)
        self._gauges[gauge, topic] = child
        return child


class _Timed:
    __slots__ = ("_event_type", "_measured", "_service", "_start", "_trace")

    def __init__(self, service: ServiceSeries, measured: Measured, event_type: str, past: Past | None = None) -> None:
        self._service = service
        self._measured = measured
        self._event_type = event_type
        self._trace: TraceLink | None = None
        # Starts here, not in `__enter__`: the time in which a delivery waits for the rest of its batch counts.
        self._start = perf_counter() if past is None else past.since

    def __enter__(self) -> Span:
        return _SILENT_SPAN

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        seconds = perf_counter() - self._start
        self._service.observe(self._measured, self._event_type, seconds)
        if self._trace is not None:
            self._service.exemplify(self._measured, self._event_type, seconds, self._trace)

    def note_trace(self, trace: TraceLink) -> None:
        """Let the span that records this phase be an exemplar of its duration."""
        self._trace = trace
