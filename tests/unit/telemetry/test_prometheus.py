"""Metrics: names, bounded labels, and series that exist before the first event."""

from __future__ import annotations

import gc
import inspect
import re
from threading import Thread
from time import perf_counter, time
from typing import Literal

import pytest
from prometheus_client import (
    CollectorRegistry,
    Counter,
    disable_created_metrics,
    enable_created_metrics,
    generate_latest,
)

from integr8s_idem.errors import UndecodableEventError
from integr8s_idem.events import BaseEvent, EventDecoder
from integr8s_idem.telemetry import Gauge, Phase, Signal, metrics_collector, prometheus
from integr8s_idem.telemetry.metric_help import HELP
from integr8s_idem.telemetry.metric_labels import MAX_LABELS, MAX_REASONS, WITHOUT_EVENT_TYPE
from integr8s_idem.telemetry.metric_series import BUCKETS
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from integr8s_idem.worker import delivery_processor
from tests.support.received import received

WITH_REASON = (Signal.DEAD_LETTER, Signal.UNDECODABLE, Signal.REPLAY_REFUSED)


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def lines_of(registry: CollectorRegistry) -> list[str]:
    return generate_latest(registry).decode().splitlines()


def labels_in(registry: CollectorRegistry, metric: str, label: str) -> set[str]:
    return {sample.labels[label] for family in registry.collect() for sample in family.samples if sample.name == metric}


def test_a_scrape_contains_the_four_original_metrics(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)

    observer.measure(Gauge.KEYS_ACTIVE, 3)

    page = lines_of(registry)
    assert 'idempotency_cache_hits_total{event_type="",service="billing"} 0.0' in page
    assert 'idempotency_cache_misses_total{event_type="",service="billing"} 0.0' in page
    assert 'idempotency_duplicates_blocked_total{event_type="",service="billing"} 0.0' in page
    assert 'idempotency_keys_active{service="billing"} 3.0' in page


@pytest.mark.parametrize("signal", [signal for signal in Signal if signal not in {*WITH_REASON, *WITHOUT_EVENT_TYPE}])
def test_every_other_signal_is_counted_by_service_and_event_type(registry: CollectorRegistry, signal: Signal) -> None:
    observer = PrometheusObserver("billing", registry)

    observer.count(signal, "order_placed")
    observer.count(signal, "order_placed", 4)

    labels = {"service": "billing", "event_type": "order_placed"}
    assert registry.get_sample_value(f"{signal.value}_total", labels) == 5


@pytest.mark.parametrize("signal", sorted(WITHOUT_EVENT_TYPE - {*WITH_REASON}))
def test_a_signal_that_never_has_an_event_type_has_no_such_label(registry: CollectorRegistry, signal: Signal) -> None:
    observer = PrometheusObserver("billing", registry)

    observer.count(signal)
    observer.count(signal, "order_placed", 4)

    assert registry.get_sample_value(f"{signal.value}_total", {"service": "billing"}) == 5


def test_dead_letters_are_counted_by_event_type_and_reason(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)

    observer.count(Signal.DEAD_LETTER, "order_placed", reason="no_key")
    observer.count(Signal.DEAD_LETTER, "order_placed", 4, reason="no_key")
    observer.count(Signal.DEAD_LETTER, reason="malformed")

    of_orders = {"service": "billing", "event_type": "order_placed", "reason": "no_key"}
    of_nobody_knows_what = {"service": "billing", "event_type": "", "reason": "malformed"}
    assert registry.get_sample_value("idempotency_dead_letters_total", of_orders) == 5
    assert registry.get_sample_value("idempotency_dead_letters_total", of_nobody_knows_what) == 1


@pytest.mark.parametrize("signal", [Signal.UNDECODABLE, Signal.REPLAY_REFUSED])
def test_messages_without_a_known_event_type_are_counted_by_reason(registry: CollectorRegistry, signal: Signal) -> None:
    observer = PrometheusObserver("billing", registry)

    observer.count(signal, reason="malformed")
    observer.count(signal, "order_placed", 4, reason="malformed")

    labels = {"service": "billing", "reason": "malformed"}
    assert registry.get_sample_value(f"{signal.value}_total", labels) == 5


def test_other_signals_have_no_reason(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)

    observer.count(Signal.CACHE_HIT, "order_placed", reason="no_key")

    assert 'idempotency_cache_hits_total{event_type="order_placed",service="billing"} 1.0' in lines_of(registry)


def test_reasons_never_become_event_types(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)

    observer.count(Signal.UNDECODABLE, reason="malformed")
    observer.count(Signal.DEAD_LETTER, reason="malformed")

    assert labels_in(registry, "idempotency_cache_hits_total", "event_type") == {""}


def test_an_event_type_that_is_only_published_has_no_other_counters(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)

    observer.count(Signal.PUBLISHED, "order_paid")
    assert labels_in(registry, "idempotency_events_published_total", "event_type") == {"", "order_paid"}
    assert labels_in(registry, "idempotency_deliveries_total", "event_type") == {""}

    observer.count(Signal.DELIVERED, "order_paid")
    assert labels_in(registry, "idempotency_events_handled_total", "event_type") == {"", "order_paid"}


@pytest.mark.parametrize("named", [*Signal, *Gauge])
def test_every_metric_has_a_help_text(named: Signal | Gauge) -> None:
    assert HELP[named].endswith(".")


@pytest.mark.parametrize("reason", re.findall(r'DeadLetter\(\s*"(\w+)"', inspect.getsource(delivery_processor)))
def test_the_first_dead_letter_of_an_event_type_is_an_increase_from_zero(
    registry: CollectorRegistry, reason: str
) -> None:
    observer = PrometheusObserver("billing", registry)

    observer.count(Signal.DELIVERED, "order_placed")

    labels = {"service": "billing", "event_type": "order_placed", "reason": reason}
    assert registry.get_sample_value("idempotency_dead_letters_total", labels) == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b'{"event_type": "order_placed"}',
        b'{"event_id": "1", "event_type": "order_lost"}',
        b'{"event_id": "1", "event_type": "order_placed", "event_version": "9.0"}',
        b'{"event_id": "1", "event_type": "order_placed", "order_id": 5}',
    ],
)
def test_the_first_undecodable_message_is_an_increase_from_zero(registry: CollectorRegistry, body: bytes) -> None:
    PrometheusObserver("billing", registry)

    with pytest.raises(UndecodableEventError) as caught:
        EventDecoder([OrderPlaced]).decode(body)

    labels = {"service": "billing", "reason": caught.value.reason}
    assert registry.get_sample_value("idempotency_undecodable_messages_total", labels) == 0
    assert registry.get_sample_value("idempotency_dead_letters_total", labels | {"event_type": ""}) == 0


def test_a_gauge_is_absent_until_it_is_measured(registry: CollectorRegistry) -> None:
    PrometheusObserver("billing", registry)

    assert registry.get_sample_value("idempotency_store_up", {"service": "billing"}) is None


def test_the_lag_is_exported_by_topic(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)

    observer.measure(Gauge.CONSUMER_LAG, 7, "orders")
    observer.measure(Gauge.CONSUMER_LAG, 0, "refunds")

    of_orders = {"service": "billing", "topic": "orders"}
    of_refunds = {"service": "billing", "topic": "refunds"}
    assert registry.get_sample_value("idempotency_consumer_lag", of_orders) == 7
    assert registry.get_sample_value("idempotency_consumer_lag", of_refunds) == 0


def test_phases_are_measured_even_if_they_fail(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)

    with pytest.raises(ZeroDivisionError), observer.phase(Phase.HANDLE, "order_placed"):
        raise ZeroDivisionError
    with observer.phase(Phase.HANDLE, "order_placed"):
        pass

    labels = {"service": "billing", "phase": "handle", "event_type": "order_placed"}
    assert registry.get_sample_value("idempotency_phase_seconds_count", labels) == 2


def test_a_delivery_is_measured_from_end_to_end(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)

    with observer.processing(received(), "order_placed", "event-1"):
        pass

    labels = {"service": "billing", "event_type": "order_placed"}
    assert registry.get_sample_value("idempotency_processing_seconds_count", labels) == 1


def test_services_of_one_process_share_their_metrics(registry: CollectorRegistry) -> None:
    billing = PrometheusObserver("billing", registry)
    audit = PrometheusObserver("audit", registry)
    audit_again = PrometheusObserver("audit", registry)

    billing.count(Signal.CACHE_HIT, "order_placed")
    audit.count(Signal.CACHE_HIT, "order_placed")
    audit_again.count(Signal.CACHE_HIT, "order_placed")

    name = "idempotency_cache_hits_total"
    assert registry.get_sample_value(name, {"service": "billing", "event_type": "order_placed"}) == 1
    assert registry.get_sample_value(name, {"service": "audit", "event_type": "order_placed"}) == 2


def test_a_registry_can_be_garbage_collected() -> None:
    gc.collect()
    before = len(metrics_collector._collectors)

    PrometheusObserver("billing", CollectorRegistry())
    gc.collect()

    assert len(metrics_collector._collectors) == before


@pytest.mark.scenario(109)
def test_the_number_of_event_types_and_topics_is_bounded(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)

    for number in range(MAX_LABELS + 300):
        observer.count(Signal.CACHE_HIT, f"type-{number}")
        observer.measure(Gauge.CONSUMER_LAG, 1, f"topic-{number}")
        with (
            observer.phase(Phase.RESERVE, f"type-{number}"),
            observer.processing(received(topic=""), f"type-{number}", "event-1"),
        ):
            pass

    others = {"service": "billing", "event_type": "other"}
    assert len(labels_in(registry, "idempotency_cache_hits_total", "event_type")) == MAX_LABELS + 2
    assert registry.get_sample_value("idempotency_cache_hits_total", others) == 300
    assert registry.get_sample_value("idempotency_processing_seconds_count", others) == 300
    kept = observer._service.tallies.totals()
    assert len(kept.counts) <= MAX_LABELS + 2
    assert len(kept.times) + len(observer._gauges) <= 2 * (MAX_LABELS + 2)


@pytest.mark.scenario(109)
@pytest.mark.parametrize("signal", WITH_REASON)
def test_the_number_of_reasons_is_bounded(registry: CollectorRegistry, signal: Signal) -> None:
    observer = PrometheusObserver("billing", registry)

    for number in range(MAX_REASONS + 300):
        observer.count(signal, reason=f"reason-{number}")
    observer.count(signal, reason="no_key")

    labels = {"service": "billing"} | ({} if signal in WITHOUT_EVENT_TYPE else {"event_type": ""})
    assert len(labels_in(registry, f"{signal.value}_total", "reason")) <= MAX_REASONS + 2
    assert (registry.get_sample_value(f"{signal.value}_total", labels | {"reason": "other"}) or 0) >= 300
    assert registry.get_sample_value(f"{signal.value}_total", labels | {"reason": "no_key"}) == 1


@pytest.mark.scenario(109)
@pytest.mark.parametrize(
    "hostile",
    ["\ud800", "a\nb", "\x00", "x" * 129, "\u202e gnp", "\u2028"],
    ids=["surrogate", "newline", "nul", "long", "right-to-left", "line separator"],
)
def test_an_event_type_that_is_not_a_valid_label_is_counted_as_other(registry: CollectorRegistry, hostile: str) -> None:
    observer = PrometheusObserver("billing", registry)

    observer.count(Signal.DELIVERED, hostile)
    observer.count(Signal.DEAD_LETTER, hostile, reason=hostile)
    with (
        observer.processing(received([(hostile, b"")], topic=hostile), hostile, "event-1"),
        observer.phase(Phase.HANDLE, hostile),
    ):
        pass
    observer.measure(Gauge.CONSUMER_LAG, 1, hostile)

    page = lines_of(registry)
    assert 'idempotency_deliveries_total{event_type="other",service="billing"} 1.0' in page
    assert 'idempotency_dead_letters_total{event_type="other",reason="other",service="billing"} 1.0' in page


def test_quotes_in_an_event_type_are_escaped(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)

    observer.count(Signal.DELIVERED, 'x",service="other"} 9 \\')

    line = r'idempotency_deliveries_total{event_type="x\",service=\"other\"} 9 \\",service="billing"} 1.0'
    assert line in lines_of(registry)


def test_a_scrape_contains_counts_and_durations_of_all_threads(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)

    def work() -> None:
        for _ in range(500):
            observer.count(Signal.DELIVERED, "order_placed")
            with observer.phase(Phase.HANDLE, "order_placed"):
                pass

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert "idempotency_deliveries_total" in generate_latest(registry).decode()
    work()

    labels = {"service": "billing", "event_type": "order_placed"}
    assert registry.get_sample_value("idempotency_deliveries_total", labels) == 2_500
    assert registry.get_sample_value("idempotency_phase_seconds_count", labels | {"phase": "handle"}) == 2_500


def test_a_phase_that_ends_in_another_thread_is_measured(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)
    phase = observer.phase(Phase.HANDLE, "order_placed")
    phase.__enter__()

    thread = Thread(target=phase.__exit__, args=(None, None, None))
    thread.start()
    thread.join()

    labels = {"service": "billing", "phase": "handle", "event_type": "order_placed"}
    assert registry.get_sample_value("idempotency_phase_seconds_count", labels) == 1


def test_a_duration_is_counted_in_all_buckets_that_it_does_not_exceed(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(prometheus, "perf_counter", lambda: clock[0])
    observer = PrometheusObserver("billing", registry)

    for seconds in (0.25, 0.3, 1_000):
        clock[0] = 0.0
        with observer.processing(received(), "order_placed", "event-1"):
            clock[0] = seconds

    found = {
        sample.labels["le"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "idempotency_processing_seconds_bucket"
    }
    assert list(found) == [*map(str, map(float, BUCKETS)), "+Inf"]
    assert (found["0.1"], found["0.25"], found["0.5"], found["300.0"], found["+Inf"]) == (0, 1, 2, 2, 3)
    labels = {"service": "billing", "event_type": "order_placed"}
    assert registry.get_sample_value("idempotency_processing_seconds_sum", labels) == 1000.55


def test_series_have_creation_times_unless_they_are_disabled(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)
    before = time()
    with observer.phase(Phase.HANDLE, "order_placed"):
        observer.count(Signal.DELIVERED, "order_placed")

    labels = {"service": "billing", "event_type": "order_placed"}
    counter = registry.get_sample_value("idempotency_deliveries_created", labels)
    histogram = registry.get_sample_value("idempotency_phase_seconds_created", labels | {"phase": "handle"})
    disable_created_metrics()  # type: ignore[no-untyped-call]
    try:
        page = generate_latest(registry).decode()
    finally:
        enable_created_metrics()  # type: ignore[no-untyped-call]

    assert counter is not None
    assert histogram is not None
    assert before <= counter <= histogram <= time()
    assert "_created" not in page


def test_the_names_of_the_metrics_are_registered(registry: CollectorRegistry) -> None:
    PrometheusObserver("billing", registry)

    for taken in ("idempotency_deliveries", "idempotency_phase_seconds", "idempotency_store_up"):
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            Counter(taken, "Of somebody else.", registry=registry)


def test_a_shared_phase_counts_for_each_delivery(registry: CollectorRegistry) -> None:
    observer = PrometheusObserver("billing", registry)

    observer.shared(Phase.RESERVE, ["order_placed", "order_paid", "order_placed"], since=perf_counter())
    observer.shared(Phase.RESERVE, ["order_paid"], since=perf_counter() - 2)

    def counted(event_type: str) -> float | None:
        labels = {"service": "billing", "event_type": event_type, "phase": "reserve"}
        return registry.get_sample_value("idempotency_phase_seconds_count", labels)

    assert (counted("order_placed"), counted("order_paid")) == (2, 2)
    labels = {"service": "billing", "event_type": "order_paid", "phase": "reserve"}
    assert (registry.get_sample_value("idempotency_phase_seconds_sum", labels) or 0) >= 2
