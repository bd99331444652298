"""A new application from `integr8s-idem new` passes its tests and runs without any server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from integr8s_idem.config import RedisStoreSettings
from integr8s_idem.embedded import load_embedded_settings
from tests.support.processes import ServiceProcess
from tests.support.pytest_options import WITHOUT_PLUGINS

ROOT = Path(__file__).parents[2]

DUPLICATE = 'idempotency_duplicates_blocked_total{event_type="order_placed",service="billing"} 1.0'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the new application."""
    folder = tmp_path_factory.mktemp("new")
    assert python(folder, "integr8s_idem", "new", "corner_shop").startswith("corner_shop/\n")
    return folder / "corner_shop"


def environment() -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(("INTEGR8S_IDEM_", "PYTEST_"))  # settings and options of this test run
    }
    return {**inherited, "PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT), "COLUMNS": "120"}


def python(folder: Path, *command: str) -> str:
    """Run `python -m …`, which must succeed without errors on stderr, and return its output."""
    ran = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment(), capture_output=True, text=True, timeout=110
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    return ran.stdout


def test_its_tests_pass(folder: Path) -> None:
    quiet = (*WITHOUT_PLUGINS, "-W", "error")

    output = python(folder, "pytest", "-q", *quiet)

    assert "21 passed" in output


def test_a_linter_and_a_strict_type_checker_find_nothing(folder: Path) -> None:
    # The types of the library are cached next to those of the checkout.
    cache = ROOT / ".mypy_cache" / "new-application"

    python(folder, "ruff", "check", "--no-cache", ".")
    python(folder, "ruff", "format", "--check", "--no-cache", ".")
    output = python(folder, "mypy", "--cache-dir", str(cache), ".")

    assert output.startswith("Success: no issues found in 11 source files")


def test_its_settings_have_no_errors_and_no_warnings(folder: Path) -> None:
    output = python(folder, "integr8s_idem", "settings", "check", "--app", "corner_shop.workers:platform")

    assert output == "settings.toml: ok\n"


@pytest.fixture
def metrics_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@pytest.fixture
def worker(folder: Path, metrics_port: int, tmp_path: Path) -> Iterator[ServiceProcess]:
    """Start `run --embedded` and wait until it is ready."""
    env = {"PYTHONPATH": str(ROOT), "INTEGR8S_IDEM_TELEMETRY__METRICS_PORT": str(metrics_port)}
    arguments = ("corner_shop.workers:platform", "--embedded", "--json")
    with ServiceProcess(*arguments, log=tmp_path / "log", env=env, folder=folder) as process:
        process.wait_for_line("assigned partitions", timeout=60)
        yield process


def test_an_order_published_twice_is_charged_once(folder: Path, worker: ServiceProcess, metrics_port: int) -> None:
    output = python(folder, "corner_shop.place_order", "7", "--embedded")
    worker.wait_for_line("charging 9.90 for order 7")
    blocked = wait_for(DUPLICATE, f"http://127.0.0.1:{metrics_port}/metrics")
    settings = load_embedded_settings(folder / "settings.toml", folder=folder)
    worker.terminate()

    assert output.startswith("order 7 was published twice, as event ")
    assert "integr8s-idem keys explain order_placed:" in output
    assert blocked
    assert worker.output.count("charging") == 1
    assert isinstance(settings.store, RedisStoreSettings)
    assert settings.idempotency.key_prefix == "corner_shop"
    assert worker.wait() == 0
    assert [file.name for file in (folder / ".integr8s-idem").iterdir()] == [".gitignore"]


def wait_for(line: str, url: str, seconds: float = 30) -> bool:
    """Return whether `line` appears at `url` in time."""
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        with urllib.request.urlopen(url, timeout=5) as answer:
            if line in answer.read().decode().splitlines():
                return True
        time.sleep(0.05)
    return False


def test_placing_an_order_without_a_worker_reports_what_to_do(folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "corner_shop.place_order", "7", "--embedded"],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip

    assert ran.returncode == 1
    assert "no embedded servers found" in ran.stderr
    assert "integr8s-idem run MODULE:APP --embedded" in ran.stderr
