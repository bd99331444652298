"""Counters, gauges and histograms for Prometheus.

All labels have a bounded number of values: services and phases are few, and event types, topics and reasons beyond a
maximum are counted as `other`.

Events are frequent and scrapes are rare.  An event therefore only adds to plain numbers, from which a scrape builds the
metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from threading import Lock
from time import perf_counter, time
from types import TracebackType
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from integr8s_idem.telemetry import SILENT, Gauge, Past, Phase, ReceivedMessage, Signal, SilentObserver, Span
from integr8s_idem.telemetry.metric_help import HELP
from integr8s_idem.telemetry.tallies import Tallies

MAX_LABELS: Final = 200
"""Maximum distinct event types, and distinct topics, of a service; further ones share the label `other`."""
MAX_LABEL_LENGTH: Final = 128
"""Maximum characters of a label; longer values are counted as `other`."""
MAX_REASONS: Final = 20
"""Maximum distinct reasons of a service."""
OTHER: Final = "other"

BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds in seconds: from a round trip to a store up to a handler that takes as long as the default lease."""


_WITHOUT_EVENT_TYPE: Final = frozenset(
    {
        Signal.STORE_DATA_LOST,
        Signal.STORE_FAILOVER,
        Signal.STORE_RESTART,
        Signal.STORE_ERROR,
        Signal.PURGED,
        Signal.UNDECODABLE,
        Signal.REPLAY_REFUSED,
        Signal.REPLAY_FOR_OTHERS,
        Signal.COMMIT_FAILED,
        Signal.REBALANCE,
    }
)
"""Signals that have no event type."""

_UNDECODABLE_REASONS: Final = ("empty", "malformed", "missing_id", "unknown_type", "unsupported_version", "invalid")
_DEAD_LETTER_REASONS: Final = (
    "handler_failed",
    "previously_failed",
    "key_reused",
    "corrupt_record",
    "no_key",
    "no_handler",
)
_REPLAY_REFUSED_REASONS: Final = ("unsigned", "bad_signature", "malformed", "other_event", "not_failed")
_WITH_REASON: Final = frozenset({Signal.DEAD_LETTER, Signal.UNDECODABLE, Signal.REPLAY_REFUSED})
"""Signals with a label `reason`."""

_SILENT_PHASE: Final = SILENT.phase(Phase.HANDLE)
_SILENT_SPAN: Final = _SILENT_PHASE.__enter__()


_Counted: TypeAlias = Signal | tuple[Signal, str]
"""A counter of an event type, with the reason if it has one."""
_Measured: TypeAlias = Phase | None
"""A histogram of an event type; `None` is that of whole deliveries."""

_BOUNDS: Final = [*map(floatToGoString, BUCKETS), "+Inf"]
_EMPTY_ROW: Final = (0.0,) * (len(_BOUNDS) + 1)


def _counter_labels(signal: Signal) -> list[str]:
    return ["service", "event_type", "reason"] if signal in _WITH_REASON else ["service", "event_type"]


def _reasons_of(signal: Signal, event_type: str) -> tuple[str, ...]:
    """Return the initial reasons; a message that could not be decoded has no event type."""
    if signal not in _WITH_REASON:
        return ("",)
    if signal is Signal.REPLAY_REFUSED:
        return _REPLAY_REFUSED_REASONS
    return _DEAD_LETTER_REASONS if event_type else _UNDECODABLE_REASONS


def _counted(signal: Signal, reason: str) -> _Counted:
    return (signal, reason) if signal in _WITH_REASON else signal


def _gauge_labels(gauge: Gauge) -> list[str]:
    return ["service", "topic"] if gauge is Gauge.CONSUMER_LAG else ["service"]


class _BoundedLabels:
    """Maps values to labels: a value is its own label, or `other` if it is unsuitable or exceeds the maximum."""

    def __init__(self, most: int = MAX_LABELS, known: Iterable[str] = ()) -> None:
        self._known = {"", OTHER, *known}
        self._most = most + 2

    def __contains__(self, value: str) -> bool:
        return value in self._known

    def label(self, value: str) -> str:
        if value in self._known:
            return value
        # This includes lone surrogates, which cannot be encoded as UTF-8 and would make every scrape fail.
        if len(value) > MAX_LABEL_LENGTH or not value.isprintable() or len(self._known) >= self._most:
            return OTHER
        self._known.add(value)
        return value


class _Service:
    """The series of a service and their values."""

    def __init__(self) -> None:
        self.tallies: Tallies[_Counted, _Measured] = Tallies()
        self.counters: dict[tuple[Signal, str, str], float] = {}
        """Creation time of each counter, by signal, event type and reason."""
        self.histograms: dict[tuple[_Measured, str], float] = {}
        """Creation time of each histogram, by phase and event type."""
        self._event_types = _BoundedLabels()
        self._topics = _BoundedLabels()
        self._reasons = _BoundedLabels(MAX_REASONS, known=(*_UNDECODABLE_REASONS, *_DEAD_LETTER_REASONS))
        self._lock = Lock()
        for signal in Signal:
            self._start_counters(signal, "")

    def count(self, signal: Signal, event_type: str, amount: int, reason: str) -> None:
        """Add `amount` to a counter, which is created if it does not exist or has no value in this thread."""
        label, why = self._event_type(event_type), ""
        if signal in _WITH_REASON:
            with self._lock:
                why = self._reasons.label(reason)
        self.counters.setdefault((signal, label, why), time())
        counts = self.tallies.here.counts.setdefault(label, {})
        counted = _counted(signal, why)
        counts[counted] = counts.get(counted, 0) + amount

    def times(self, measured: _Measured, event_type: str) -> list[float]:
        """Return this thread's row of a histogram, which is created if it does not exist."""
        label = self._event_type(event_type)
        self.histograms.setdefault((measured, label), time())
        return self.tallies.here.times.setdefault(label, {}).setdefault(measured, [*_EMPTY_ROW])

    def observe(self, measured: _Measured, event_type: str, seconds: float, times: int = 1) -> None:
        """Add a duration to a histogram, `times` times."""
        try:
            row = self.tallies.here.times[event_type][measured]
        except KeyError:
            row = self.times(measured, event_type)
        row[bisect_left(BUCKETS, seconds)] += times
        row[-1] += seconds * times

    def topic(self, name: str) -> str:
        """Return the label for a topic."""
        with self._lock:
            return self._topics.label(name)

    def _event_type(self, event_type: str) -> str:
        with self._lock:
            is_new = event_type not in self._event_types
            label = self._event_types.label(event_type)
        if is_new and (Signal.DELIVERED, label, "") not in self.counters:
            for signal in Signal:
                if signal not in _WITHOUT_EVENT_TYPE:
                    self._start_counters(signal, label)
        return label

    def _start_counters(self, signal: Signal, label: str) -> None:
        for reason in _reasons_of(signal, label):
            self.counters.setdefault((signal, label, reason), time())


class _Collector:
    """Collector of one registry, for all services of the process."""

    def __init__(self) -> None:
        self.services: dict[str, _Service] = {}
        self.gauges = {
            gauge: prometheus_client.Gauge(gauge.value, HELP.get(gauge, ""), _gauge_labels(gauge), registry=None)
            for gauge in Gauge
        }

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without series, to register their names."""
        return self._metrics({})

    def collect(self) -> Iterable[Metric]:
        """Return the metrics with their current values."""
        return self._metrics(self.services.copy())

    def _metrics(self, services: Mapping[str, _Service]) -> Iterable[Metric]:
        families = _Families()
        for name, service in services.items():
            families.add(name, service)
        yield from families.counters.values()
        for gauge in self.gauges.values():
            yield from gauge.collect()
        yield families.phases
        yield families.processing


class _Families:
    """The counters and histograms of a scrape."""

    def __init__(self) -> None:
        self.counters = {
            signal: CounterMetricFamily(signal.value, HELP.get(signal, ""), labels=_counter_labels(signal))
            for signal in Signal
        }
        self.phases = HistogramMetricFamily(
            "idempotency_phase_seconds", "Duration of a phase in seconds.", labels=["service", "phase", "event_type"]
        )
        self.processing = HistogramMetricFamily(
            "idempotency_processing_seconds",
            "Duration of a delivery in seconds, from decoding until it is settled or released.",
            labels=["service", "event_type"],
        )
        self._has_created = _has_created_series()

    def add(self, name: str, service: _Service) -> None:
        """Add the series of a service."""
        totals = service.tallies.totals()
        for (signal, event_type, reason), created in service.counters.copy().items():
            values = [name, event_type, reason] if signal in _WITH_REASON else [name, event_type]
            count = totals.counts.get(event_type, {}).get(_counted(signal, reason), 0)
            self.counters[signal].add_metric(values, count, created if self._has_created else None)
        for (phase, event_type), created in service.histograms.copy().items():
            row = totals.times.get(event_type, {}).get(phase, _EMPTY_ROW)
            if phase is None:
                self._add_histogram(self.processing, [name, event_type], row, created)
            else:
                self._add_histogram(self.phases, [name, phase.name.lower(), event_type], row, created)

    def _add_histogram(
        self, family: HistogramMetricFamily, values: Sequence[str], row: Sequence[float], created: float
    ) -> None:
        *counts, seconds = row
        family.add_metric(values, list(zip(_BOUNDS, accumulate(counts), strict=True)), seconds)
        if self._has_created:
            # The last sample is the sum, which has only the labels of the histogram.
            family.samples.append(Sample(f"{family.name}_created", family.samples[-1].labels, created))


def _has_created_series() -> bool:
    """Whether prometheus_client exports creation times, which an environment variable can disable."""
    (family,) = Counter("any", "Any.", registry=None).collect()
    return len(family.samples) > 1


_collectors: WeakKeyDictionary[CollectorRegistry, _Collector] = WeakKeyDictionary()
_registry_lock = Lock()


def _service_of(name: str, registry: CollectorRegistry) -> tuple[_Service, _Collector]:
    with _registry_lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = _Collector()
            registry.register(collector)
            _collectors[registry] = collector
        if name not in collector.services:
            collector.services[name] = _Service()
        return collector.services[name], collector


class PrometheusObserver(SilentObserver):
    """Exports the metrics of one service to `registry`.  Thread-safe.

    Counters of the service start at 0 immediately, those of an event type when the type is first seen, for each reason,
    so that the first dead letter is an increase.  A gauge is absent until it is measured.  Several observers of one
    service share their series.
    """

    def __init__(self, service: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._name = service
        self._service, self._page = _service_of(service, registry)
        self._here = self._service.tallies.here
        self._gauges: dict[tuple[Gauge, str], prometheus_client.Gauge] = {}

    def processing(self, message: ReceivedMessage, event_type: str, event_id: str) -> AbstractContextManager[Span]:
        """Measure the duration of a delivery whose event type is known."""
        return _Timed(self._service, None, event_type) if event_type else _SILENT_PHASE

    def phase(
        self, phase: Phase, event_type: str = "", *, attempt: int = 0, past: Past | None = None
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

    def _gauge(self, gauge: Gauge, part: str) -> prometheus_client.Gauge:
        topic = self._service.topic(part)
        labels = (self._name, topic) if gauge is Gauge.CONSUMER_LAG else (self._name,)
        child = self._page.gauges[gauge].labels(*labels)
        self._gauges[gauge, topic] = child
        return child


class _Timed:
    __slots__ = ("_event_type", "_measured", "_service", "_start")

    def __init__(self, service: _Service, measured: _Measured, event_type: str, past: Past | None = None) -> None:
        self._service = service
        self._measured = measured
        self._event_type = event_type
        # Starts here, not in `__enter__`: the time in which a delivery waits for the rest of its batch counts.
        self._start = perf_counter() if past is None else past.since

    def __enter__(self) -> Span:
        return _SILENT_SPAN

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._service.observe(self._measured, self._event_type, perf_counter() - self._start)
