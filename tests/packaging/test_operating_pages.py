"""Commands on the pages for operators run as shown."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from integr8s_idem.cli.app import app
from integr8s_idem.operations.fleet import Figures
from integr8s_idem.runtime.endpoints import Endpoints
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from integr8s_idem.worker.health import Health
from tests.packaging.repository import ROOT, code_blocks

WATCH = (ROOT / "docs" / "how-to" / "watch-workers.md").read_text(encoding="utf-8")
DRAW = (ROOT / "docs" / "how-to" / "draw-the-containers.md").read_text(encoding="utf-8")
WORKER = re.compile(r"\b(?:worker-\d|billing\.shop\.svc\.cluster\.local):9464")
ALL_IN_ONE = """
import json, sys
from integr8s_idem.cli.app import app
for command in json.loads(sys.argv[1]):
    try:
        app(command)
    except SystemExit as end:
        if end.code != 0:
            raise
"""
"""Runs many commands in one process, since starting one takes a second."""


def commands(page: str) -> list[str]:
    """Return the commands after a prompt."""
    lines = "".join(code_blocks(page, "console")).splitlines()
    return [line.removeprefix("$ integr8s-idem ") for line in lines if line.startswith("$ integr8s-idem ")]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return environment variables to run the command with the application of the pages."""
    command = tmp_path / "bin" / "integr8s-idem"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m integr8s_idem "$@"\n')
    command.chmod(0o755)
    own = {name: value for name, value in os.environ.items() if not name.upper().startswith("INTEGR8S_IDEM_")}
    places = f"{ROOT}{os.pathsep}{ROOT / 'examples'}"
    return {**own, "PATH": f"{command.parent}{os.pathsep}{own['PATH']}", "PYTHONPATH": places}


def test_the_commands_on_the_graph_page_write_graphs(program: dict[str, str], tmp_path: Path) -> None:
    script = "\n".join(f"integr8s-idem {command}" for command in commands(DRAW))

    ran = subprocess.run(
        ["/bin/sh", "-ec", script], cwd=tmp_path, env=program, capture_output=True, text=True, timeout=60
    )

    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "containers.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (tmp_path / "containers.mmd").read_text(encoding="utf-8").startswith("flowchart LR")
    assert [service["name"] for service in json.loads(ran.stdout)["services"]] == ["billing"]


def test_the_test_of_the_guard_on_the_graph_page_passes(program: dict[str, str], tmp_path: Path) -> None:
    (guard,) = code_blocks(DRAW, "python")

    ran = subprocess.run(
        [sys.executable, "-c", guard], cwd=tmp_path, env=program, capture_output=True, text=True, timeout=60
    )

    assert (ran.returncode, ran.stderr) == (0, "")


async def test_the_commands_on_the_monitoring_page_find_workers(program: dict[str, str], tmp_path: Path) -> None:
    registry = CollectorRegistry()
    PrometheusObserver("billing", registry)
    asked = [shlex.split(command) for command in commands(WATCH)]
    async with Endpoints("127.0.0.1", 0, health=lambda: Health(()), registry=registry) as endpoints:
        (tmp_path / "settings.toml").write_text(f"[telemetry]\nmetrics_port = {endpoints.port}\n")
        here = [[WORKER.sub(f"127.0.0.1:{endpoints.port}", word) for word in command] for command in asked]
        # Commands that would run until interrupted get --once.
        once = [[*command, "--once", "--interval", "0.1"] for command in here]
        running = await asyncio.create_subprocess_exec(
            *[sys.executable, "-c", ALL_IN_ONE, json.dumps(once)], cwd=tmp_path, env=program, stdout=subprocess.PIPE
        )
        printed, _ = await running.communicate()

    assert running.returncode == 0
    assert printed.decode().count("running") == len(asked) == 6


def test_every_column_of_top_is_documented() -> None:
    (table,) = re.findall(r"^\| column \| in JSON .*?(?=\n\n)", WATCH, re.MULTILINE | re.DOTALL)
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[2])}

    assert named == {"state", "native_code", *Figures().as_json()}


@pytest.mark.parametrize(("command", "page"), [("top", WATCH), ("graph", DRAW)])
def test_options_named_on_pages_exist(command: str, page: str) -> None:
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout

    assert [option for option in set(re.findall(r"--[a-z]+", page)) if option not in text] == []
