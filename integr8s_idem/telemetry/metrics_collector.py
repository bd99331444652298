"""The collector of Prometheus: builds the metrics of a scrape from the plain numbers of all services."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from threading import Lock
from typing import Any, Final
from weakref import WeakKeyDictionary

import prometheus_client
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Exemplar as OpenMetricsExemplar
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from integr8s_idem.telemetry import Gauge, Signal
from integr8s_idem.telemetry.convention_metrics import DATABASE_OPERATIONS, METRICS, ConventionMetric, ConventionSeries
from integr8s_idem.telemetry.exemplars import Exemplar
from integr8s_idem.telemetry.metric_help import HELP
from integr8s_idem.telemetry.metric_labels import counter_labels, gauge_labels
from integr8s_idem.telemetry.metric_series import BUCKETS, EMPTY_ROW, ServiceSeries, counted

_BOUNDS: Final = [*map(floatToGoString, BUCKETS), "+Inf"]


class MetricsCollector:
    """Collector of one registry, for all services of the process."""

    def __init__(self) -> None:
        self.services: dict[str, ServiceSeries] = {}
        self.gauges = {
            gauge: prometheus_client.Gauge(gauge.value, HELP.get(gauge, ""), gauge_labels(gauge), registry=None)
            for gauge in Gauge
        }

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without series, to register their names."""
        return self._metrics({})

    def collect(self) -> Iterable[Metric]:
        """Return the metrics with their current values."""
        return self._metrics(self.services.copy())

    def _metrics(self, services: Mapping[str, ServiceSeries]) -> Iterable[Metric]:
        families = _Families()
        for name, service in services.items():
            families.add(name, service)
        yield from families.counters.values()
        for gauge in self.gauges.values():
            yield from gauge.collect()
        yield families.phases
        yield families.processing
        for metric, family in families.conventions.items():
            # The messaging metrics are optional; their names are reserved, but not listed without a series.
            if family.samples or metric is DATABASE_OPERATIONS or not services:
                family.samples = [*map(_without_empty_labels, family.samples)]
                yield family


class _Families:
    """The counters and histograms of a scrape."""

    def __init__(self) -> None:
        self.counters = {
            signal: CounterMetricFamily(signal.value, HELP.get(signal, ""), labels=counter_labels(signal))
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
        self.conventions = {metric: _convention_family(metric) for metric in METRICS}
        self._has_created = _has_created_series()

    def add(self, name: str, service: ServiceSeries) -> None:
        """Add the series of a service."""
        totals = service.tallies.totals()
        for (signal, event_type, reason), created in service.counters.copy().items():
            labels = {"service": name, "event_type": event_type, "reason": reason}
            values = [labels[label] for label in counter_labels(signal)]
            count = totals.counts.get(event_type, {}).get(counted(signal, reason), 0)
            self.counters[signal].add_metric(values, count, created if self._has_created else None)
        for (phase, event_type), created in service.histograms.copy().items():
            row = totals.times.get(event_type, {}).get(phase, EMPTY_ROW)
            exemplars = service.exemplars.of((phase, event_type), len(_BOUNDS))
            if phase is None:
                self._add_histogram(self.processing, [name, event_type], row, exemplars, created)
            else:
                self._add_histogram(self.phases, [name, phase.name.lower(), event_type], row, exemplars, created)
        service.exemplars.scrapes += 1
        self._add_conventions(name, service.conventions)

    def _add_conventions(self, name: str, series: ConventionSeries) -> None:
        totals = series.tallies.totals()
        for (metric, values), created in series.created.copy().items():
            family, labels = self.conventions[metric], [name, *values]
            if isinstance(family, CounterMetricFamily):
                count = totals.counts.get(metric.name, {}).get(values, 0)
                family.add_metric(labels, count, created if self._has_created else None)
            elif (row := totals.times.get(metric.name, {}).get(values)) is not None:
                bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
                exemplars = series.exemplars.of((metric.name, values), len(bounds))
                self._add_histogram(family, labels, row, exemplars, created, bounds)
        series.exemplars.scrapes += 1

    def _add_histogram(
        self,
        family: HistogramMetricFamily,
        values: Sequence[str],
        row: Sequence[float],
        exemplars: Sequence[Exemplar | None],
        created: float,
        bounds: Sequence[str] = _BOUNDS,
    ) -> None:
        *counts, seconds = row
        # The exposition in the older text format leaves exemplars out.
        buckets: Any = list(zip(bounds, accumulate(counts), map(_exported, exemplars), strict=True))
        family.add_metric(values, buckets, seconds)
        if self._has_created:
            # The last sample is the sum, which has only the labels of the histogram.
            family.samples.append(Sample(f"{family.name}_created", family.samples[-1].labels, created))


def _convention_family(metric: ConventionMetric) -> CounterMetricFamily | HistogramMetricFamily:
    family = HistogramMetricFamily if metric.buckets else CounterMetricFamily
    return family(metric.name, metric.help, labels=["service", *metric.labels])


def _without_empty_labels(sample: Sample) -> Sample:
    """Leave out attributes that are unknown or do not apply, as OpenTelemetry's own exporters do."""
    return sample._replace(labels={name: value for name, value in sample.labels.items() if value})


def _exported(exemplar: Exemplar | None) -> OpenMetricsExemplar | None:
    if exemplar is None:
        return None
    trace = exemplar.trace
    ids = {"trace_id": trace.trace_id.hex(), "span_id": trace.span_id.hex()}
    return OpenMetricsExemplar(ids, exemplar.seconds, exemplar.at)


def _has_created_series() -> bool:
    """Whether prometheus_client exports creation times, which an environment variable can disable."""
    (family,) = Counter("any", "Any.", registry=None).collect()
    return len(family.samples) > 1


_collectors: WeakKeyDictionary[CollectorRegistry, MetricsCollector] = WeakKeyDictionary()
_registry_lock = Lock()


def series_of(name: str, registry: CollectorRegistry) -> tuple[ServiceSeries, MetricsCollector]:
    with _registry_lock:
        collector = _collectors.get(registry)
        if collector is None:
            collector = MetricsCollector()
            registry.register(collector)
            _collectors[registry] = collector
        if name not in collector.services:
            collector.services[name] = ServiceSeries()
        return collector.services[name], collector
