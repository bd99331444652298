"""Exemplars: the trace ids of recorded spans in the buckets of the histograms."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from integr8s_idem.telemetry import Observer, Past, Phase
from integr8s_idem.telemetry.composite import combined
from integr8s_idem.telemetry.merged_metrics import MergedMetrics, plain_families
from integr8s_idem.telemetry.messaging_metrics import MessagingMetricsObserver
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from integr8s_idem.telemetry.sampling import DrawnIds
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.fake_worker import running
from tests.support.guarded import guarded
from tests.support.pipelines import Depot, all_committed, dispatcher_of, sent
from tests.support.received import received

PHASES = "idempotency_phase_seconds_bucket"
DELIVERIES = "idempotency_processing_seconds_bucket"


class Watched:
    """A service whose spans and metrics are kept; `share` of its traces are recorded."""

    def __init__(self, share: float = 1) -> None:
        self.registry = CollectorRegistry()
        self._exporter = InMemorySpanExporter()
        sampler = ParentBased(TraceIdRatioBased(share))
        self._provider = TracerProvider(sampler=sampler, id_generator=DrawnIds(), shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def observer(self) -> Observer:
        spans = OpenTelemetryObserver("billing", tracer_provider=self._provider)
        return combined(spans, PrometheusObserver("billing", self.registry))

    def spans(self, name: str) -> set[tuple[str, str]]:
        """Return the ids of trace and span of the recorded spans called `name`."""
        contexts = [span.get_span_context() for span in self._exporter.get_finished_spans() if span.name == name]
        return {(f"{each.trace_id:032x}", f"{each.span_id:016x}") for each in contexts if each is not None}

    def scrape(self) -> list[Sample]:
        """Return the samples with exemplars."""
        return [*exemplified(self.registry)]

    def ids(self, name: str, **labels: str) -> list[tuple[str, str]]:
        """Return the ids in the exemplars of a histogram with these labels."""
        return [ids_of(each) for each in self.scrape() if each.name == name and labels.items() <= each.labels.items()]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def exemplified(registry: CollectorRegistry) -> Iterator[Sample]:
    page = generate_openmetrics(registry).decode()  # type: ignore[no-untyped-call]
    for family in text_string_to_metric_families(page):  # type: ignore[no-untyped-call]
        yield from (sample for sample in family.samples if sample.exemplar is not None)


def ids_of(sample: Sample) -> tuple[str, str]:
    assert sample.exemplar is not None
    return sample.exemplar.labels["trace_id"], sample.exemplar.labels["span_id"]


def test_the_duration_of_a_recorded_phase_has_the_ids_of_its_span(watched: Watched) -> None:
    with watched.observer().phase(Phase.HANDLE, "order_placed"):
        pass

    assert watched.ids(PHASES, phase="handle", event_type="order_placed") == [*watched.spans("idempotency.handle")]


def test_the_duration_of_a_recorded_delivery_has_the_ids_of_its_span(watched: Watched) -> None:
    with watched.observer().processing(received(topic="orders"), "order_placed", "event-1"):
        pass

    assert watched.ids(DELIVERIES, event_type="order_placed") == [*watched.spans("process orders")]


def test_the_durations_of_the_messaging_conventions_have_the_ids_of_their_spans(watched: Watched) -> None:
    observer = combined(watched.observer(), MessagingMetricsObserver("billing", watched.registry))
    with observer.processing(received(topic="orders"), "order_placed", "event-1"):
        pass
    with observer.sending("receipts"):
        pass

    assert watched.ids("messaging_process_duration_seconds_bucket") == [*watched.spans("process orders")]
    assert watched.ids("messaging_client_operation_duration_seconds_bucket") == [*watched.spans("send receipts")]


def test_an_exemplar_lies_in_its_bucket(watched: Watched) -> None:
    with watched.observer().phase(Phase.HANDLE, "order_placed", past=Past(-1_000)):
        pass

    (sample,) = watched.scrape()
    assert sample.exemplar is not None
    assert sample.labels["le"] == "+Inf"
    assert sample.exemplar.value > 300


def test_nothing_that_is_not_recorded_has_an_exemplar() -> None:
    watched = Watched(share=0)
    observer = watched.observer()

    with observer.processing(received(), "order_placed", "event-1"), observer.phase(Phase.HANDLE, "order_placed"):
        pass

    assert watched.registry.get_sample_value(
        "idempotency_processing_seconds_count", {"service": "billing", "event_type": "order_placed"}
    )
    assert watched.scrape() == []


def test_a_bucket_keeps_one_exemplar_until_it_was_scraped(watched: Watched) -> None:
    observer = watched.observer()

    def measure() -> None:
        with observer.phase(Phase.HANDLE, "order_placed", past=Past(-1_000)):
            pass

    measure()
    first = watched.spans("idempotency.handle")
    measure()
    assert watched.ids(PHASES) == [*first]
    assert watched.ids(PHASES) == [*first], "it stays until there is another one"

    measure()
    assert len(watched.ids(PHASES)) == 1
    assert {*watched.ids(PHASES)} & first == set()


def test_the_older_text_format_has_no_exemplars(watched: Watched) -> None:
    with watched.observer().phase(Phase.HANDLE, "order_placed"):
        pass

    assert "trace_id" not in generate_latest(watched.registry).decode()


@virtual_time
async def test_a_worker_exports_exemplars_of_recorded_deliveries_alone() -> None:
    watched, depot, broker = Watched(share=0.5), Depot(), sent(200)

    async with running(dispatcher_of(depot.handle, guarded(observer=watched.observer())), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        await asyncio.sleep(0)

    assert 0 < len(watched.spans("process parcel_sent")) < 200
    assert {*watched.ids(DELIVERIES)} <= watched.spans("process parcel_sent")
    for phase in ("reserve", "handle", "complete"):
        found = {*watched.ids(PHASES, phase=phase)}
        assert found, phase
        assert found <= watched.spans(f"idempotency.{phase}")


def process(*durations: float) -> tuple[Any, Watched]:
    """Return the metrics of a process as they arrive at its supervisor, and the process."""
    watched = Watched()
    for since in durations:
        with watched.observer().phase(Phase.HANDLE, "paid", past=Past(since)):
            pass
    return json.loads(json.dumps(plain_families(watched.registry.collect()))), watched


def test_merged_metrics_have_the_latest_exemplar_of_all_processes() -> None:
    merged, registry = MergedMetrics(), CollectorRegistry(auto_describe=False)
    registry.register(merged)
    first, _ = process(-1_000)
    second, last = process(-1_000)

    merged.update(1, second)
    merged.update(2, first)

    assert [ids_of(sample) for sample in exemplified(registry)] == [*last.spans("idempotency.handle")]


def test_the_exemplars_of_a_process_that_ended_remain() -> None:
    merged, registry = MergedMetrics(), CollectorRegistry(auto_describe=False)
    registry.register(merged)
    families, ended = process(-1_000)
    merged.update(1, families)

    merged.retire(1)

    assert [ids_of(sample) for sample in exemplified(registry)] == [*ended.spans("idempotency.handle")]
