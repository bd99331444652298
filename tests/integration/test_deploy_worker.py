"""A worker run like a pod: the files of the image, the arguments of a Deployment, the settings of the ConfigMap."""

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
"""A local address on which a worker bound to 127.0.0.1 would not answer, like the address of a pod."""


def coordinator_container() -> dict[str, Any]:
    deployment = next(yaml.safe_load_all((BASE / "coordinator.yaml").read_text(encoding="utf-8")))
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the working folder of the image, with only the files that its last stage copies."""
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    last_stage = dockerfile[dockerfile.rindex("\nFROM ") :]
    app = tmp_path / "app"
    for source, target in re.findall(r"^COPY (\w+) (\w+)$", last_stage, re.MULTILINE):
        shutil.copytree(ROOT / source, app / target, ignore=shutil.ignore_patterns("__pycache__"))
    return app


@pytest.fixture
def pod(folder: Path, tmp_path: Path) -> Iterator[ServiceProcess]:
    """Start a worker on embedded servers, on a free port, with the subprocess runner."""
    container = coordinator_container()
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
    container = coordinator_container()
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
