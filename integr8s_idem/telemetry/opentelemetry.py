"""Spans, by the API of OpenTelemetry and its conventions for messaging.

A delivery's span is both linked to the producer's and its child.  The link is what the conventions
ask for.  The parent makes one trace of one request across all services, and lets the producer's
decision to sample hold for the whole chain.  A message without a context starts a trace of its own,
whatever span the worker itself was started in.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import inf
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Final

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from integr8s_idem.config.message_text import text_of
from integr8s_idem.config.urls import redacted
from integr8s_idem.records import TraceLink
from integr8s_idem.telemetry import SILENT, Headers, Phase, SilentObserver, Span

if TYPE_CHECKING:
    from integr8s_idem.telemetry.sampling import KnownSampling

KEY_ATTRIBUTE: Final = "idempotency.key"
"""The one annotation that is kept only where a setting says so."""
MAX_TEXT: Final = 1024
"""Characters of an attribute; the rest is cut off."""

_LOOK_INTERVAL: Final = 0.25
"""Seconds between two looks for an SDK.  A look costs 2 µs, more than all other telemetry together."""

_SILENT_PHASE: Final = SILENT.phase(Phase.HANDLE)
_W3C: Final = TraceContextTextMapPropagator()
_W3C_HEADERS: Final = frozenset({"traceparent", "tracestate"})
_RUN_LINK: Final = {"idempotency.relation": "run"}
"""Tells a link to the run that did the work from the one to the producer."""


class OpenTelemetryObserver(SilentObserver):
    """Spans for one service, through `tracer_provider` or else the one the process has set.

    Silent while there is none; one that is set later is found within a quarter of a second.  A span
    begins and ends in one task, as the current span of OpenTelemetry does.

    Args:
        service: Name of the service.
        tracer_provider: Where spans go; not given: wherever those of the application go.
        span_keys: Let keys and exception messages into spans.  Both may hold personal data.
        group: Consumer group; the service's name if not given.
    """

    def __init__(
        self,
        service: str,
        *,
        tracer_provider: otel.TracerProvider | None = None,
        span_keys: bool = False,
        group: str | None = None,
    ) -> None:
        self._service = _text(service)
        self._group = _text(group or service)
        self._span_keys = span_keys
        self._tracer: otel.Tracer | None = None
        self._sampling: KnownSampling | None = None
        self._next_look = 0.0
        if tracer_provider is not None:
            self._adopt(tracer_provider)

    def processing(self, event_type: str, topic: str, headers: Headers) -> AbstractContextManager[Span]:
        """Open the span `process <event type>`, a child of the producer's and linked to it."""
        tracer = self._tracer or self._find_tracer()
        if tracer is None:
            return _SILENT_PHASE
        carrier = _carrier(headers)
        if self._sampling is not None and (unrecorded := self._sampling.delivery(carrier)) is not None:
            return unrecorded
        event_type = _text(event_type)
        parent = _W3C.extract(carrier, Context())
        producer = otel.get_current_span(parent).get_span_context()
        span = tracer.start_span(
            f"process {event_type}".rstrip(),
            context=parent,
            kind=otel.SpanKind.CONSUMER,
            attributes={
                "messaging.system": "kafka",
                "messaging.operation.name": "process",
                "messaging.operation.type": "process",
                "messaging.destination.name": _text(topic),
                "messaging.consumer.group.name": self._group,
                "idempotency.service": self._service,
                "idempotency.event_type": event_type,
            },
            links=[otel.Link(producer)] if producer.is_valid else [],
        )
        return _RecordedPhase(span, self._span_keys)

    def phase(self, phase: Phase, event_type: str = "") -> AbstractContextManager[Span]:
        """Open a span named after `phase`, below the current one."""
        tracer = self._tracer or self._find_tracer()
        if tracer is None:
            return _SILENT_PHASE
        if self._sampling is not None and (unrecorded := self._sampling.phase()) is not None:
            return unrecorded
        attributes = {"idempotency.service": self._service}
        if event_type:
            attributes["idempotency.event_type"] = _text(event_type)
        return _RecordedPhase(tracer.start_span(phase.value, attributes=attributes), self._span_keys)

    def inject(self, headers: list[tuple[str, bytes]]) -> None:
        """Put the context of the current span into `headers`, in place of one that is there."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier)
        if carrier:
            headers[:] = [header for header in headers if header[0] not in _W3C_HEADERS]
            headers.extend((name, value.encode()) for name, value in carrier.items())

    def _find_tracer(self) -> otel.Tracer | None:
        if monotonic() >= self._next_look:
            self._adopt(otel.get_tracer_provider())
        return self._tracer

    def _adopt(self, provider: otel.TracerProvider) -> None:
        if isinstance(provider, otel.ProxyTracerProvider):
            self._next_look = monotonic() + _LOOK_INTERVAL
            return
        self._next_look = inf
        tracer = provider.get_tracer("integr8s_idem")
        # What an SDK gives that was switched off by OTEL_SDK_DISABLED.
        if isinstance(tracer, otel.NoOpTracer):
            return
        if hasattr(tracer, "sampler"):
            # It is the SDK's, which therefore is loaded.
            from integr8s_idem.telemetry.sampling import known_sampling

            self._sampling = known_sampling(tracer)
        self._tracer = tracer


class _RecordedPhase:
    """One span, current from enter to exit."""

    __slots__ = ("_span", "_span_keys", "_token")

    @property
    def recorded(self) -> bool:
        """See `is_recorded`."""
        return self._span.is_recording()

    def __init__(self, span: otel.Span, span_keys: bool) -> None:
        self._span = span
        self._span_keys = span_keys

    def __enter__(self) -> Span:
        self._token = otel_context.attach(otel.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        otel_context.detach(self._token)
        if error is not None and self._span.is_recording():
            self._record(error)
        self._span.end()

    def link(self, trace: TraceLink) -> None:
        run = otel.SpanContext(
            trace_id=int.from_bytes(trace.trace_id),
            span_id=int.from_bytes(trace.span_id),
            is_remote=True,
            # A run that was not recorded leaves no trace link behind.
            trace_flags=otel.TraceFlags(otel.TraceFlags.SAMPLED),
        )
        if run.is_valid and self._span.is_recording():
            self._span.add_link(run, _RUN_LINK)

    def annotate(self, name: str, value: str | int) -> None:
        if name == KEY_ATTRIBUTE and not self._span_keys:
            return
        self._span.set_attribute(name, _text(value) if isinstance(value, str) else value)

    def trace(self) -> TraceLink | None:
        ours = self._span.get_span_context()
        if not (self._span.is_recording() and ours.is_valid and ours.trace_flags.sampled):
            return None
        return TraceLink(ours.trace_id.to_bytes(16), ours.span_id.to_bytes(8))

    def _record(self, error: BaseException) -> None:
        name = _type_name(error)
        if not isinstance(error, Exception):
            # A cancelled phase was stopped by us: nothing is wrong with it.
            self._span.set_attribute("idempotency.interrupted", name)
            return
        event = {"exception.type": name}
        if self._span_keys:
            event["exception.message"] = _text(redacted(text_of(error)))
        self._span.add_event("exception", event)
        self._span.set_attribute("error.type", name)
        self._span.set_status(otel.Status(otel.StatusCode.ERROR, name))


def _carrier(headers: Headers) -> dict[str, str]:
    """The W3C headers; of several with one name the last, which is that of the nearest hop."""
    # Kafka allows a header without a value, whatever our type says.
    return {name: value.decode("latin-1") for name, value in headers if name in _W3C_HEADERS and value}


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text(value: str) -> str:
    """`value` as an exporter can encode it: one lone surrogate would cost the whole batch of spans."""
    value = value[:MAX_TEXT]
    return value if value.isascii() else value.encode("utf-8", "replace").decode()
