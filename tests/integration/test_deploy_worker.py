"""A worker as a pod would run it: the image's files, a Deployment's arguments, the ConfigMap's settings."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.packaging.repository import ROOT
from tests.support.conditions import wait_until
from tests.support.processes import ServiceProcess

BASE = ROOT / "deploy" / "kubernetes" / "base"
ELSEWHERE = "127.0.0.2"
"""An address of this machine that a worker on 127.0.0.1 would not answer at, as that of a pod."""


def the_container() -> dict[str, Any]:
    deployment = next(yaml.safe_load_all((BASE / "coordinator.yaml").read_text(encoding="utf-8")))
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working folder of the image: what its last stage copies, and nothing else."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    last_stage = dockerfile[dockerfile.rindex("\nFROM ") :]
    app = tmp_path / "app"
    for source, target in re.findall(r"^COPY (\w+) (\w+)$", last_stage, re.MULTILINE):
        shutil.copytree(ROOT / source, app / target, ignore=shutil.ignore_patterns("__pycache__"))
    return app


@pytest.fixture
def pod(folder: Path, tmp_path: Path) -> Iterator[ServiceProcess]:
    """With servers of its own, on a port that is free, and with no cluster to run scripts in."""
    container = the_container()
    arguments = [str(BASE / "settings.toml") if part.endswith("settings.toml") else part for part in container["args"]]
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "INTEGR8S_IDEM_PLATFORM__DATABASE_URL").write_text(f"sqlite+aiosqlite:///{tmp_path}/platform.db")
    library = tmp_path / "library"
    library.mkdir()
    (library / "integr8s_idem").symlink_to(ROOT / "integr8s_idem")
    environment = {
        "INTEGR8S_IDEM_SECRETS_DIR": str(secrets),
        "INTEGR8S_IDEM_TELEMETRY__METRICS_PORT": "0",
        "INTEGR8S_IDEM_PLATFORM__RUNNER": "subprocess",
        "PYTHONPATH": str(library),
    }
    assert arguments.pop(0) == "run"
    log = tmp_path / "log"
    with ServiceProcess(*arguments, "--embedded", log=log, env=environment, folder=folder) as process:
        yield process


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers at all of 127.0.0.0/8")
def test_a_pod_answers_its_probes_from_another_address_and_ends_on_sigterm(pod: ServiceProcess) -> None:
    container = the_container()
    started = json.loads(pod.wait_for_line("metrics and health on "))["message"]
    address = f"http://{ELSEWHERE}:{started.rpartition(':')[2]}"
    ready = address + container["readinessProbe"]["httpGet"]["path"]
    wait_until(lambda: httpx.get(ready).is_success, state=lambda: (httpx.get(ready).text, pod.output))

    answers = {
        kind: httpx.get(address + container[kind]["httpGet"]["path"])
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    metrics = httpx.get(f"{address}/metrics").text
    pod.terminate()
    status = pod.wait(timeout=60)

    assert started.startswith("metrics and health on http://0.0.0.0:")
    assert {kind: answer.status_code for kind, answer in answers.items()} == dict.fromkeys(answers, 200)
    assert [service["name"] for service in answers["readinessProbe"].json()["services"]] == ["coordinator"]
    assert 'idempotency_store_up{service="coordinator"} 1.0' in metrics
    assert status == 0, pod.output
