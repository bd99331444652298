"""Spans with the OpenTelemetry API, according to its semantic conventions for messaging.

The span of a delivery is a child of the producer's span and linked to it.  The conventions require the link.  With the
parent, a request is one trace across all services, and the producer's sampling decision applies to the whole trace.  A
message without a trace context starts a new trace, independent of the span in which the worker was started.
"""

from __future__ import annotations

import contextvars
from asyncio import CancelledError
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.metadata import version
from math import inf
from time import monotonic, perf_counter, time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Final

from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from integr8s_idem.config.message_text import text_of
from integr8s_idem.config.urls import redacted
from integr8s_idem.records import TraceLink
from integr8s_idem.telemetry import SILENT_PHASE, Headers, Past, Phase, ReceivedMessage, Relation, SilentObserver, Span
from integr8s_idem.telemetry import conventions as names
from integr8s_idem.telemetry.guarded_spans import end_span, start_span
from integr8s_idem.telemetry.span_values import W3C_HEADERS, carrier_of, client_attributes, context_of, text

if TYPE_CHECKING:
    from integr8s_idem.telemetry.sampling import KnownSampling

BATCH_SPAN: Final = "idempotency.handle_batch"
_SDK_CHECK_INTERVAL: Final = 0.25
"""Seconds between two checks for an SDK.  A check takes 2 µs, more than all other telemetry together."""

_TOPIC: Final = otel_context.create_key("integr8s-idem-topic")
"""Where the context of a recorded delivery has its topic, for the span of a batch."""
_W3C: Final = TraceContextTextMapPropagator()


class OpenTelemetryObserver(SilentObserver):
    """Creates spans for one service with `tracer_provider`, or with the global one.

    Does nothing while there is no provider; a global provider that is set later is found within 0.25 seconds.  A span
    must start and end in the same task, like OpenTelemetry's current span.

    Args:
        service: Name of the service; empty for messages that are sent outside of services.
        tracer_provider: Provider of the tracer; by default, the global one.
        span_keys: Whether spans may contain keys and exception messages, which may contain personal data.
        group: Consumer group; by default, the service's name.
        client_id: Of the Kafka client.
        servers: Addresses of the brokers, as `host:port`, separated by commas.  Spans name the first one.
    """

    def __init__(
        self,
        service: str,
        *,
        tracer_provider: otel.TracerProvider | None = None,
        span_keys: bool = False,
        group: str | None = None,
        client_id: str = "",
        servers: str = "",
    ) -> None:
        self._service = text(service)
        client = client_attributes(client_id, servers)
        self._consumer = {
            names.SYSTEM: "kafka",
            names.OPERATION_NAME: "process",
            names.OPERATION_TYPE: "process",
            names.GROUP: text(group or service),
            names.SERVICE: self._service,
            **client,
        }
        self._producer = {
            names.SYSTEM: "kafka",
            names.OPERATION_NAME: "send",
            names.OPERATION_TYPE: "send",
            **client,
        }
        if service:
            self._producer[names.SERVICE] = self._service
        self._span_keys = span_keys
        self._tracer: otel.Tracer | None = None
        self._sampling: KnownSampling | None = None
        self._next_sdk_check = 0.0
        if tracer_provider is not None:
            self._adopt(tracer_provider)

    def processing(self, message: ReceivedMessage, event_type: str, event_id: str) -> AbstractContextManager[Span]:
        """Start the span `process <topic>`, as a child of the producer's span and linked to it."""
        tracer = self._tracer or self._find_tracer()
        if tracer is None:
            return SILENT_PHASE
        carrier = carrier_of(message.headers)
        if self._sampling is not None and (unrecorded := self._sampling.delivery(carrier)) is not None:
            return unrecorded
        parent = _W3C.extract(carrier, Context())
        producer = otel.get_current_span(parent).get_span_context()
        topic, partition, offset = text(message.topic), str(message.partition), message.offset
        attributes = {
            **self._consumer,
            names.DESTINATION: topic,
            names.PARTITION: partition,
            names.OFFSET: offset,
            names.DELIVERY: f"{topic}:{partition}:{offset}",
        }
        if event_type:
            attributes[names.EVENT_TYPE] = text(event_type)
        if event_id:
            attributes[names.MESSAGE_ID] = text(event_id)
        span = start_span(
            tracer,
            f"process {topic}",
            context=parent,
            kind=otel.SpanKind.CONSUMER,
            attributes=attributes,
            links=[otel.Link(producer)] if producer.is_valid else [],
        )
        return _RecordedDelivery(span, self._span_keys, topic)

    def phase(
        self, phase: Phase, event_type: str = "", *, attempt: int = 0, handler: str = "", past: Past | None = None
    ) -> AbstractContextManager[Span]:
        """Start a span named after `phase`, as a child of the current span."""
        tracer = self._tracer or self._find_tracer()
        if tracer is None:
            return SILENT_PHASE
        if self._sampling is not None and (unrecorded := self._sampling.phase()) is not None:
            return unrecorded
        attributes: dict[str, str | int] = {names.SERVICE: self._service}
        if event_type:
            attributes[names.EVENT_TYPE] = text(event_type)
        if handler:
            attributes[names.HANDLER] = text(handler)
        if attempt:
            attributes[names.ATTEMPT] = attempt
        if past is None:
            return _RecordedPhase(start_span(tracer, phase.value, attributes=attributes), self._span_keys)
        attributes.update(past.attributes or {})
        key = attributes.pop(names.KEY, None)
        if key is not None and self._span_keys:
            attributes[names.KEY] = text(str(key))
        start = time_ns() - int((perf_counter() - past.since) * 1e9)
        return _PastPhase(start_span(tracer, phase.value, attributes=attributes, start_time=start), self._span_keys)

    def batch(
        self, event_type: str, members: Sequence[contextvars.Context], handler: str = ""
    ) -> AbstractContextManager[Span]:
        """Start a span for a call of a batch handler, as a child of its first member's span, with links to all.

        Members that are not recorded have no link; without any recorded member, there is no span.
        """
        tracer = self._tracer or self._find_tracer()
        if tracer is None:
            return SILENT_PHASE
        spans = [each.run(otel.get_current_span) for each in members]
        recorded = [span for span in spans if span.is_recording()]
        if not recorded:
            return SILENT_PHASE
        attributes = {
            **self._consumer,
            names.EVENT_TYPE: text(event_type),
            names.HANDLER: text(handler),
            names.BATCH_SIZE: len(members),
        }
        topics = {each.run(otel_context.get_value, _TOPIC) for each in members} - {None}
        if len(topics) == 1:
            attributes[names.DESTINATION] = str(topics.pop())
        span = start_span(
            tracer,
            BATCH_SPAN,
            context=otel.set_span_in_context(recorded[0], Context()),
            attributes=attributes,
            links=[otel.Link(each.get_span_context(), {names.RELATION: Relation.MEMBER.value}) for each in recorded],
        )
        return _RecordedPhase(span, self._span_keys)

    def sending(
        self, topic: str, event_id: str = "", headers: Headers | None = None, *, in_current: bool = False
    ) -> AbstractContextManager[Span]:
        """Start the span `send <topic>`, as a child of the current span, or of the span in `headers`.

        By the conventions, its kind is PRODUCER if the message carries its context.  Otherwise it is CLIENT, with a
        link to the context that the message carries.
        """
        tracer = self._tracer or self._find_tracer()
        if tracer is None:
            return SILENT_PHASE
        carrier = carrier_of(headers or ())
        has_parent_in_headers = bool(carrier) and not in_current
        if self._sampling is not None:
            unrecorded = self._sampling.delivery(carrier) if has_parent_in_headers else self._sampling.phase()
            if unrecorded is not None:
                return unrecorded
        topic = text(topic)
        attributes = {**self._producer, names.DESTINATION: topic}
        if event_id:
            attributes[names.MESSAGE_ID] = text(event_id)
        carried = _W3C.extract(carrier, Context())
        creation = otel.get_current_span(carried).get_span_context()
        span = start_span(
            tracer,
            f"send {topic}",
            context=carried if has_parent_in_headers else None,
            kind=otel.SpanKind.PRODUCER if headers is None else otel.SpanKind.CLIENT,
            attributes=attributes,
            links=[otel.Link(creation)] if creation.is_valid else [],
        )
        return _RecordedPhase(span, self._span_keys)

    def inject(self, headers: list[tuple[str, bytes]]) -> None:
        """Set the context of the current span in `headers`, replacing an existing one."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier)
        if carrier:
            headers[:] = [header for header in headers if header[0] not in W3C_HEADERS]
            headers.extend((name, value.encode()) for name, value in carrier.items())

    def _find_tracer(self) -> otel.Tracer | None:
        if monotonic() >= self._next_sdk_check:
            self._adopt(otel.get_tracer_provider())
        return self._tracer

    def _adopt(self, provider: otel.TracerProvider) -> None:
        if isinstance(provider, otel.ProxyTracerProvider):
            self._next_sdk_check = monotonic() + _SDK_CHECK_INTERVAL
            return
        self._next_sdk_check = inf
        tracer = provider.get_tracer("integr8s_idem", version("integr8s-idem"), schema_url=names.SCHEMA_URL)
        # An SDK that is disabled by OTEL_SDK_DISABLED returns this tracer.
        if isinstance(tracer, otel.NoOpTracer):
            return
        if hasattr(tracer, "sampler"):
            # The tracer belongs to the SDK, so importing the SDK costs nothing.
            from integr8s_idem.telemetry.sampling import known_sampling

            self._sampling = known_sampling(tracer)
        self._tracer = tracer


class _RecordedPhase:
    """A span that is current within a `with` block."""

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
        end_span(self._span)

    def link(self, trace: TraceLink, relation: Relation = Relation.RUN) -> None:
        other = context_of(trace)
        if other.is_valid and self._span.is_recording():
            self._span.add_link(other, {names.RELATION: relation.value})

    def annotate(self, name: str, value: str | int) -> None:
        if name == names.KEY and not self._span_keys:
            return
        self._span.set_attribute(name, text(value) if isinstance(value, str) else value)

    def fail(self, error: BaseException | str) -> None:
        if isinstance(error, BaseException):
            self._record(error)
        else:
            self._mark_failed(error)

    def trace(self) -> TraceLink | None:
        context = self._span.get_span_context()
        if not (self._span.is_recording() and context.is_valid and context.trace_flags.sampled):
            return None
        return TraceLink(context.trace_id.to_bytes(16), context.span_id.to_bytes(8))

    def _record(self, error: BaseException) -> None:
        name = names.error_type_of(error)
        if isinstance(error, CancelledError | GeneratorExit):
            # A cancellation is not an error of the phase.
            self._span.set_attribute(names.INTERRUPTED, name)
            return
        event = {names.EXCEPTION_TYPE: name}
        if self._span_keys:
            event[names.EXCEPTION_MESSAGE] = text(redacted(text_of(error)))
        self._span.add_event("exception", event)
        self._mark_failed(name)

    def _mark_failed(self, kind: str) -> None:
        self._span.set_attribute(names.ERROR_TYPE, kind)
        self._span.set_status(otel.Status(otel.StatusCode.ERROR, kind))


class _RecordedDelivery(_RecordedPhase):
    """The span of a delivery, within which its topic is known."""

    __slots__ = ("_topic",)

    def __init__(self, span: otel.Span, span_keys: bool, topic: str) -> None:
        super().__init__(span, span_keys)
        self._topic = topic

    def __enter__(self) -> Span:
        context = otel_context.set_value(_TOPIC, self._topic, otel.set_span_in_context(self._span))
        self._token = otel_context.attach(context)
        return self


class _PastPhase(_RecordedPhase):
    """A span of a phase that is over: it is never current."""

    __slots__ = ()

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end_span(self._span)
