"""A real Prometheus (Debian's) for a test, in a temporary folder and on a free port.

All methods block.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import yaml

from tests.support.ports import reserve_port

SCRAPE: Final = "500ms"
"""Interval of scrapes and rule evaluations; tests wait for several."""
_START_SECONDS: Final = 30


def missing_program(name: str) -> str:
    """Return why the program `name` cannot be run here; empty if it can."""
    return "" if shutil.which(name) else f"no {name}: apt-get install prometheus"


def check_rules(rules: Path) -> None:
    """Check a rule file with promtool; raise `AssertionError` with its output if it is invalid."""
    _promtool("check", "rules", str(rules))


def run_rule_tests(tests: Path) -> None:
    """Run rule tests with promtool; raise `AssertionError` with its output if tests fail."""
    _promtool("test", "rules", str(tests))


def check_config(config: Path) -> None:
    """Check a configuration with promtool; raise `AssertionError` with its output if it is invalid."""
    _promtool("check", "config", str(config))


def _promtool(*arguments: str) -> None:
    ran = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr


class Prometheus:
    """A server that scrapes `targets` as the job integr8s-idem.

    Args:
        targets: `host:port` of each target.
        rules: Rule files that it evaluates.
        labels: Additional labels of all series.
    """

    def __init__(self, targets: Sequence[str], rules: Sequence[Path], labels: Mapping[str, str] | None = None) -> None:
        self.port = reserve_port()
        self._configuration = {
            "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE},
            "rule_files": [str(file) for file in rules],
            "scrape_configs": [
                {
                    "job_name": "integr8s-idem",
                    "static_configs": [{"targets": list(targets), "labels": dict(labels or {})}],
                }
            ],
        }

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="idem-prometheus-"))
        configuration = self._folder / "prometheus.yml"
        configuration.write_text(yaml.safe_dump(self._configuration), encoding="utf-8")
        self._log = (self._folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={configuration}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--enable-feature=exemplar-storage",
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=self._folder,
        )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the server and delete its data."""
        self._client.close()
        self._process.kill()
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._folder)

    @property
    def log(self) -> str:
        """Return the log of the server."""
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression with their current values.

        Raises:
            AssertionError: Prometheus rejects the expression; the message has its answer.
        """
        return self._series("query", query=expression)

    def query_range(self, expression: str, *, seconds: int, step: int) -> list[dict[str, Any]]:
        """Return the series of an expression with their values of the last `seconds`. Raises like `query`."""
        now = time.time()
        return self._series("query_range", query=expression, start=now - seconds, end=now, step=step)

    def exemplars(self, expression: str) -> list[dict[str, Any]]:
        """Return the exemplars of the last minutes, by series. Raises like `query`."""
        now = time.time()
        return self._data("query_exemplars", query=expression, start=now - 300, end=now + 60)  # type: ignore[no-any-return]

    def ask(self, what: str) -> Any:
        """Return another part of its API: targets, rules, alerts."""
        return self._client.get(f"/api/v1/{what}").raise_for_status().json()["data"]

    def _series(self, page: str, **parameters: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._data(page, **parameters)["result"]
        return found

    def _data(self, page: str, **parameters: Any) -> Any:
        answer = self._client.post(f"/api/v1/{page}", data=parameters).json()
        assert answer["status"] == "success", (parameters["query"], answer)
        return answer["data"]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                if self._client.get("/-/ready").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass  # the server does not listen yet
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)
