"""`integr8s-idem run --processes N` as tests see it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil

from tests.support.conditions import wait_until
from tests.support.processes import ServiceProcess


class SupervisedProcess(ServiceProcess):
    """A supervisor and its workers; `kill` kills only the supervisor."""

    @property
    def workers(self) -> dict[int, psutil.Process]:
        """The running worker processes, by number."""
        found = {}
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children():
                with suppress(psutil.NoSuchProcess):
                    link = next((each for each in child.cmdline() if each.startswith("--worker-process=")), None)
                    if link is not None:
                        found[int(link.partition("=")[2].partition(":")[0])] = child
        return found

    @property
    def address(self) -> str:
        """The URL of its endpoints, once they are open."""
        line = self.wait_for_line("metrics and health")
        return next(word for word in line.replace('"', " ").split() if word.startswith("http://"))

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and the body of an endpoint."""
        try:
            with urllib.request.urlopen(self.address + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def health(self, path: str = "/readyz") -> dict[str, Any]:
        """Return the body of a probe."""
        body: dict[str, Any] = json.loads(self.get(path)[1])
        return body

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


@contextmanager
def supervised(
    *arguments: str, log: Path, env: Mapping[str, str] | None = None, closed: str = ""
) -> Iterator[SupervisedProcess]:
    """Run a supervisor inside the block; its workers end with it."""
    with SupervisedProcess(*arguments, log=log, env=env, closed=closed) as process:
        workers: list[psutil.Process] = []
        try:
            yield process
        finally:
            workers = list(process.workers.values())
            process.kill()
            gone(workers)


def gone(workers: list[psutil.Process]) -> None:
    """Wait until none of these processes runs."""
    wait_until(lambda: not [each for each in workers if is_running(each)], state=lambda: workers)


def is_running(process: psutil.Process) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
