"""`top`: addresses, parsing of metrics, rates between two polls, totals and the table."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from integr8s_idem.cli.top_table import fleet_table
from integr8s_idem.config import Settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.fleet import ERRORS, Figures, FleetSnapshot, ServiceRow, WorkerSnapshot, _Worker, total
from integr8s_idem.operations.metrics_scraper import Readiness, Scrape, ScrapeError, ServiceMetrics, parse_metrics
from integr8s_idem.operations.worker_addresses import Address, Endpoint, address_in, address_of, endpoints_of
from integr8s_idem.telemetry import Gauge, Signal
from integr8s_idem.telemetry.prometheus import PrometheusObserver

READY = {"billing": Readiness(live=True, ready=True, reason="")}


def scrape(
    at: float,
    handled: float = 0,
    *,
    started_at: float | None = 1_000.0,
    readiness: dict[str, Readiness] = READY,
    **levels: Any,
) -> Scrape:
    """Return a scrape of billing with this number of handled events."""
    metrics = ServiceMetrics({Signal.HANDLED: handled}, {Gauge[name.upper()]: value for name, value in levels.items()})
    return Scrape(at, started_at, {"billing": metrics}, readiness)


def only(snapshot: WorkerSnapshot) -> ServiceRow:
    (row,) = snapshot.rows
    return row


def handled_per_second(snapshot: WorkerSnapshot) -> float | None:
    figures = only(snapshot).figures
    assert figures is not None
    return figures.rate(Signal.HANDLED)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("worker-1:9000", Address("worker-1", 9000)),
        ("worker-1", Address("worker-1", 9464)),
        ("9465", Address("127.0.0.1", 9465)),
        ("[::1]:9000", Address("::1", 9000)),
        ("http://worker-1", Address("worker-1", 80)),
        ("http://worker-1:9464/metrics", Address("worker-1", 9464)),
        ("https://gate/workers/1/", Address("gate", 443, "/workers/1", is_secure=True)),
        ("https://gate/workers/1/metrics", Address("gate", 443, "/workers/1", is_secure=True)),
        ("http://gate:80/readyz", Address("gate", 80)),
    ],
)
def test_addresses_can_be_written_in_several_forms(text: str, address: Address) -> None:
    assert address_of(text) == address


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "invalid address of a worker"),
        ("redis://worker-1:6379", "write host:port"),
        ("worker-1:99999", "Port out of range"),
        ("worker-1:0", "invalid address of a worker"),
        ("worker-1:http", "write host:port"),
        ("http://worker-1/metrics?match=x", "invalid address of a worker"),
        ("[::1", "Invalid IPv6"),
        ("http://me:hunter2@worker-1", "credentials are not supported"),
        ("worker\x1b[2J:1/?", "write host:port"),
    ],
)
def test_an_invalid_address_is_refused_without_printing_its_credentials(text: str, why: str) -> None:
    with pytest.raises(ApplicationError) as refusal:
        address_of(text)

    assert why in str(refusal.value)
    assert "hunter2" not in str(refusal.value)
    assert "\x1b" not in str(refusal.value)


def test_the_text_of_an_address() -> None:
    assert [address_of(text).text for text in ("worker-1", "[::1]:9000", "https://gate/w/metrics")] == [
        "worker-1:9464",
        "[::1]:9000",
        "https://gate:443/w",
    ]


@pytest.mark.parametrize(
    ("telemetry", "text"),
    [
        ({}, "127.0.0.1:9464"),
        ({"metrics_host": "0.0.0.0", "metrics_port": 9000}, "127.0.0.1:9000"),
        ({"metrics_host": "::"}, "127.0.0.1:9464"),
        ({"metrics_host": "10.0.0.7"}, "10.0.0.7:9464"),
    ],
)
def test_the_default_address_is_that_of_the_settings(telemetry: dict[str, Any], text: str) -> None:
    assert address_in(Settings.model_validate({"telemetry": telemetry})).text == text


@pytest.mark.parametrize(
    ("telemetry", "why"), [({"metrics_port": 0}, "a free port"), ({"metrics_enabled": False}, "metrics_enabled = true")]
)
def test_settings_without_a_known_port_are_refused_with_a_remedy(telemetry: dict[str, Any], why: str) -> None:
    with pytest.raises(ApplicationError, match=why):
        address_in(Settings.model_validate({"telemetry": telemetry}))


async def test_an_ip_address_is_one_endpoint() -> None:
    address = address_of("[0:0:0:0:0:0:0:1]:9000")

    assert await endpoints_of(address) == [Endpoint(address, "::1")]


def test_metrics_are_summed_over_their_labels() -> None:
    registry = CollectorRegistry()
    billing, audit = PrometheusObserver("billing", registry), PrometheusObserver('odd "name"\n', registry)
    billing.count(Signal.HANDLED, "order_placed", 3)
    billing.count(Signal.HANDLED, "order_paid", 4)
    billing.count(Signal.DEAD_LETTER, "order_paid", reason="handler_failed")
    billing.measure(Gauge.CONSUMER_LAG, 5, "orders")
    billing.measure(Gauge.CONSUMER_LAG, 6, "payments")
    audit.measure(Gauge.STORE_UP, 0)

    of_process, services = parse_metrics(generate_latest(registry).decode())

    assert of_process == {}
    assert sorted(services) == ["billing", 'odd "name"\n']
    assert services["billing"].counts[Signal.HANDLED] == 7
    assert services["billing"].counts[Signal.DEAD_LETTER] == 1
    assert services["billing"].levels == {Gauge.CONSUMER_LAG: 11}
    assert services['odd "name"\n'].levels == {Gauge.STORE_UP: 0}


def test_every_signal_and_gauge_is_parsed() -> None:
    registry = CollectorRegistry()
    observer = PrometheusObserver("billing", registry)
    for signal in Signal:
        observer.count(signal, "order_placed", 2)
    for gauge in Gauge:
        observer.measure(gauge, 3, "orders" if gauge is Gauge.CONSUMER_LAG else "")

    _, services = parse_metrics(generate_latest(registry).decode())

    assert services["billing"].counts == dict.fromkeys(Signal, 2)
    assert services["billing"].levels == dict.fromkeys(Gauge, 3)


def test_values_that_are_not_finite_are_ignored() -> None:
    page = 'idempotency_in_flight{service="a"} NaN\nidempotency_in_flight{service="a"} +Inf\n# what is this\n'

    assert parse_metrics(page + 'idempotency_in_flight{service="a"} 2\n')[1]["a"].levels == {Gauge.IN_FLIGHT: 2}


@pytest.mark.parametrize(
    "line", ["idempotency_in_flight", 'idempotency_in_flight{service="a" 1', "idempotency_in_flight{} one"]
)
def test_a_page_that_cannot_be_parsed_is_an_error(line: str) -> None:
    with pytest.raises(ScrapeError, match="cannot parse the metrics"):
        parse_metrics(line)


def test_there_are_no_rates_before_the_second_poll() -> None:
    worker = _Worker("w:1")

    assert handled_per_second(worker.answered(scrape(10.0, 5))) is None
    assert handled_per_second(worker.answered(scrape(12.0, 25))) == 10.0


def test_a_rate_covers_the_time_between_two_answers_even_if_the_worker_was_down() -> None:
    worker = _Worker("w:1")
    worker.answered(scrape(10.0, 0))
    worker.failed("connection refused")
    worker.failed("connection refused")

    assert handled_per_second(worker.answered(scrape(20.0, 30))) == 3.0


def test_a_restarted_worker_counts_from_zero() -> None:
    worker = _Worker("w:1")
    worker.answered(scrape(10.0, 500, started_at=1_000.0))

    again = worker.answered(scrape(12.0, 700, started_at=1_011.0))

    assert handled_per_second(again) == 350.0
    assert again.restarts == 1


def test_a_restart_without_a_start_time_is_detected_by_a_decreasing_counter() -> None:
    worker = _Worker("w:1")
    worker.answered(scrape(10.0, 500, started_at=None))

    assert worker.answered(scrape(12.0, 600, started_at=None)).restarts == 0

    again = worker.answered(scrape(14.0, 8, started_at=None))
    assert handled_per_second(again) == 4.0
    assert again.restarts == 1


def test_restarts_by_a_supervisor_are_counted() -> None:
    worker = _Worker("w:1")
    worker.answered(replace(scrape(10.0, 500), processes=2, restarts=3))

    again = worker.answered(replace(scrape(12.0, 700), processes=2, restarts=5))

    assert again.restarts == 2
    assert handled_per_second(again) == 100.0


def test_the_metrics_of_a_supervisor_belong_to_no_service() -> None:
    of_process, services = parse_metrics(
        "idempotency_worker_processes 2.0\nidempotency_worker_process_restarts_total 5.0\n"
    )

    assert of_process == {"idempotency_worker_processes": 2.0, "idempotency_worker_process_restarts_total": 5.0}
    assert services == {}


def test_a_restarted_supervisor_is_one_restart() -> None:
    worker = _Worker("w:1")
    worker.answered(replace(scrape(10.0, 500), processes=2, restarts=3))

    assert worker.answered(replace(scrape(12.0, 8, started_at=1_011.0), processes=2)).restarts == 1


def test_a_new_service_counts_from_zero() -> None:
    worker = _Worker("w:1")
    worker.answered(replace(scrape(10.0), services={"audit": ServiceMetrics()}, readiness={}))

    assert handled_per_second(worker.answered(scrape(12.0, 6, readiness={}))) == 3.0


def test_two_answers_at_the_same_time_have_no_rate() -> None:
    worker = _Worker("w:1")
    worker.answered(scrape(10.0, 5))

    assert handled_per_second(worker.answered(scrape(10.0, 6))) is None


def test_a_lag_is_growing_if_it_exceeds_the_previous_snapshots() -> None:
    worker = _Worker("w:1")

    def grows(at: float, lag: float) -> bool:
        figures = only(worker.answered(scrape(at, consumer_lag=lag))).figures
        assert figures is not None
        assert figures.lag == lag
        return figures.lag_is_growing

    assert [grows(at, lag) for at, lag in enumerate([50, 60, 55, 58, 61, 61, 0, 1])] == [
        False,
        True,
        False,
        False,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("readiness", "levels", "state"),
    [
        (READY, {"store_up": 1}, "ready"),
        (READY, {"store_up": 0}, "store down"),
        ({"billing": Readiness(live=True, ready=False, reason="no partitions")}, {}, "not ready"),
        ({"billing": Readiness(live=False, ready=False, reason="its loop stands")}, {"store_up": 0}, "dead"),
        ({}, {"store_up": 1}, "running"),
    ],
)
def test_the_state_is_the_worst_known_state(
    readiness: dict[str, Readiness], levels: dict[str, Any], state: str
) -> None:
    row = only(_Worker("w:1").answered(scrape(1.0, readiness=readiness, **levels)))

    assert row.state == state
    assert row.reason == (readiness["billing"].reason if readiness else "")


def test_a_service_without_metrics_has_a_row() -> None:
    row = only(_Worker("w:1").answered(Scrape(1.0, None, {}, {"audit": Readiness(True, False, "starting")})))

    assert (row.service, row.state, row.reason, row.figures) == ("audit", "not ready", "starting", Figures())


def test_a_worker_that_is_down_keeps_a_row_for_each_service() -> None:
    worker = _Worker("w:1")

    assert [row.service for row in worker.failed("refused").rows] == [""]

    worker.answered(scrape(1.0))
    assert worker.failed("refused") == WorkerSnapshot(
        "w:1", [ServiceRow("billing", "w:1", "down", "refused")], "refused", restarts=0
    )


def test_totals_ignore_unknown_rates() -> None:
    one = Figures({Signal.HANDLED: 3}, {Signal.HANDLED: 1.5}, in_flight=1, lag=4)
    other = Figures({Signal.HANDLED: 4, Signal.RETRY: 1}, None, in_flight=2, lag=5, lag_is_growing=True)

    assert total([one, other]) == Figures(
        {Signal.HANDLED: 7, Signal.RETRY: 1}, {Signal.HANDLED: 1.5}, in_flight=3, lag=9, lag_is_growing=True
    )
    assert total([]) == Figures()


def a_snapshot(*, workers: int = 3) -> FleetSnapshot:
    """Return billing on some workers, the first with errors, and another worker that is down."""
    good = Figures({Signal.HANDLED: 1_234_567, Signal.DUPLICATE_BLOCKED: 56}, {Signal.HANDLED: 987.6}, 12, 0)
    bad = Figures(
        {Signal.HANDLED: 9, Signal.HANDLER_FAILED: 7, Signal.DEAD_LETTER: 2},
        {Signal.HANDLED: 0.25, Signal.HANDLER_FAILED: 1.0},
        lag=81_000,
        lag_is_growing=True,
    )
    names = [f"10.0.0.{number}:9464" for number in range(workers)]
    up = [
        WorkerSnapshot(name, [ServiceRow("billing", name, "ready", "", bad if number == 0 else good)])
        for number, name in enumerate(names)
    ]
    down = WorkerSnapshot(
        "\x1b[2Jw", [ServiceRow("billing", "\x1b[2Jw", "down", "connection refused")], "connection refused"
    )
    return FleetSnapshot([*up, down])


def drawn(snapshot: FleetSnapshot, width: int, *, colours: bool = False) -> str:
    stream = StringIO()
    console = Console(file=stream, width=width, force_terminal=colours, color_system="standard" if colours else None)
    console.print(fleet_table(snapshot, width))
    return stream.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_the_table_fits_the_terminal_without_truncated_numbers(width: int) -> None:
    table = drawn(a_snapshot(), width)

    assert max(map(len, table.splitlines())) <= width
    assert "…" not in table
    for text in ("service", "handled/s", "dups", "errors", "lag", "988", "56", "▲ 7", "▲ 81,000", "ready", "down"):
        assert text in table


def test_columns_are_dropped_in_order_on_narrow_terminals() -> None:
    headings = {width: set(drawn(a_snapshot(), width).splitlines()[1].split()) for width in (80, 100, 200)}

    assert headings[80] < headings[100] < headings[200]
    assert {"takeovers", "retries", "dead", "dups/s"} <= headings[200]
    assert "errors" in headings[80]
    assert "takeovers" not in headings[80]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("width", [36, 40, 44, 50])
def test_names_are_never_narrower_than_their_headings(width: int, workers: int) -> None:
    snapshot = FleetSnapshot(a_snapshot(workers=workers).workers[:workers])

    table = drawn(snapshot, width).splitlines()

    assert max(map(len, table)) <= width
    assert {"service", "state", "errors"} <= set(table[1].split())
    assert any("billing" in line and "ready" in line and "▲ 7" in line for line in table)


def test_names_are_folded_before_the_last_columns_are_dropped() -> None:
    headings = {width: drawn(a_snapshot(), width).splitlines()[1].split() for width in (40, 44, 54, 60)}

    assert headings[40] == ["service", "worker", "state", "errors"]
    assert headings[44] == ["service", "worker", "state", "errors", "lag"]
    assert headings[54] == ["service", "worker", "state", "handled/s", "errors", "lag"]
    assert headings[60] == ["service", "worker", "state", "handled/s", "dups", "errors", "lag"]


def test_the_name_of_a_single_worker_is_dropped_on_narrow_terminals() -> None:
    snapshot = FleetSnapshot(a_snapshot(workers=1).workers[:1])

    assert "10.0.0.0" in drawn(snapshot, 120)
    assert "10.0.0.0" not in drawn(snapshot, 70)


def test_the_total_of_a_service_shows_how_many_workers_answer() -> None:
    (sums,) = [line.split() for line in drawn(a_snapshot(), 200).splitlines() if "total" in line]

    assert sums[:6] == ["billing", "3", "of", "4", "total", "1,975"]


def test_control_characters_of_worker_names_are_escaped() -> None:
    assert "\x1b" not in drawn(a_snapshot(), 120)
    assert "\\x1b[2Jw down: connection refused" in drawn(a_snapshot(), 120)


def test_control_characters_of_service_names_are_escaped() -> None:
    row = ServiceRow("bil\x1b[2Jling\n", "w:1", "ready", "why\x07", Figures())

    table = drawn(FleetSnapshot([WorkerSnapshot("w:1", [row])]), 120)

    assert "bil\\x1b[2Jling\\n" in table
    assert "ready: why\\x07" in table
    assert not {"\x1b", "\x07"} & set(table)


def test_the_processes_of_a_supervisor_are_one_worker_with_their_number() -> None:
    of_process, _ = parse_metrics("idempotency_worker_processes 3.0\nprocess_start_time_seconds 7.0\n")
    worker = _Worker("w:1").answered(replace(scrape(1.0), processes=int(of_process["idempotency_worker_processes"])))

    snapshot = FleetSnapshot([worker, _Worker("w:2").answered(scrape(1.0))])

    assert re.search(r"billing +w:1 \(3 processes\) +ready", drawn(snapshot, 200))
    assert re.search(r"billing +w:2 +ready", drawn(snapshot, 200))
    assert [each["processes"] for each in snapshot.as_json()["workers"]] == [3, 1]


def test_problems_are_colored() -> None:
    table = drawn(a_snapshot(), 200, colours=True)

    assert re.search(r"\x1b\[1;31m *▲ 7\x1b", table)  # errors that go on
    assert re.search(r"\x1b\[33m *2\x1b", table)  # dead letters of before
    assert re.search(r"\x1b\[33m *▲ 81,000\x1b", table)
    assert "\x1b[1;31mdown" in table
    assert "\x1b[32mready" in table


def test_json_contains_every_number_and_the_errors_by_kind() -> None:
    answer = json.loads(json.dumps(a_snapshot().as_json()))

    (billing,) = answer["workers"][0]["services"]
    assert billing["state"] == "ready"
    assert (billing["handled"], billing["handled_per_second"], billing["lag_is_growing"]) == (9, 0.25, True)
    assert (billing["errors"], billing["errors_by_kind"]) == (7, {"handler_failures": 7})
    assert answer["workers"][3]["services"] == [
        {"service": "billing", "state": "down", "reason": "connection refused", "native_code": None}
    ]
    assert answer["workers"][3]["is_up"] is False
    assert answer["services"]["billing"]["handled"] == answer["total"]["handled"] == 2 * 1_234_567 + 9


def test_what_counts_as_an_error_is_nothing_that_a_healthy_service_does() -> None:
    healthy = {Signal.HANDLED, Signal.DELIVERED, Signal.DUPLICATE_BLOCKED, Signal.RETRY, Signal.DEAD_LETTER}

    assert not healthy & set(ERRORS)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("reported", "expected"), [(1, True), (0, False)])
def test_the_table_and_its_json_say_which_code_workers_use(reported: int, expected: bool, processes: int) -> None:
    silent = WorkerSnapshot("old:9464", [ServiceRow("billing", "old:9464", "ready", figures=Figures())])
    answer = replace(scrape(1.0, native_code=reported), processes=processes)
    snapshot = FleetSnapshot([_Worker("new:9464").answered(answer), silent])

    console = Console(file=StringIO(), width=200)
    console.print(fleet_table(snapshot, 200))

    assert [worker["services"][0]["native_code"] for worker in snapshot.as_json()["workers"]] == [expected, None]
    assert isinstance(console.file, StringIO)
    assert f"native code is used by {reported * processes} of {processes} workers" in console.file.getvalue()
