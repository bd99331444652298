"""Spans, recorded with the OpenTelemetry SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from importlib.metadata import version
from time import perf_counter
from typing import Any

import pytest
from opentelemetry import trace as otel
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.util._once import Once

from integr8s_idem.config import KafkaSettings
from integr8s_idem.records import TraceLink
from integr8s_idem.telemetry import SILENT, Headers, Observer, Past, Phase
from integr8s_idem.telemetry import opentelemetry as under_test
from integr8s_idem.telemetry.conventions import KEY
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver
from integr8s_idem.telemetry.setup import publisher_observer
from tests.support.received import received

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
FROM_PRODUCER = [("event_id", b"1"), ("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01".encode()), ("tracestate", b"v=1")]


class Recording:
    """A provider and the recorded spans."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def observer(self, **options: Any) -> Observer:
        return OpenTelemetryObserver("billing", tracer_provider=self.provider, **options)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.all}

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def only(self) -> ReadableSpan:
        (span,) = self.all
        return span


@pytest.fixture
def recording() -> Recording:
    return Recording()


def context_of(span: ReadableSpan) -> otel.SpanContext:
    context = span.get_span_context()
    assert isinstance(context, otel.SpanContext)
    return context


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_a_delivery_is_a_consumer_span_by_the_messaging_conventions(recording: Recording) -> None:
    observer = recording.observer(group="billing-group", client_id="till", servers="[::1]:9092,other:9093")

    with observer.processing(received(topic="shop.order_placed"), "order_placed", "event-1"):
        pass

    assert recording.only.name == "process shop.order_placed"
    assert recording.only.kind is SpanKind.CONSUMER
    assert attributes_of(recording.only) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "shop.order_placed",
        "messaging.destination.partition.id": "3",
        "messaging.kafka.offset": 1042,
        "messaging.message.id": "event-1",
        "messaging.consumer.group.name": "billing-group",
        "messaging.client.id": "till",
        "server.address": "::1",
        "server.port": 9092,
        "idempotency.service": "billing",
        "idempotency.event_type": "order_placed",
        "idempotency.delivery": "shop.order_placed:3:1042",
    }


def test_spans_name_the_version_of_the_library_and_of_the_conventions(recording: Recording) -> None:
    with recording.observer().phase(Phase.HANDLE):
        pass

    scope = recording.only.instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.version, scope.schema_url) == (
        "integr8s_idem",
        version("integr8s-idem"),
        "https://opentelemetry.io/schemas/1.44.0",
    )


def test_a_message_that_cannot_be_decoded_has_a_span_without_type_and_id(recording: Recording) -> None:
    with recording.observer().processing(received(), "", "") as span:
        span.fail("malformed")

    attributes = attributes_of(recording.only)
    assert not {"idempotency.event_type", "messaging.message.id"} & attributes.keys()
    assert attributes["error.type"] == recording.only.status.description == "malformed"
    assert recording.only.status.status_code is StatusCode.ERROR


def test_a_phase_that_began_earlier_has_its_own_start(recording: Recording) -> None:
    with recording.observer().phase(Phase.WAIT, past=Past(perf_counter() - 60, {"idempotency.looks": 3})):
        assert not otel.get_current_span().is_recording(), "a phase that is over is not current"

    span = recording.only
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time >= 60 * 1_000_000_000
    assert attributes_of(span) == {"idempotency.service": "billing", "idempotency.looks": 3}


@pytest.mark.parametrize("span_keys", [True, False])
def test_keys_of_past_phases_are_in_spans_only_if_span_keys_is_set(recording: Recording, span_keys: bool) -> None:
    with recording.observer(span_keys=span_keys).phase(
        Phase.RESERVE, past=Past(perf_counter(), {KEY: "order:1\ud800"})
    ):
        pass

    assert attributes_of(recording.only).get(KEY) == ("order:1?" if span_keys else None)


def test_a_sent_message_is_a_producer_span_whose_context_it_carries(recording: Recording) -> None:
    observer, headers = recording.observer(client_id="till", servers="kafka:9092"), list[tuple[str, bytes]]()

    with observer.sending("shipments", "event-2") as span:
        observer.inject(headers)
        span.annotate("messaging.kafka.offset", 7)

    sent = recording.only
    assert (sent.name, sent.kind, sent.parent) == ("send shipments", SpanKind.PRODUCER, None)
    assert attributes_of(sent) == {
        "messaging.system": "kafka",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "shipments",
        "messaging.message.id": "event-2",
        "messaging.kafka.offset": 7,
        "messaging.client.id": "till",
        "server.address": "kafka",
        "server.port": 9092,
        "idempotency.service": "billing",
    }
    assert otel.format_span_id(context_of(sent).span_id).encode() in dict(headers)["traceparent"]


def test_a_message_that_was_made_earlier_is_sent_in_the_trace_of_its_headers(recording: Recording) -> None:
    with recording.observer().phase(Phase.HANDLE), recording.observer().sending("shipments", headers=FROM_PRODUCER):
        pass

    sent = recording.spans["send shipments"]
    assert sent.kind is SpanKind.CLIENT, "the message does not carry its context"
    assert sent.parent is not None
    assert otel.format_span_id(sent.parent.span_id) == SPAN_ID
    assert [otel.format_span_id(link.context.span_id) for link in sent.links] == [SPAN_ID]


@pytest.mark.parametrize(("headers", "linked"), [(FROM_PRODUCER, [SPAN_ID]), ([], [])])
def test_a_message_that_is_passed_on_is_sent_within_the_current_span(
    recording: Recording, headers: Headers, linked: list[str]
) -> None:
    observer = recording.observer()

    with observer.phase(Phase.FAIL), observer.sending("shipments", headers=headers, in_current=True):
        pass

    sent = recording.spans["send shipments"]
    assert sent.kind is SpanKind.CLIENT
    assert sent.parent is not None
    assert sent.parent.span_id == context_of(recording.spans["idempotency.fail"]).span_id
    assert [otel.format_span_id(link.context.span_id) for link in sent.links] == linked


def test_a_batch_is_a_child_of_its_first_recorded_member_and_linked_to_all(recording: Recording) -> None:
    observer = recording.observer(group="till")
    contexts = [Context()]
    for number in range(2):
        context = Context()
        context.run(observer.processing(received(), "order_placed", f"event-{number}").__enter__)
        contexts.append(context)

    with observer.batch("order_placed", contexts, "index"):
        pass

    batch = recording.only
    members = [context.run(otel.get_current_span).get_span_context().span_id for context in contexts[1:]]
    assert batch.name == "idempotency.handle_batch"
    assert attributes_of(batch)["messaging.batch.message_count"] == 3
    assert attributes_of(batch)["idempotency.handler"] == "index"
    assert attributes_of(batch)["messaging.destination.name"] == "orders"
    assert attributes_of(batch)["messaging.consumer.group.name"] == "till"
    assert batch.parent is not None
    assert batch.parent.span_id == members[0]
    assert [link.context.span_id for link in batch.links] == members
    assert [dict(link.attributes or {}) for link in batch.links] == [{"idempotency.relation": "member"}] * 2


def test_a_batch_of_several_topics_names_none(recording: Recording) -> None:
    observer, contexts = recording.observer(), [Context(), Context()]
    for number, context in enumerate(contexts):
        delivery = observer.processing(received(topic=f"orders-{number}"), "order_placed", f"event-{number}")
        context.run(delivery.__enter__)

    with observer.batch("order_placed", contexts, "index"):
        pass

    assert "messaging.destination.name" not in attributes_of(recording.only)


def test_a_batch_without_a_recorded_member_is_not_recorded(recording: Recording) -> None:
    with recording.observer().batch("order_placed", [Context()], "index"):
        pass

    assert not recording.all


def test_a_delivery_is_linked_to_its_producer_and_part_of_its_trace(recording: Recording) -> None:
    with recording.observer().processing(received(FROM_PRODUCER), "order_placed", "event-1"):
        pass

    (link,) = recording.only.links
    parent = recording.only.parent
    assert parent is not None
    assert (otel.format_trace_id(link.context.trace_id), otel.format_span_id(link.context.span_id)) == (
        TRACE_ID,
        SPAN_ID,
    )
    assert otel.format_span_id(parent.span_id) == SPAN_ID
    assert context_of(recording.only).trace_id == int(TRACE_ID, 16)


def test_a_delivery_without_a_producers_context_starts_a_trace(recording: Recording) -> None:
    """This also holds inside another span: the worker may have been started in a span that does not end."""
    with (
        recording.provider.get_tracer("app").start_as_current_span("startup"),
        recording.observer().processing(received(), "order_placed", "event-1"),
    ):
        pass

    delivery = recording.spans["process orders"]
    assert delivery.parent is None
    assert not delivery.links


def test_a_delivery_is_not_recorded_if_the_producer_did_not_sample(recording: Recording) -> None:
    headers = [("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-00".encode())]

    with recording.observer().processing(received(headers), "order_placed", "event-1") as span:
        assert span.trace() is None

    assert not recording.spans


@pytest.mark.parametrize(
    "value",
    [b"", b"\xff\xfe", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"x" * 100_000, "00-ü".encode(), None],
)
def test_a_damaged_traceparent_is_treated_as_missing(recording: Recording, value: bytes) -> None:
    with recording.observer().processing(
        received([("traceparent", value), ("tracestate", b"\xff")]), "order_placed", "event-1"
    ):
        pass

    assert recording.only.parent is None
    assert not recording.only.links


def test_the_last_of_two_traceparents_counts(recording: Recording) -> None:
    earlier = ("traceparent", f"00-{'1' * 32}-{'1' * 16}-01".encode())

    with recording.observer().processing(received([earlier, *FROM_PRODUCER]), "order_placed", "event-1"):
        pass

    assert context_of(recording.only).trace_id == int(TRACE_ID, 16)


@pytest.mark.parametrize("phase", Phase)
def test_a_phase_is_a_child_named_after_it(recording: Recording, phase: Phase) -> None:
    observer = recording.observer()

    with observer.processing(received(), "order_placed", "event-1"), observer.phase(phase, "order_placed"):
        pass

    child, parent = recording.spans[phase.value], recording.spans["process orders"]
    assert child.kind is SpanKind.INTERNAL
    assert child.parent is not None
    assert child.parent.span_id == context_of(parent).span_id
    assert attributes_of(child) == {"idempotency.service": "billing", "idempotency.event_type": "order_placed"}


async def test_concurrent_deliveries_have_separate_phases(recording: Recording) -> None:
    observer = recording.observer()
    all_open = asyncio.Barrier(3)

    async def handle(event_type: str) -> None:
        with observer.processing(received(), event_type, "event-1"):
            await all_open.wait()
            with observer.phase(Phase.HANDLE, event_type):
                await all_open.wait()

    await asyncio.gather(*(handle(name) for name in "abc"))

    found = [(str(attributes_of(span)["idempotency.event_type"]), context_of(span).trace_id) for span in recording.all]
    assert sorted(event_type for event_type, _ in found) == list("aabbcc")
    assert len(set(found)) == 3


def test_a_duplicate_links_to_the_run_that_did_the_work(recording: Recording) -> None:
    observer = recording.observer()
    with observer.processing(received(topic="first"), "order_placed", "event-1") as first:
        trace = first.trace()
    assert trace is not None

    with observer.processing(received(topic="duplicate"), "order_placed", "event-1") as duplicate:
        duplicate.link(trace)

    (link,) = recording.spans["process duplicate"].links
    assert link.context.span_id == context_of(recording.spans["process first"]).span_id
    assert dict(link.attributes or {}) == {"idempotency.relation": "run"}


@pytest.mark.parametrize("damaged", [TraceLink(b"", b""), TraceLink(bytes(16), bytes(8)), TraceLink(b"\1" * 99, b"\1")])
def test_a_damaged_trace_link_is_ignored(recording: Recording, damaged: TraceLink) -> None:
    with recording.observer().phase(Phase.REPLAY) as span:
        span.link(damaged)

    assert not recording.only.links


def test_no_key_is_in_a_span_by_default(recording: Recording) -> None:
    with recording.observer().phase(Phase.RESERVE) as span:
        span.annotate(KEY, "order:secret")
        span.annotate("idempotency.attempt", 2)

    assert "secret" not in recording.only.to_json()
    assert attributes_of(recording.only)["idempotency.attempt"] == 2


def test_keys_are_in_spans_if_span_keys_is_set(recording: Recording) -> None:
    with recording.observer(span_keys=True).phase(Phase.RESERVE) as span:
        span.annotate(KEY, "order:1")

    assert attributes_of(recording.only)[KEY] == "order:1"


def test_an_exception_marks_the_phase_as_failed_without_its_message(recording: Recording) -> None:
    with pytest.raises(LookupError), recording.observer().phase(Phase.HANDLE):
        raise LookupError("password=secret")

    span = recording.only
    assert span.status.status_code is StatusCode.ERROR
    assert attributes_of(span)["error.type"] == "LookupError"
    assert [dict(event.attributes or {}) for event in span.events] == [{"exception.type": "LookupError"}]
    assert "secret" not in span.to_json()


def test_exception_messages_are_in_spans_if_span_keys_is_set(recording: Recording) -> None:
    with pytest.raises(LookupError), recording.observer(span_keys=True).phase(Phase.HANDLE):
        raise LookupError("no order 7")

    (event,) = recording.only.events
    assert dict(event.attributes or {}) == {"exception.type": "LookupError", "exception.message": "no order 7"}


def test_a_cancelled_phase_is_interrupted_and_not_failed(recording: Recording) -> None:
    with pytest.raises(asyncio.CancelledError), recording.observer().phase(Phase.HANDLE):
        raise asyncio.CancelledError

    assert recording.only.status.status_code is StatusCode.UNSET
    assert attributes_of(recording.only)["idempotency.interrupted"] == "asyncio.exceptions.CancelledError"


def test_outgoing_messages_carry_the_context_of_the_current_span(recording: Recording) -> None:
    observer = recording.observer()
    headers = [("event_id", b"2"), ("traceparent", b"of somebody else")]

    with observer.processing(received(FROM_PRODUCER), "order_placed", "event-1") as span:
        observer.inject(headers)
        trace = span.trace()

    assert trace is not None
    assert headers == [
        ("event_id", b"2"),
        ("traceparent", f"00-{TRACE_ID}-{trace.span_id.hex()}-01".encode()),
        ("tracestate", b"v=1"),
    ]


def test_outside_of_a_span_headers_are_not_changed(recording: Recording) -> None:
    headers = [("event_id", b"2"), ("traceparent", b"of somebody else")]

    recording.observer().inject(headers)

    assert headers == [("event_id", b"2"), ("traceparent", b"of somebody else")]


def test_an_unsampled_span_has_no_trace_link() -> None:
    observer = Recording(ParentBased(ALWAYS_OFF)).observer()

    with observer.processing(received(), "order_placed", "event-1") as span:
        span.link(TraceLink(b"\1" * 16, b"\1" * 8))
        span.annotate("n", 1)

        assert span.trace() is None


def test_invalid_text_does_not_prevent_exporting_its_span(recording: Recording) -> None:
    with recording.observer(span_keys=True).processing(received(topic="\udfff"), "\ud800", "event-1") as span:
        span.annotate(KEY, "\ud800" + "x" * 1_000_000)

    encoded = encode_spans([recording.only]).SerializeToString()
    assert len(encoded) < 5_000
    assert ExportTraceServiceRequest.FromString(encoded).resource_spans


@pytest.fixture
def no_sdk(monkeypatch: pytest.MonkeyPatch) -> Callable[[otel.TracerProvider], None]:
    """Remove the global TracerProvider, and return a function that sets one."""
    monkeypatch.setattr(otel, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(otel, "_TRACER_PROVIDER_SET_ONCE", Once())
    return otel.set_tracer_provider


def test_a_publisher_outside_of_services_records_spans_when_the_process_has_an_sdk(
    no_sdk: Callable[[otel.TracerProvider], None], recording: Recording
) -> None:
    no_sdk(recording.provider)

    with publisher_observer(KafkaSettings(bootstrap_servers="kafka:9092")).sending("orders", "event-1"):
        pass

    attributes = attributes_of(recording.only)
    assert recording.only.name == "send orders"
    assert attributes["server.address"] == "kafka"
    assert "idempotency.service" not in attributes


@pytest.mark.usefixtures("no_sdk")
def test_without_an_sdk_no_span_is_created() -> None:
    observer = OpenTelemetryObserver("billing")

    assert observer.processing(received(FROM_PRODUCER), "order_placed", "event-1") is SILENT.phase(Phase.HANDLE)
    assert observer.phase(Phase.HANDLE) is SILENT.phase(Phase.HANDLE)


def test_an_sdk_that_is_set_later_is_found(
    no_sdk: Callable[[otel.TracerProvider], None], recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(under_test, "monotonic", lambda: now)
    observer = OpenTelemetryObserver("billing")
    assert observer.phase(Phase.HANDLE) is SILENT.phase(Phase.HANDLE)

    no_sdk(recording.provider)
    now += 0.25
    with observer.phase(Phase.HANDLE):
        pass

    assert recording.only.name == "idempotency.handle"


def test_with_a_disabled_sdk_no_span_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    observer = OpenTelemetryObserver("billing", tracer_provider=TracerProvider(shutdown_on_exit=False))

    assert observer.phase(Phase.HANDLE) is SILENT.phase(Phase.HANDLE)
