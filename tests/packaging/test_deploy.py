"""Dashboard, alerts, compose files and image."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana import dashboard
from integr8s_idem.config import settings_warnings
from integr8s_idem.config.loading import load_settings
from providers.settings import PlatformSettings
from tests.packaging.repository import ROOT, anchors, code_blocks
from tests.support.dashboard_preview import panels
from tests.support.prometheus import check_config, check_rules, missing_program, run_rule_tests

DEPLOY = ROOT / "deploy"
GUIDE = "docs/how-to/answer-an-alert.md"
DASHBOARD = json.loads(dashboard.FILE.read_text(encoding="utf-8"))
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
NAMES = {rule["alert"] for rule in RULES if "alert" in rule}
DOCKERFILE = DEPLOY / "Dockerfile"
COMPOSE = DEPLOY / "compose"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def needs(program: str) -> None:
    if why := missing_program(program):
        pytest.skip(why)


# Dashboard


def test_the_dashboard_file_matches_its_source() -> None:
    assert dashboard.FILE.read_text(encoding="utf-8") == dashboard.text()


def test_panels_do_not_overlap_and_stay_inside_the_grid() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]

    assert [place for place in places if place["x"] + place["w"] > dashboard.WIDTH] == []
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)


def test_panels_have_unique_ids_and_query_the_selected_source() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    sources = [panel["datasource"] for panel in panels(DASHBOARD)]
    sources += [target["datasource"] for panel in panels(DASHBOARD) for target in panel["targets"]]

    assert len(set(ids)) == len(ids)
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "service", "instance"]


def test_each_panel_description_names_existing_alerts_and_pages() -> None:
    for panel in panels(DASHBOARD):
        description = panel["description"]
        assert len(description) > 60, panel["title"]
        assert set(re.findall(r"\bIdempotency[A-Z]\w+", description)) <= NAMES, panel["title"]
        for page in re.findall(r"(?:docs|deploy)/[\w/-]+\.(?:md|yml)", description):
            assert (ROOT / page).exists(), panel["title"]


def test_panels_of_our_durations_show_exemplars() -> None:
    targets = [(panel["title"], target) for panel in panels(DASHBOARD) for target in panel["targets"]]

    assert {title for title, target in targets if target["exemplar"]} == {"Processing time", "Phases, p95"}
    assert all("_bucket" in target["expr"] for _, target in targets if target["exemplar"])


def test_the_panel_of_dead_letters_names_the_commands() -> None:
    (panel,) = [panel for panel in panels(DASHBOARD) if panel["title"] == "Dead letters"]

    assert "integr8s-idem dlq list" in panel["description"]
    assert "integr8s-idem dlq replay" in panel["description"]


# Alerts


def test_every_alert_has_a_severity_and_links_to_its_runbook() -> None:
    for rule in RULES:
        if "alert" in rule:
            assert rule["labels"].keys() == {"severity"}, rule["alert"]
            assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
            assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}, rule["alert"]
            assert rule["annotations"]["runbook_url"] == f"{GUIDE}#{rule['alert'].lower()}"


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    page = (ROOT / GUIDE).read_text(encoding="utf-8")

    assert re.findall(r"^### (.+)$", page, re.MULTILINE) != []
    assert set(re.findall(r"^### (.+)$", page, re.MULTILINE)) == NAMES
    assert {name.lower() for name in NAMES} <= anchors(page)


def test_every_metric_to_watch_has_an_alert() -> None:
    page = (ROOT / "docs" / "explanation" / "guarantees.md").read_text(encoding="utf-8")
    watched = set(re.findall(r"`(idempotency_\w+)`", page[page.index("## What to watch") :]))
    # The acceptable rate depends on the deployment.
    quiet = {"idempotency_records_purged_total", "idempotency_steps_orphaned_total"}
    # IdempotencyDeadLetters includes these by reason.
    quiet |= {"idempotency_undecodable_messages_total", "idempotency_stale_completions_total"}
    # Anybody who can publish can increment it; no work is affected, so nobody has to be woken.
    quiet |= {"idempotency_replays_refused_total"}

    assert {name for name in watched if not any(name in rule["expr"] for rule in RULES)} == quiet


def test_promtool_accepts_the_rules_and_their_tests_pass() -> None:
    needs("promtool")

    check_rules(ALERTS)
    run_rule_tests(ALERTS.with_name("alerts_test.yml"))


def test_every_alert_is_tested_both_firing_and_silent() -> None:
    tests = read(ALERTS.with_name("alerts_test.yml"))["tests"]
    asked = [
        (re.findall(r'alertname="(\w+)"', check["expr"]), bool(check["exp_samples"]))
        for test in tests
        for check in test["promql_expr_test"]
    ]

    assert {name for names, fires in asked if fires for name in names} == NAMES
    assert {name for names, fires in asked if not fires for name in names} == NAMES


def test_promtool_accepts_the_scrape_jobs_and_the_alerts_use_their_name(tmp_path: Path) -> None:
    needs("promtool")
    on_kubernetes = read(DEPLOY / "prometheus" / "kubernetes.yml")
    (job,) = on_kubernetes["scrape_configs"]
    (other,) = read(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]
    # Debian's Prometheus is built without Kubernetes service discovery; the rest of the job is checked.
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod", "namespaces": {"names": ["integr8s"]}}]
    (tmp_path / "alerts.yml").write_bytes(ALERTS.read_bytes())
    (tmp_path / "kubernetes.yml").write_text(yaml.safe_dump(on_kubernetes), encoding="utf-8")

    check_config(DEPLOY / "prometheus" / "prometheus.yml")
    check_config(tmp_path / "kubernetes.yml")
    jobs = {name for rule in RULES for name in re.findall(r'job="([^"]+)"', rule["expr"])}
    assert {job["job_name"], other["job_name"]} == jobs == {"integr8s-idem"}


def test_the_script_of_the_page_creates_a_prometheus_rule(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "set-up-dashboards.md").read_text(encoding="utf-8")
    script = re.search(r"```sh\n(.*?)```", page, re.DOTALL)
    assert script is not None
    (tmp_path / "deploy").symlink_to(DEPLOY)

    subprocess.run(["sh", "-eu", "-c", script[1]], cwd=tmp_path, check=True, timeout=30)

    made = read(tmp_path / "rules.yaml")
    assert (made["kind"], made["metadata"]["name"]) == ("PrometheusRule", "integr8s-idem")
    assert made["spec"] == read(ALERTS)


def test_the_settings_on_the_dashboard_page_are_valid(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "set-up-dashboards.md").read_text(encoding="utf-8")
    file = tmp_path / "settings.toml"
    (settings,) = code_blocks(page, "toml")
    file.write_text(settings, encoding="utf-8")

    assert load_settings(file).telemetry.metrics_host == "0.0.0.0"


# Compose files


def services() -> dict[str, Any]:
    file = COMPOSE / "compose.yaml"
    found = read(file)
    parts = [(file, found), *((file.parent / name, read(file.parent / name)) for name in found["include"])]
    merged: dict[str, Any] = {}
    for path, part in parts:
        assert not merged.keys() & part["services"].keys(), "compose rejects a service that is defined twice"
        assert {name for service in part["services"].values() for name in named_volumes(service)} == set(
            part["volumes"]
        )
        merged |= {name: service | {"file": path} for name, service in part["services"].items()}
    return merged


def named_volumes(service: dict[str, Any]) -> list[str]:
    return [volume.split(":")[0] for volume in service.get("volumes", []) if not volume.startswith(".")]


def test_compose_has_the_servers_of_a_worker_and_its_monitoring() -> None:
    assert services().keys() == {"kafka", "redis", "postgres", "prometheus", "grafana"}


def test_compose_services_are_pinned_have_health_checks_and_loopback_ports() -> None:
    for name, service in services().items():
        assert re.search(r":v?\d+\.\d+(\.\d+)?$", service["image"]), name
        assert service["healthcheck"]["test"], name
        assert service["ports"], name
        assert [port for port in service["ports"] if not re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port)] == [], name


def test_compose_mounts_existing_files_read_only() -> None:
    mounted = [
        (service["file"].parent / volume.split(":")[0], volume)
        for service in services().values()
        for volume in service.get("volumes", [])
        if volume.startswith(".")
    ]

    assert len(mounted) == 4
    assert [volume for path, volume in mounted if not path.exists() or not volume.endswith(":ro")] == []


def test_the_compose_settings_connect_to_its_servers() -> None:
    settings = load_settings(COMPOSE / "settings.toml", PlatformSettings)
    published = {name: service["ports"][0].split(":")[1] for name, service in services().items()}
    postgres = services()["postgres"]["environment"]
    (target,) = read(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]

    assert settings_warnings(settings) == []
    assert settings.kafka.bootstrap_servers == f"localhost:{published['kafka']}"
    assert settings.store.kind == "redis"
    assert settings.store.url == f"redis://localhost:{published['redis']}/0"
    assert settings.platform.database_url == (
        f"postgresql+asyncpg://{postgres['POSTGRES_USER']}:{postgres['POSTGRES_PASSWORD']}"
        f"@localhost:{published['postgres']}/{postgres['POSTGRES_DB']}"
    )
    assert target == f"host.docker.internal:{settings.telemetry.metrics_port}"
    assert settings.telemetry.metrics_host == "0.0.0.0"


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    mounts = dict(reversed(volume.removesuffix(":ro").split(":")) for volume in services()["grafana"]["volumes"])
    (provider,) = read(COMPOSE / "grafana" / "dashboards" / "idempotency.yml")["providers"]
    (source,) = read(COMPOSE / "grafana" / "datasources" / "prometheus.yml")["datasources"]
    scraping = read(DEPLOY / "prometheus" / "prometheus.yml")["global"]

    assert mounts[provider["options"]["path"] + "/idempotency.json"] == "../grafana/idempotency.json"
    assert {"/etc/grafana/provisioning/dashboards", "/etc/grafana/provisioning/datasources"} <= mounts.keys()
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert source["jsonData"]["timeInterval"] == scraping["scrape_interval"]


# Image


def instructions() -> list[list[str]]:
    joined = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text(encoding="utf-8"))
    return [line.split(maxsplit=1) for line in joined.splitlines() if line and not line.startswith("#")]


def copied() -> list[str]:
    """Return the paths that the Dockerfile copies from the checkout."""
    lines = [shlex.split(rest) for word, rest in instructions() if word == "COPY" and "--from" not in rest]
    return [source for line in lines for source in line[:-1]]


def test_hadolint_reports_nothing_for_the_dockerfile() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not available for this system")

    ran = subprocess.run([hadolint, "--no-color", str(DOCKERFILE)], capture_output=True, text=True, timeout=60)

    assert (ran.returncode, ran.stdout) == (0, "")


def test_the_dockerfile_copies_existing_files_that_are_in_the_build_context() -> None:
    lines = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    sent = [line.removeprefix("!") for line in lines if line.startswith("!")]

    assert [source for source in copied() if not (ROOT / source).exists()] == []
    assert [source for source in copied() if not any(fnmatch(source, pattern) for pattern in sent)] == []
    assert sorted(sent) == sorted(copied())
    assert "*" in lines


def test_the_image_runs_the_platform_as_a_non_root_user() -> None:
    said = {word: rest for word, rest in instructions() if word in ("ENTRYPOINT", "CMD", "USER", "EXPOSE")}
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]

    (command,) = json.loads(said["ENTRYPOINT"])
    assert command in scripts
    assert json.loads(said["CMD"])[:2] == ["run", "providers:platform"]
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", said["USER"])
    assert said["EXPOSE"] == str(load_settings(COMPOSE / "settings.toml", PlatformSettings).telemetry.metrics_port)


def test_the_files_copied_for_the_wheel_are_enough_to_build_it() -> None:
    """The build fails if files that the metadata names are missing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first_stage = copied()[: copied().index("services")]

    assert {project["readme"], *project["license-files"], "pyproject.toml", "constraints.txt"} <= set(first_stage)
    assert "integr8s_idem" in first_stage
