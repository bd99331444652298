"""Telemetry as in production, but not exported: spans are batched and dropped, metrics are kept.

And what the OpenTelemetry SDK alone takes for the same spans, which is a bound for the figure with telemetry.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Self

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from prometheus_client import CollectorRegistry

from benchmarks.contestants import ensure
from integr8s_idem.telemetry import Phase, ReceivedMessage, SilentObserver, Span, conventions
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


def check_handled(registry: CollectorRegistry, events: int) -> None:
    """Raise AssertionError unless the metrics in `registry` have counted this number of handled events."""
    handled = sum(
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "idempotency_events_handled_total"
    )
    ensure(handled == events, f"{handled} of {events} are in the metrics")


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
        check_handled(self._registry, events)
        ensure(self._exporter.dropped > events * SAMPLED / 2, f"{self._exporter.dropped} spans of {events} events")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._provider.shutdown()


class SpansOfSdk(SilentObserver):
    """Makes the four spans of every tenth delivery, with their attributes, by the SDK alone.

    There is no sampling decision, no context for handlers and messages, no metric, and no code of this library.
    """

    def __init__(self) -> None:
        self.recorded = 0
        self._exporter = _Dropping()
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("bench")
        self._deliveries = 0

    def processing(self, message: ReceivedMessage, event_type: str, event_id: str) -> AbstractContextManager[Span]:
        self._deliveries += 1
        if self._deliveries % round(1 / SAMPLED) == 0:
            self.recorded += 1
            self._record(message, event_type, event_id)
        return super().processing(message, event_type, event_id)

    def _record(self, message: ReceivedMessage, event_type: str, event_id: str) -> None:
        phase = {conventions.SERVICE: "bench", conventions.EVENT_TYPE: event_type, conventions.HANDLER: "ship"}
        delivery = self._tracer.start_span(
            f"process {message.topic}",
            context=Context(),
            kind=otel.SpanKind.CONSUMER,
            attributes={
                **phase,
                conventions.SYSTEM: "kafka",
                conventions.OPERATION_NAME: "process",
                conventions.OPERATION_TYPE: "process",
                conventions.GROUP: "bench",
                conventions.DESTINATION: message.topic,
                conventions.PARTITION: str(message.partition),
                conventions.OFFSET: message.offset,
                conventions.DELIVERY: f"{message.topic}:{message.partition}:{message.offset}",
                conventions.MESSAGE_ID: event_id,
                conventions.OUTCOME: "executed",
                conventions.ATTEMPT: 1,
            },
        )
        parent = otel.set_span_in_context(delivery, Context())
        for each in (Phase.RESERVE, Phase.HANDLE, Phase.COMPLETE):
            self._tracer.start_span(each.value, context=parent, attributes=phase).end()
        delivery.end()

    def check(self) -> None:
        """Raise AssertionError unless all spans have reached the exporter."""
        self._provider.force_flush()
        ensure(self._exporter.dropped == 4 * self.recorded, f"{self._exporter.dropped} spans of {self.recorded} events")

    def close(self) -> None:
        """Stop the thread of the SDK."""
        self._provider.shutdown()
