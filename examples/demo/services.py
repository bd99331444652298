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
    """One service in a process group of its own; what it says goes to a file, one JSON object a line.

    It goes with us, however we end: a guard in its group waits for that.
    """

    def __init__(self, name: str, settings: Path, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        # What the environment says about settings was read once, and is in the file.
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
        """Raises `DemoError` with its last words if it has ended."""
        if not self.running:
            raise DemoError(f"{self.name} has ended; it said last:\n{self._server.last_words()}")

    async def ready(self) -> None:
        """Return once it has joined its group and its store answers.

        Raises:
            DemoError: It ended instead.
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
        """Kill its process group with SIGKILL.  The supervisors of its scripts then end them."""
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
        """Those behind byte `start` of the log that are whole."""
        said = self.log.read_bytes()[start:].decode(errors="replace")
        for line in said.rpartition("\n")[0].splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                yield {"level": "ERROR", "message": line}


class Services:
    """All of them."""

    def __init__(self, names: list[str], settings: Path, folder: Path) -> None:
        self.by_name = {name: ServiceProcess(name, settings, folder) for name in names}

    def __iter__(self) -> Iterator[ServiceProcess]:
        return iter(self.by_name.values())

    def start(self) -> None:
        for service in self:
            service.start()

    async def ready(self) -> None:
        """Return once all are ready.  Raises `DemoError` if one ends instead."""
        for service in self:
            await service.ready()

    def check(self) -> None:
        """Raises `DemoError` if one has ended."""
        for service in self:
            service.check()

    async def end(self, patience: float) -> list[str]:
        """Let all drain, for `patience` seconds together, then kill.  The names of those that had to be killed."""
        for service in self:
            service.ask_to_end()
        try:
            async with asyncio.timeout(patience):
                await until(self._have_ended)
        except TimeoutError:
            pass  # they are named and killed below
        late = [service.name for service in self if service.running]
        self.kill()
        return late

    async def _have_ended(self) -> bool:
        return not any(service.running for service in self)

    def kill(self) -> None:
        for service in self:
            service.kill()
