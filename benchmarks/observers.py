"""Telemetry as in production, but not exported: spans are batched and dropped, metrics are kept."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from prometheus_client import CollectorRegistry

from benchmarks.contestants import ensure
from integr8s_idem.telemetry.composite import combined
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from integr8s_idem.telemetry.sampling import DrawnIds

SAMPLED: Final = 0.1
"""Fraction of traces that are recorded."""


class _Dropping(SpanExporter):
    def __init__(self) -> None:
        self.dropped = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.dropped += len(spans)
        return SpanExportResult.SUCCESS


class Telemetry:
    """Metrics and sampled spans of one service."""

    def __init__(self) -> None:
        self.turns = 0
        self._exporter = _Dropping()
        # The same provider as `configure_telemetry` creates for a worker.
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(SAMPLED)), id_generator=DrawnIds(), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._registry = CollectorRegistry()
        spans = OpenTelemetryObserver("bench", tracer_provider=self._provider)
        self.observer = combined(spans, PrometheusObserver("bench", self._registry))

    def check(self, events: int) -> None:
        """Raise AssertionError unless every event was counted, and about the right number traced."""
        self._provider.force_flush()
        handled = sum(
            sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if sample.name == "idempotency_events_handled_total"
        )
        ensure(handled == events, f"{handled} of {events} are in the metrics")
        ensure(self._exporter.dropped > events * SAMPLED / 2, f"{self._exporter.dropped} spans of {events} events")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._provider.shutdown()
