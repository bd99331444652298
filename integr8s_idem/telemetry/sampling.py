"""Predict which spans the SDK does not record, without asking its sampler.

If one trace in ten is recorded, asking the sampler about each span of the other nine costs more than all metrics.
OpenTelemetry's default sampler `ParentBased` is predictable: a span whose parent is not sampled is not recorded.  Any
other sampler is asked for each span.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from threading import get_ident, local
from types import TracebackType
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from integr8s_idem.telemetry import SILENT_PHASE, Span

_SILENT_SPAN: Final = SILENT_PHASE.__enter__()
_W3C: Final = TraceContextTextMapPropagator()
_NOT_SAMPLED: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f][02468ace]")
"""A valid `traceparent` of a trace that is not sampled.  The SDK handles all others."""
(_SPAN_KEY,) = otel.set_span_in_context(otel.INVALID_SPAN, Context())


class DrawnIds(RandomIdGenerator):
    """Generates random ids that can be drawn in advance, since an id decides whether its trace is recorded."""

    def __init__(self) -> None:
        self._next = _Next()

    def draw(self) -> int:
        """Return a new trace id."""
        return super().generate_trace_id()

    def use(self, trace_id: int) -> None:
        """Use `trace_id` for the next trace that this thread starts."""
        self._next.trace_id = trace_id

    def generate_trace_id(self) -> int:
        drawn, self._next.trace_id = self._next.trace_id, 0
        return drawn or self.draw()


class _Next(local):
    trace_id = 0


class KnownSampling:
    """Predicts what a tracer with a known sampler does not record."""

    def __init__(self, tracer: otel.Tracer, root: object) -> None:
        self._tracer = tracer
        ids = getattr(tracer, "id_generator", None)
        self._ids = ids if isinstance(ids, DrawnIds) and type(root) is TraceIdRatioBased else None
        self._bound = root.bound if isinstance(root, TraceIdRatioBased) else 0

    def delivery(self, carrier: Mapping[str, str]) -> AbstractContextManager[Span] | None:
        """Return a phase for a delivery with these W3C headers if it is not recorded, else `None`."""
        traceparent = carrier.get("traceparent")
        if traceparent is None:
            return self._root()
        return _Unrecorded(UnrecordedSpan(self, carrier)) if _NOT_SAMPLED.fullmatch(traceparent) else None

    def phase(self) -> AbstractContextManager[Span] | None:
        """Return a phase that starts now if it is not recorded, else `None`."""
        current = otel_context.get_current()
        if type(current) is _UnrecordedContext:
            return SILENT_PHASE
        parent = otel.get_current_span(current).get_span_context()
        if not parent.is_valid:
            return self._root()
        return None if parent.trace_flags.sampled else SILENT_PHASE

    def begin(self, carrier: Mapping[str, str], trace_id: int) -> otel.Span:
        """Let the SDK start the span that is not recorded."""
        if self._ids is not None and trace_id:
            self._ids.use(trace_id)
        return self._tracer.start_span("unrecorded", context=_W3C.extract(carrier, Context()))

    def _root(self) -> AbstractContextManager[Span] | None:
        if self._ids is None:
            return None
        trace_id = self._ids.draw()
        if trace_id & TraceIdRatioBased.TRACE_ID_LIMIT >= self._bound:
            return _Unrecorded(UnrecordedSpan(self, {}, trace_id))
        self._ids.use(trace_id)
        return None


def known_sampling(tracer: otel.Tracer) -> KnownSampling | None:
    """Return the prediction for `tracer`, or `None` if its sampler may not follow the parent's decision."""
    sampler = getattr(tracer, "sampler", None)
    # A subclass may use a different root sampler, but must not override the decision.
    if getattr(type(sampler), "should_sample", None) is not ParentBased.should_sample:
        return None
    below_unsampled = [getattr(sampler, f"_{place}_parent_not_sampled", None) for place in ("local", "remote")]
    if any(decides is not ALWAYS_OFF for decides in below_unsampled):
        return None
    return KnownSampling(tracer, getattr(sampler, "_root", None))


class UnrecordedSpan(otel.NonRecordingSpan):
    """A span that is not recorded, with a context that is created on demand, since it is rarely needed."""

    def __init__(self, sampling: KnownSampling, carrier: Mapping[str, str], trace_id: int = 0) -> None:
        self._sampling = sampling
        self._carrier = carrier
        self._trace_id = trace_id
        self._made: list[otel.SpanContext] = []
        self._making_thread = 0
        """The thread that is creating the context."""

    def get_span_context(self) -> otel.SpanContext:
        """Return the context for child spans and other services, so that they are not recorded either."""
        if not self._made:
            if self._making_thread == get_ident():
                # The SDK logs a warning about the headers, and a log filter asks for the current span.
                return otel.INVALID_SPAN_CONTEXT
            self._making_thread = get_ident()
            try:
                self._made.append(self._sampling.begin(self._carrier, self._trace_id).get_span_context())
            finally:
                self._making_thread = 0
        # If two threads have called this concurrently, both use the first result.
        return self._made[0]

    def __repr__(self) -> str:
        return f"UnrecordedSpan({self.get_span_context()!r})"


class _UnrecordedContext(Context):
    """An OpenTelemetry context whose span is not recorded; setting another span in it yields a plain context."""


class _Unrecorded:
    """A delivery or phase with an unrecorded span that is current within a `with` block."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: otel.Span) -> None:
        self._span = span

    def __enter__(self) -> Span:
        context = _UnrecordedContext({**otel_context.get_current(), _SPAN_KEY: self._span})
        self._token = otel_context.attach(context)
        return _SILENT_SPAN

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        otel_context.detach(self._token)
