"""Dashboard, alerts and autoscaling query metrics of a real worker, and a real Prometheus evaluates them all."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from aiokafka import AIOKafkaProducer
from prometheus_client.parser import text_string_to_metric_families

from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.telemetry.merged_metrics import RESTARTS, WORKER_PROCESSES
from services.events import ExecutionRequested, PodCreated
from tests.packaging.repository import ROOT
from tests.support.browser import Browser
from tests.support.conditions import wait_until
from tests.support.dashboard_preview import filled, page, panels
from tests.support.processes import ServiceProcess
from tests.support.prometheus import Prometheus, check_rules, missing_program
from tests.support.promql import labels_shown, named

DASHBOARD = json.loads((ROOT / "deploy/grafana/idempotency.json").read_text(encoding="utf-8"))
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
ADAPTER = yaml.safe_load(
    (ROOT / "deploy/kubernetes/components/hpa/prometheus-adapter.yaml").read_text(encoding="utf-8")
)

BUILT_IN = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate", "service"}}
"""Metrics that Prometheus itself provides."""
SUPERVISED: dict[str, set[str]] = {WORKER_PROCESSES: set(), f"{RESTARTS}_total": set()}
"""Metrics of a supervisor, whose tests are in `test_supervisor_processes.py`."""
ERROR_LABELS = {"error_type"}
"""Labels of calls that have failed, which the worker has none of."""
TARGET_LABELS = {"job", "instance", "namespace"}
"""Labels that Prometheus adds to the metrics of a worker; the namespace only on Kubernetes."""
NOT_DRAWN = re.compile(r"process_|python_")
"""Metrics of every Python process, such as memory and garbage collection, which other dashboards show."""

SETTINGS = """
[store]
kind = "sqlite"
path = "{folder}/platform.db"
[platform]
runner = "subprocess"
scripts_as_root = true
database_url = "sqlite+aiosqlite:///{folder}/platform.db"
pod_check_interval_seconds = 0.1
sweep_interval_seconds = 0.5
[telemetry]
metrics_port = 0
keys_active_interval_seconds = 0.2
[services.audit]
mode = "observe"
"""
"""One database for records and results, so that there is an outbox; one service observes."""


@dataclass
class Worker:
    """A running platform on embedded servers."""

    address: str
    """The `host:port` of /metrics."""
    brokers: str

    def page(self) -> str:
        """Return the response to a scrape."""
        return httpx.get(f"http://{self.address}/metrics").raise_for_status().text

    def families(self) -> dict[str, set[str]]:
        """Return the labels of each metric, by sample name."""
        found: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(self.page()):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
        return found

    def counted(self, name: str, **labels: str) -> float:
        """Return the sum over the series with these labels."""
        samples = [sample for family in text_string_to_metric_families(self.page()) for sample in family.samples]
        return sum(
            sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Run all four services, and one that observes, in one process."""
    folder = tmp_path_factory.mktemp("platform")
    settings = folder / "settings.toml"
    settings.write_text(SETTINGS.format(folder=folder), encoding="utf-8")
    arguments = ["tests.support.audited_platform:platform", "--embedded", "--json", "--settings", str(settings)]
    with ServiceProcess(*arguments, log=folder / "log", folder=ROOT) as process:
        brokers = re.search(r"\(emulator\) on ([\w.:]+)", process.wait_for_line("(emulator) on "))
        address = re.search(r"health on http://([\w.:]+)", process.wait_for_line("metrics and health on "))
        assert brokers is not None
        assert address is not None
        running = Worker(address[1], brokers[1])
        wait_until(lambda: httpx.get(f"http://{running.address}/readyz").is_success, state=lambda: process.output)
        yield running


@pytest.fixture(scope="module")
def idle_prometheus(worker: Worker) -> Iterator[Prometheus | None]:
    """Return a Prometheus that has scraped the idle worker, or `None` if Prometheus is not installed."""
    if missing_program("prometheus"):
        yield None
        return
    with Prometheus([worker.address], [ALERTS], labels={"namespace": "integr8s"}) as running:
        wait_until(lambda: running.query("idempotency_deliveries_total"), state=lambda: running.log)
        yield running


@pytest.fixture(scope="module")
def busy_worker(worker: Worker, idle_prometheus: Prometheus | None) -> Worker:
    """Return the worker after executions that were requested twice, an undecodable message and observed duplicates."""
    asyncio.run(_publish(worker.brokers))
    wait_until(lambda: all(_done(worker).values()), state=lambda: _done(worker))
    return worker


@pytest.fixture(scope="module")
def prometheus(busy_worker: Worker, idle_prometheus: Prometheus | None) -> Prometheus:
    """Return a Prometheus that has scraped the worker before and after the executions."""
    if idle_prometheus is None:
        pytest.skip(missing_program("prometheus"))
    wait_until(
        lambda: idle_prometheus.query("increase(idempotency_dead_letters_total[1m]) > 0"),
        state=lambda: idle_prometheus.log,
    )
    return idle_prometheus


async def _publish(brokers: str) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=brokers)
    await producer.start()
    try:
        for number in range(3):
            event = ExecutionRequested.model_validate({"execution_id": f"e{number}", "script": f"print({number})"})
            for _ in range(2):
                await producer.send_and_wait(event.event_type, encode_event(event), headers=event_headers(event))
        await producer.send_and_wait("execution_requested", b"no event")
        announced = PodCreated(execution_id="e9", pod_name="exec-9")
        other = announced.model_copy(update={"pod_name": "exec-10"})
        for one in (announced, announced, other):
            await producer.send_and_wait("pod_created", encode_event(one), headers=event_headers(one))
    finally:
        await producer.stop()


def _done(worker: Worker) -> dict[str, bool]:
    counted = worker.counted
    return {
        "results": counted("idempotency_events_handled_total", service="result-processor") >= 3,
        "duplicates": counted("idempotency_duplicates_blocked_total", service="coordinator") >= 3,
        "observed": counted("idempotency_observations_total", service="audit", payload="other") >= 1,
        "dead letters": counted("idempotency_dead_letters_total") == 2,
        "counted in the store": {"idempotency_keys_active", "idempotency_outbox_waiting"} <= worker.families().keys(),
    }


def expressions() -> Mapping[str, tuple[str, str]]:
    """Return every expression in deploy/, with the text shown next to it."""
    found = {f"panel {panel['title']} {target['refId']}": (filled(target["expr"]), target["legendFormat"])
             for panel in panels(DASHBOARD) for target in panel["targets"]}  # fmt: skip
    for variable in DASHBOARD["templating"]["list"][1:]:
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
        assert match is not None
        found[f"variable {variable['name']}"] = (filled(match[1]), f"{{{{{match[2]}}}}}")
    for annotation in DASHBOARD["annotations"]["list"]:
        found[f"annotation {annotation['name']}"] = (filled(annotation["expr"]), annotation["titleFormat"])
    for rule in RULES:
        text = " ".join(rule.get("annotations", {}).values())
        found[f"rule {rule.get('alert') or rule['record']}"] = (rule["expr"], text)
    for rule in ADAPTER["rules"]["external"]:
        matchers = 'namespace="integr8s", service="coordinator"'
        query = rule["metricsQuery"].replace("<<.Series>>", rule["name"]["as"]).replace("<<.LabelMatchers>>", matchers)
        found |= {"adapter's series": (rule["seriesQuery"], ""), "adapter's query": (query, "")}
    return found


EXPRESSIONS = expressions()


def test_every_query_has_data_from_a_worker(busy_worker: Worker) -> None:
    exposed = busy_worker.families() | BUILT_IN | SUPERVISED
    recorded = {rule["record"]: named(rule["expr"]).metrics for rule in RULES if "record" in rule}

    for name, (expression, shown) in EXPRESSIONS.items():
        query = named(expression)
        metrics = query.metrics.union(*(recorded[each] for each in query.recorded))
        assert metrics, f"{name} uses no metric"
        assert metrics - exposed.keys() == set(), name
        for metric in metrics:
            assert (query.labels | labels_shown(shown)) - exposed[metric] - TARGET_LABELS - ERROR_LABELS == set(), (
                name,
                metric,
            )


def test_the_dashboard_shows_every_metric_of_a_worker(busy_worker: Worker) -> None:
    drawn = {metric for name, (query, _) in EXPRESSIONS.items() if name.startswith("panel ")
             for metric in named(query).metrics}  # fmt: skip
    parts = re.compile(r"_(created|sum|count)$")  # parts of metrics that are drawn by another part
    exposed = {name for name in busy_worker.families() if not NOT_DRAWN.match(name) and not parts.search(name)}

    assert exposed - drawn == set()


def test_promtool_accepts_every_query_of_the_dashboard(tmp_path: Path) -> None:
    if why := missing_program("promtool"):
        pytest.skip(why)
    rules = [
        {"record": f"panel:query{number}:now", "expr": expression}
        for number, (expression, _) in enumerate(EXPRESSIONS.values())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}), encoding="utf-8")

    check_rules(file)


def test_prometheus_scrapes_the_worker_and_loads_the_rules(prometheus: Prometheus) -> None:
    targets = prometheus.ask("targets")["activeTargets"]
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    assert [(target["health"], target["lastError"]) for target in targets] == [("up", "")]
    assert {rule["name"] for rule in rules} == {rule.get("alert") or rule["record"] for rule in RULES}
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule["health"] == "err"] == []


def test_prometheus_evaluates_every_query_and_every_panel_has_data(prometheus: Prometheus) -> None:
    answers = {name: prometheus.query(expression) for name, (expression, _) in EXPRESSIONS.items()}

    assert [name for name, series in answers.items() if name.startswith("panel ") and not series] == []


def test_the_adapters_metric_is_the_lag_of_one_service(prometheus: Prometheus) -> None:
    answer = prometheus.query(EXPRESSIONS["adapter's query"][0])

    assert [series["metric"] for series in answer] == [{"service": "coordinator"}]


def test_only_dead_letters_fire_an_alert_with_a_summary(prometheus: Prometheus) -> None:
    def firing() -> list[dict[str, Any]]:
        return [alert for alert in prometheus.ask("alerts")["alerts"] if alert["state"] == "firing"]

    wait_until(firing, state=lambda: prometheus.ask("alerts"))

    by_service = {alert["labels"]["service"]: alert for alert in firing()}
    assert {(alert["labels"]["alertname"], alert["labels"]["reason"]) for alert in firing()} == {
        ("IdempotencyDeadLetters", "malformed")
    }
    assert by_service.keys() == {"coordinator", "saga-orchestrator"}
    assert by_service["coordinator"]["annotations"]["summary"] == "coordinator dead-letters messages: malformed."


def test_a_browser_shows_all_panels_without_overlap(prometheus: Prometheus, browser: Browser, tmp_path: Path) -> None:
    """Uses the preview of the dashboard instead of Grafana."""
    file = tmp_path / "dashboard.html"
    file.write_text(page(DASHBOARD, prometheus), encoding="utf-8")

    browser.open(file)
    drawn = browser.script(
        "return [...document.querySelectorAll('section')].map(s => { const r = s.getBoundingClientRect();"
        "return {left: r.left, top: r.top, right: r.right, bottom: r.bottom, text: s.innerText,"
        "panel: s.className === 'panel', values: s.querySelectorAll('.value').length,"
        "none: s.querySelectorAll('.none').length, seen: s.checkVisibility()} })"
    )

    browser.screenshot(tmp_path / "dashboard.png")
    assert browser.errors() == []
    assert len(drawn) == len(DASHBOARD["panels"])
    for number, one in enumerate(drawn):
        assert one["seen"]
        assert one["right"] > one["left"] + 50
        assert one["bottom"] > one["top"] + 15
        assert one["right"] <= browser.script("return document.documentElement.clientWidth")
        assert not one["panel"] or one["values"] or one["none"], one["text"]
        for other in drawn[number + 1 :]:
            apart = one["right"] <= other["left"] or other["right"] <= one["left"]
            assert apart or one["bottom"] <= other["top"] or other["bottom"] <= one["top"], (one, other)
