"""`observe`: from the metrics of observing workers to a report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from integr8s_idem.cli.observe_command import report_lines
from integr8s_idem.operations.metrics_scraper import ServiceMetrics, parse_metrics
from integr8s_idem.operations.observe_report import ObserveReport, ServiceObservations, report_of
from integr8s_idem.telemetry import Gauge, Observation, Observed
from integr8s_idem.telemetry.composite import combined
from integr8s_idem.telemetry.merged_metrics import MergedMetrics, plain_families
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from tests.support.counting import CountingObserver

DAY = 86_400.0


def page_of(*observations: Observation, ttl: float | None = 8 * DAY) -> str:
    registry = CollectorRegistry()
    observe(PrometheusObserver("billing", registry), observations, ttl)
    return generate_latest(registry).decode()


def observe(observer: PrometheusObserver, observations: Sequence[Observation], ttl: float | None) -> None:
    if ttl is not None:
        observer.measure(Gauge.OBSERVE_TTL, ttl)
    for each in observations:
        observer.observed("order_placed", each)


def scraped(page: str) -> dict[str, ServiceMetrics]:
    _, services = parse_metrics(page)
    return services


def only(report: ObserveReport) -> ServiceObservations:
    [service] = report.services
    return service


def after(*seconds: float, **options: Any) -> list[Observation]:
    return [Observation(Observed.REPUBLISHED, timedelta(seconds=each), **options) for each in seconds]


def test_deliveries_and_duplicates_are_counted_by_kind() -> None:
    first, failed = Observation(Observed.FIRST), Observation(Observed.FAILED)
    others = [Observation(Observed.REDELIVERED, timedelta(0)), Observation(Observed.CONCURRENT)]
    changed = after(5, has_other_payload=True)

    found = only(report_of([scraped(page_of(first, first, failed, *others, *changed))], {}))

    assert (found.deliveries, found.duplicates, found.other_payloads) == (6, 3, 1)
    assert found.count(Observed.FAILED) == 1
    assert found.ttl_seconds == 8 * DAY


def test_a_success_that_is_not_recorded_is_no_second_delivery() -> None:
    found = only(report_of([scraped(page_of(Observation(Observed.FIRST), Observation(Observed.UNRECORDED)))], {}))

    assert (found.deliveries, found.count(Observed.UNRECORDED)) == (1, 1)


def test_gaps_are_upper_bounds_and_never_more_than_the_ttl() -> None:
    gaps = [*[50.0] * 989, *[4_000.0] * 10, 7.5 * DAY]

    found = only(report_of([scraped(page_of(*after(*gaps), ttl=7.6 * DAY))], {}))

    assert [found.gap_of(share) for share in (0.5, 0.989, 0.99, 0.999, 1)] == [60, 60, 10_800, 10_800, 7.6 * DAY]


def test_concurrent_duplicates_are_caught_by_any_ttl() -> None:
    found = only(report_of([scraped(page_of(*[Observation(Observed.CONCURRENT)] * 99, *after(100)))], {}))

    assert [found.gap_of(share) for share in (0.5, 0.99, 0.999)] == [0, 0, 300]


def test_without_duplicates_nothing_is_said_about_a_ttl() -> None:
    found = only(report_of([scraped(page_of(Observation(Observed.FIRST)))], {}))

    assert found.gap_of(0.99) is None
    assert "nothing can be said about a ttl" in "\n".join(report_lines(found))


def test_workers_are_added_up() -> None:
    pages = [page_of(*after(5)), page_of(*after(5, 5_000), ttl=None)]

    report = report_of([scraped(page) for page in pages], {"worker-3:9464": "no answer"})

    assert (only(report).duplicates, only(report).measured, report.answering) == (3, 3, 2)


def test_a_service_with_workers_in_both_modes_is_reported_as_mixed() -> None:
    registry = CollectorRegistry()
    PrometheusObserver("billing", registry)

    report = report_of([scraped(page_of(*after(5))), scraped(generate_latest(registry).decode())], {})

    assert report.enforcing == {"billing": 1}
    assert "its modes are mixed" in "\n".join(report_lines(only(report), report.enforcing["billing"]))


def test_a_service_that_enforces_is_not_in_the_report_and_has_no_metrics_of_the_mode() -> None:
    registry = CollectorRegistry()
    PrometheusObserver("billing", registry)
    page = generate_latest(registry).decode()

    assert report_of([scraped(page)], {}).services == []
    assert "idempotency_observations" not in page
    assert "idempotency_observed" not in page
    assert "\nidempotency_observe" not in page


def test_a_supervisor_adds_up_the_observations_of_its_processes() -> None:
    merged = MergedMetrics()
    for number in range(2):
        registry = CollectorRegistry()
        observe(PrometheusObserver("billing", registry), after(5), 7_200)
        merged.update(number, plain_families(registry.collect()))
    registry = CollectorRegistry()
    registry.register(merged)

    found = only(report_of([scraped(generate_latest(registry).decode())], {}))

    assert (found.duplicates, found.ttl_seconds, found.gap_of(0.99)) == (2, 7_200, 10)


def test_all_of_several_observers_get_the_observations() -> None:
    observers = CountingObserver(), CountingObserver()

    combined(*observers).observed("order_placed", Observation(Observed.FIRST))

    assert [each.observations for each in observers] == [[Observation(Observed.FIRST)]] * 2


def test_the_report_says_what_was_seen_and_that_later_duplicates_are_invisible() -> None:
    observed = [Observation(Observed.FIRST)] * 900 + after(*[5.0] * 99, 100_000.0)

    lines = list(report_lines(only(report_of([scraped(page_of(*observed))], {}))))

    assert lines[:3] == [
        "billing: observes, keeps records for 8 d",
        "  deliveries      1,000  since its workers were started",
        "  duplicates        100  10.00 % of the deliveries",
    ]
    assert lines[-4:] == [
        "  half of them came at most 10 s after the first had ended, 90 % at most 10 s",
        "  a ttl of at most 10 s would have caught 99 % of them",
        "  a ttl of at most 2 d would have caught 99.9 % of them",
        "  duplicates that come more than 8 d later are invisible: they look new",
    ]


@pytest.mark.parametrize(("ttl", "share"), [(None, "99.9"), (8 * DAY, "50")])
def test_the_report_as_json_has_only_finite_numbers(ttl: float | None, share: str) -> None:
    report = report_of([scraped(page_of(*after(200 * DAY), ttl=ttl))], {"worker-2:9464": "no answer"})

    found = report.as_json()

    assert found["silent"] == {"worker-2:9464": "no answer"}
    assert found["services"]["billing"]["gap_seconds_at_most"][share] == ttl
