"""Deliveries whose trace is not recorded: no span is started, but the decision is propagated downstream."""

from __future__ import annotations

import random
from collections.abc import Sequence
from threading import Thread

import pytest
from opentelemetry import baggage
from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind
from opentelemetry.util.types import Attributes

from integr8s_idem.telemetry import SILENT, Phase
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver
from integr8s_idem.telemetry.sampling import DrawnIds
from tests.support.received import received

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
NOT_SAMPLED = [("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-00".encode()), ("tracestate", b"v=1")]
NOTHING = SILENT.phase(Phase.HANDLE)


class Sdk:
    """An SDK, an observer that uses it, and the recorded spans."""

    def __init__(self, sampler: Sampler, *, drawn: bool = True) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(
            sampler=sampler, id_generator=DrawnIds() if drawn else None, shutdown_on_exit=False
        )
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.observer = OpenTelemetryObserver("billing", tracer_provider=self.provider)
        self.application = self.provider.get_tracer("application")

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]


def one_in(share: int) -> Sampler:
    return ParentBased(TraceIdRatioBased(1 / share))


def none_recorded() -> Sampler:
    return ParentBased(TraceIdRatioBased(0.0))


def injected(sdk: Sdk) -> dict[str, str]:
    headers: list[tuple[str, bytes]] = []
    sdk.observer.inject(headers)
    return {name: value.decode() for name, value in headers}


def test_outgoing_messages_of_an_unsampled_delivery_carry_the_decision_of_its_producer() -> None:
    sdk = Sdk(ParentBased(ALWAYS_ON))

    with sdk.observer.processing(received(NOT_SAMPLED), "order_placed", "event-1"), sdk.observer.phase(Phase.HANDLE):
        headers = injected(sdk)

    version, trace_id, span_id, flags = headers["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE_ID, "00")
    assert span_id not in (SPAN_ID, "0" * 16)
    assert headers["tracestate"] == "v=1"
    assert not sdk.spans


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn ids", "ids of the SDK"])
def test_spans_below_an_unsampled_root_are_not_sampled(drawn: bool) -> None:
    sdk = Sdk(none_recorded(), drawn=drawn)

    with sdk.observer.processing(received(), "order_placed", "event-1"):
        headers = [(name, value.encode()) for name, value in injected(sdk).items()]
    downstream = Sdk(ParentBased(ALWAYS_ON))
    with downstream.observer.processing(received(headers, topic="invoices"), "invoice_sent", "event-1"):
        assert injected(downstream)["traceparent"].split("-")[1] == injected_trace_id(headers)

    assert not sdk.spans
    assert not downstream.spans


def injected_trace_id(headers: Sequence[tuple[str, bytes]]) -> str:
    return dict(headers)["traceparent"].decode().split("-")[1]


def test_the_context_of_an_unsampled_delivery_is_created_once() -> None:
    sdk = Sdk(none_recorded())
    found: list[otel.SpanContext] = []

    with sdk.observer.processing(received(), "order_placed", "event-1"), sdk.observer.phase(Phase.HANDLE):
        span = otel.get_current_span()
        threads = [Thread(target=lambda: found.append(span.get_span_context())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.append(otel.get_current_span().get_span_context())

    assert len({(context.trace_id, context.span_id) for context in found}) == 1
    assert found[0].is_valid
    assert not found[0].trace_flags.sampled
    assert not span.is_recording()
    assert otel.format_trace_id(found[0].trace_id) in repr(span)


def test_spans_of_a_handler_are_not_recorded_if_its_delivery_is_not() -> None:
    sdk = Sdk(ParentBased(ALWAYS_ON))

    with (
        sdk.observer.processing(received(NOT_SAMPLED), "order_placed", "event-1"),
        sdk.observer.phase(Phase.HANDLE),
        sdk.application.start_as_current_span("select"),
    ):
        assert injected(sdk)["traceparent"].endswith("-00")

    assert not sdk.spans


def test_phases_of_an_unsampled_delivery_create_no_objects() -> None:
    sdk = Sdk(ParentBased(ALWAYS_ON))

    with sdk.observer.processing(received(NOT_SAMPLED), "order_placed", "event-1"):
        assert sdk.observer.phase(Phase.RESERVE, "order_placed") is NOTHING


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn ids", "ids of the SDK"])
def test_phases_below_an_unsampled_span_of_the_application_create_no_objects(drawn: bool) -> None:
    sdk = Sdk(none_recorded(), drawn=drawn)

    with sdk.application.start_as_current_span("request"):
        assert sdk.observer.phase(Phase.RESERVE) is NOTHING


def test_the_sdk_is_not_asked_for_spans_of_an_unsampled_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = Sdk(none_recorded())
    started: list[str] = []
    tracer = sdk.provider.get_tracer("integr8s_idem")
    monkeypatch.setattr(tracer, "start_span", lambda name, **_: started.append(name))

    for headers in ([], NOT_SAMPLED):
        with sdk.observer.processing(received(headers), "order_placed", "event-1"), sdk.observer.phase(Phase.HANDLE):
            pass

    assert started == []


def test_a_trace_started_by_a_handler_is_recorded_with_its_phases() -> None:
    sdk = Sdk(ParentBased(ALWAYS_ON))

    with (
        sdk.observer.processing(received(NOT_SAMPLED), "order_placed", "event-1"),
        sdk.application.start_as_current_span("nightly", context=Context()),
        sdk.observer.phase(Phase.RESERVE),
    ):
        pass

    assert sdk.names == ["idempotency.reserve", "nightly"]


def test_the_context_is_restored_after_an_unsampled_delivery() -> None:
    sdk = Sdk(none_recorded())
    before = otel_context.get_current()

    with pytest.raises(ZeroDivisionError), sdk.observer.processing(received(), "order_placed", "event-1"):
        raise ZeroDivisionError

    assert otel_context.get_current() is before


def test_baggage_is_kept_in_an_unsampled_delivery() -> None:
    sdk = Sdk(none_recorded())
    token = otel_context.attach(baggage.set_baggage("tenant", "7"))

    with sdk.observer.processing(received(), "order_placed", "event-1"):
        seen = baggage.get_baggage("tenant")
    otel_context.detach(token)

    assert seen == "7"


def test_a_trace_is_recorded_if_and_only_if_its_id_is_sampled() -> None:
    random.seed(1)
    sdk, bound = Sdk(one_in(10)), TraceIdRatioBased.get_bound_for_rate(0.1)
    others: list[bool] = []

    for _ in range(2_000):
        with sdk.observer.processing(received(), "order_placed", "event-1"):
            context = otel.get_current_span().get_span_context()
        others.append((context.trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < bound) == context.trace_flags.sampled)

    assert all(others)
    assert 150 < len(sdk.spans) < 250
    assert len({context_of(span).trace_id for span in sdk.spans}) == len(sdk.spans)


def test_a_phase_without_a_delivery_starts_a_trace_that_may_be_sampled() -> None:
    random.seed(2)
    sdk = Sdk(one_in(10))

    for _ in range(1_000):
        with sdk.observer.phase(Phase.HANDLE), sdk.application.start_as_current_span("select"):
            pass

    assert 60 < len(sdk.spans) / 2 < 140
    assert sdk.names == ["select", "idempotency.handle"] * (len(sdk.spans) // 2)


def context_of(span: ReadableSpan) -> otel.SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def test_a_drawn_id_is_used_once() -> None:
    ids = DrawnIds()
    drawn = ids.draw()
    ids.use(drawn)

    assert ids.generate_trace_id() == drawn
    assert ids.generate_trace_id() != drawn


def test_a_drawn_id_is_used_only_by_its_thread() -> None:
    ids, found = DrawnIds(), [0]
    ids.use(5)

    thread = Thread(target=lambda: found.append(ids.generate_trace_id()))
    thread.start()
    thread.join()

    assert found[-1] not in (0, 5)
    assert ids.generate_trace_id() == 5


class HandlersOnly(Sampler):
    """Records each handler, regardless of its delivery."""

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: otel.TraceState | None = None,
    ) -> SamplingResult:
        wanted = name == Phase.HANDLE.value
        return SamplingResult(Decision.RECORD_AND_SAMPLE if wanted else Decision.DROP)

    def get_description(self) -> str:
        return "HandlersOnly"


class CustomParentBased(ParentBased):
    should_sample = HandlersOnly.should_sample


@pytest.mark.parametrize(
    "sampler",
    [
        HandlersOnly(),
        CustomParentBased(ALWAYS_OFF),
        ParentBased(ALWAYS_OFF, local_parent_not_sampled=HandlersOnly()),
        ParentBased(HandlersOnly(), remote_parent_not_sampled=HandlersOnly(), local_parent_not_sampled=HandlersOnly()),
    ],
    ids=["custom", "subclass", "below local parents", "below all parents"],
)
@pytest.mark.parametrize("headers", [[], NOT_SAMPLED], ids=["no producer", "producer"])
def test_a_custom_sampler_is_asked_about_each_span(sampler: Sampler, headers: Sequence[tuple[str, bytes]]) -> None:
    sdk = Sdk(sampler)

    with sdk.observer.processing(received(headers), "order_placed", "event-1"), sdk.observer.phase(Phase.HANDLE):
        pass

    assert sdk.names == ["idempotency.handle"]


def test_a_custom_root_sampler_is_asked_about_new_traces() -> None:
    sdk = Sdk(ParentBased(ALWAYS_ON))

    with sdk.observer.processing(received(), "order_placed", "event-1"):
        pass

    assert sdk.names == ["process orders"]


@pytest.mark.parametrize(
    "traceparent",
    [
        f"00-{TRACE_ID}-{SPAN_ID}-0",
        f"00-{TRACE_ID}-{'0' * 16}-00",
        f"00-{'0' * 32}-{SPAN_ID}-00",
        f"00-{TRACE_ID}-{SPAN_ID}-00-x",
        f"ff-{TRACE_ID}-{SPAN_ID}-00",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-00",
        f"00-{TRACE_ID}-{SPAN_ID}-00\n\n",
    ],
)
def test_an_invalid_traceparent_is_ignored(traceparent: str) -> None:
    sdk = Sdk(ParentBased(ALWAYS_ON))

    with sdk.observer.processing(received([("traceparent", traceparent.encode())]), "order_placed", "event-1"):
        pass

    (span,) = sdk.spans
    assert span.parent is None


@pytest.mark.parametrize("traceparent", [f" 00-{TRACE_ID}-{SPAN_ID}-00 ", f"cc-{TRACE_ID}-{SPAN_ID}-00-more"])
def test_an_unusual_traceparent_is_parsed_by_the_sdk(traceparent: str) -> None:
    sdk = Sdk(ParentBased(ALWAYS_ON))

    with sdk.observer.processing(received([("traceparent", traceparent.encode())]), "order_placed", "event-1"):
        assert injected(sdk)["traceparent"].split("-")[1] == TRACE_ID

    assert not sdk.spans
