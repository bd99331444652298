"""The four services as separate processes."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from examples.demo.errors import DemoError
from examples.demo.metrics import get
from examples.demo.waiting import LOOK_SECONDS, until
from integr8s_idem.embedded.child_server import ChildServer

ROOT: Final = Path(__file__).parents[2]
"""The checkout, from which `providers` and `services` are run."""

_ADDRESS: Final = "metrics and health on http://"
_RUN: Final = (sys.executable, "-m", "integr8s_idem", "run", "providers:platform")


class ServiceProcess:
    """One service in its own process group. It logs to a file, one JSON object per line.

    A guard process in the group ends it when this process ends for any reason.
    """

    def __init__(self, name: str, settings: Path, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        # Settings from the environment were read once, and are in the file.
        env = {key: value for key, value in os.environ.items() if not key.startswith("INTEGR8S_IDEM_")}
        self._server = ChildServer(
            [*_RUN, "--service", name, "--settings", str(settings)],
            folder=ROOT,
            log=self.log,
            env={**env, "PYTHONUNBUFFERED": "1"},
        )
        self._said_before = 0
        self.port = 0
        """Port of /metrics and /readyz; 0 until it is known."""

    def start(self) -> None:
        self._said_before = self.log.stat().st_size if self.log.exists() else 0
        self.port = 0
        self._server.start()

    @property
    def running(self) -> bool:
        return self._server.running

    def check(self) -> None:
        """Raise `DemoError` with the last log lines if the process has ended."""
        if not self.running:
            raise DemoError(f"{self.name} has ended; its last log lines:\n{self._server.last_words()}")

    async def ready(self) -> None:
        """Return once the service has joined its group and its store answers.

        Raises:
            DemoError: The service has ended.
        """
        while not await self._is_ready():
            self.check()
            await asyncio.sleep(LOOK_SECONDS)

    async def _is_ready(self) -> bool:
        self.port = self.port or self._find_port()
        if not self.port:
            return False
        try:
            status, _ = await get(self.port, "/readyz")
        except (OSError, http.client.HTTPException):
            return False
        return status == http.HTTPStatus.OK

    def freeze(self) -> None:
        """Stop the process with SIGSTOP, so that its state can be inspected."""
        os.kill(self._server.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._server.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process group with SIGKILL. The supervisors then end its scripts."""
        self._server.kill()

    def ask_to_end(self) -> None:
        """Drain with SIGTERM."""
        if self.running:
            os.kill(self._server.pid, signal.SIGTERM)

    def complaints(self) -> list[str]:
        """Return the lines of level ERROR of all its processes, and lines that are not JSON."""
        return [line["message"] for line in self._lines(0) if line["level"] in {"ERROR", "CRITICAL"}]

    def _find_port(self) -> int:
        for line in self._lines(self._said_before):
            if line["message"].startswith(_ADDRESS):
                return int(line["message"].rpartition(":")[2])
        return 0

    def _lines(self, start: int) -> Iterator[dict[str, Any]]:
        """Return the complete lines of the log after byte `start`."""
        said = self.log.read_bytes()[start:].decode(errors="replace")
        for line in said.rpartition("\n")[0].splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                yield {"level": "ERROR", "message": line}


class Services:
    """All services."""

    def __init__(self, names: list[str], settings: Path, folder: Path) -> None:
        self.by_name = {name: ServiceProcess(name, settings, folder) for name in names}

    def __iter__(self) -> Iterator[ServiceProcess]:
        return iter(self.by_name.values())

    def start(self) -> None:
        for service in self:
            service.start()

    async def ready(self) -> None:
        """Return once all are ready. Raise `DemoError` if one has ended."""
        for service in self:
            await service.ready()

    def check(self) -> None:
        """Raise `DemoError` if one has ended."""
        for service in self:
            service.check()

    async def end(self, patience: float) -> list[str]:
        """Drain all services for up to `patience` seconds, then kill the rest. Return the names of killed services."""
        for service in self:
            service.ask_to_end()
        try:
            async with asyncio.timeout(patience):
                await until(self._have_ended)
        except TimeoutError:
            pass  # reported and killed below
        late = [service.name for service in self if service.running]
        self.kill()
        return late

    async def _have_ended(self) -> bool:
        return not any(service.running for service in self)

    def kill(self) -> None:
        for service in self:
            service.kill()
