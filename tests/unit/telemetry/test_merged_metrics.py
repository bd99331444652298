"""The metrics of several worker processes, as those of one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    Summary,
    generate_latest,
)
from prometheus_client import Gauge as PrometheusGauge
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from integr8s_idem.telemetry import Gauge, Phase, Signal
from integr8s_idem.telemetry.merged_metrics import MergedMetrics, plain_families
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from tests.support.received import received


def sent(registry: CollectorRegistry) -> Any:
    """Return the metrics of a process as they arrive at its supervisor."""
    return json.loads(json.dumps(plain_families(registry.collect())))


def process_with(fill: Callable[[CollectorRegistry], None]) -> Any:
    registry = CollectorRegistry()
    fill(registry)
    return sent(registry)


def samples(merged: MergedMetrics) -> dict[str, float]:
    """Return the lines of the page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(merged)
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def handled(count: int) -> Any:
    return process_with(lambda registry: PrometheusObserver("billing", registry).count(Signal.HANDLED, "paid", count))


HANDLED = 'idempotency_events_handled_total{event_type="paid",service="billing"}'


def test_counters_are_added() -> None:
    merged = MergedMetrics()
    merged.update(1, handled(3))
    merged.update(2, handled(4))

    assert samples(merged)[HANDLED] == 7


def test_counters_of_a_process_that_ended_remain_in_the_sum() -> None:
    """Prometheus would take a decrease for a restart, and count all events again."""
    merged = MergedMetrics()
    for number, count in ((1, 3), (2, 4)):
        merged.update(number, handled(count))

    merged.retire(1)
    without = samples(merged)[HANDLED]
    merged.update(1, handled(2))
    merged.retire(1)
    merged.retire(1)

    assert without == 7
    assert samples(merged)[HANDLED] == 9


def test_histograms_are_added_bucket_by_bucket() -> None:
    def measured(seconds: float) -> Any:
        def fill(registry: CollectorRegistry) -> None:
            Histogram("took_seconds", "Took.", buckets=(1, 5), registry=registry).observe(seconds)

        return process_with(fill)

    merged = MergedMetrics()
    merged.update(1, measured(0.5))
    merged.update(2, measured(2))
    merged.retire(2)

    found = samples(merged)
    assert [found[f'took_seconds_bucket{{le="{bound}"}}'] for bound in ("1.0", "5.0", "+Inf")] == [1, 2, 2]
    assert (found["took_seconds_count"], found["took_seconds_sum"]) == (2, 2.5)


@pytest.mark.parametrize(
    ("gauge", "values", "combined"),
    [
        (Gauge.IN_FLIGHT, (3, 4), 7),
        (Gauge.STORE_UP, (1, 0), 0),
        (Gauge.KEYS_ACTIVE, (9, 8), 9),
        (Gauge.OUTBOX_WAITING, (2, 3), 3),
        (Gauge.OUTBOX_AGE, (2.5, 3), 3),
        (Gauge.EVENT_LOOP_LAG, (0.5, 0.1), 0.5),
        (Gauge.NATIVE_CODE, (1, 0), 0),
    ],
)
def test_each_gauge_is_combined_by_its_meaning(gauge: Gauge, values: tuple[float, float], combined: float) -> None:
    merged = MergedMetrics()
    for number, value in enumerate(values, start=1):

        def fill(registry: CollectorRegistry, value: float = value) -> None:
            PrometheusObserver("billing", registry).measure(gauge, value)

        merged.update(number, process_with(fill))

    assert samples(merged)[f'{gauge.value}{{service="billing"}}'] == combined


def test_every_gauge_of_the_library_has_a_combination() -> None:
    def fill(registry: CollectorRegistry) -> None:
        observer = PrometheusObserver("billing", registry)
        for gauge in Gauge:
            observer.measure(gauge, 1)
        ProcessCollector(registry=registry)

    merged = MergedMetrics()
    merged.update(1, process_with(fill))

    assert "worker_process=" not in "".join(samples(merged))


def test_gauges_disappear_with_their_process() -> None:
    def fill(registry: CollectorRegistry) -> None:
        PrometheusObserver("billing", registry).measure(Gauge.IN_FLIGHT, 5)

    merged = MergedMetrics()
    merged.update(1, process_with(fill))
    merged.retire(1)

    assert not [name for name in samples(merged) if name.startswith(Gauge.IN_FLIGHT.value)]


def test_other_gauges_stay_separate() -> None:
    """Nobody knows whether the sum of an application's gauge means anything."""
    merged = MergedMetrics()
    for number, age in ((1, 20.0), (2, 30.0)):

        def fill(registry: CollectorRegistry, age: float = age) -> None:
            PrometheusGauge("oldest_order_age", "Age.", ["shop"], registry=registry).labels("one").set(age)

        merged.update(number, process_with(fill))

    assert samples(merged) == {
        'oldest_order_age{shop="one",worker_process="1"}': 20,
        'oldest_order_age{shop="one",worker_process="2"}': 30,
    }


def test_summaries_are_added() -> None:
    def fill(registry: CollectorRegistry) -> None:
        Summary("size_bytes", "Size.", registry=registry).observe(10)

    merged = MergedMetrics()
    for number in (1, 2):
        merged.update(number, process_with(fill))

    found = samples(merged)
    assert (found["size_bytes_count"], found["size_bytes_sum"]) == (2, 20)


def test_creation_times_are_the_earliest() -> None:
    registries = [CollectorRegistry(), CollectorRegistry()]
    merged = MergedMetrics()
    for number, registry in enumerate(registries):
        Counter("orders", "Orders.", registry=registry).inc()
        merged.update(number, sent(registry))

    earliest = min(registry.get_sample_value("orders_created") or math.inf for registry in registries)
    assert samples(merged)["orders_created"] == pytest.approx(earliest)


def test_the_merged_page_is_valid_openmetrics() -> None:
    def fill(registry: CollectorRegistry) -> None:
        observer = PrometheusObserver("billing", registry)
        for gauge in Gauge:
            observer.measure(gauge, 1, "orders")
        for event_type in ("paid", "placed"):
            observer.count(Signal.HANDLED, event_type)
            with observer.processing(received(), event_type, "event-1"), observer.phase(Phase.HANDLE, event_type):
                pass

    merged = MergedMetrics()
    for number in (1, 2):
        merged.update(number, process_with(fill))
    merged.retire(1)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(merged)

    page = generate_openmetrics(registry).decode()  # type: ignore[no-untyped-call]

    families = {family.name for family in text_string_to_metric_families(page)}  # type: ignore[no-untyped-call]
    assert {Signal.HANDLED.value, "idempotency_processing_seconds", Gauge.STORE_UP.value} <= families
