"""A command on a pseudo-terminal that a test can type into."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _ports(process: psutil.Process) -> list[int]:
    """Return the ports of the servers that the process is connected to."""
    addresses: list[tuple[Any, ...]] = [tuple(one.raddr) for one in process.net_connections("tcp")]
    return [address[1] for address in addresses if address]


class Terminal:
    """`python -m integr8s_idem` with a pseudo-terminal for its streams.

    Args:
        arguments: Arguments of `integr8s-idem`.
        folder: Working folder.
        env: Additional environment variables.
        output: File for its standard output, like `> FILE`; the terminal by default.
    """

    def __init__(
        self, *arguments: str, folder: Path, env: Mapping[str, str] | None = None, output: Path | None = None
    ) -> None:
        self._controller, terminal = pty.openpty()
        stdout = terminal if output is None else os.open(output, os.O_WRONLY | os.O_CREAT)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "integr8s_idem", *arguments],
            stdin=terminal,
            stdout=stdout,
            stderr=terminal,
            cwd=folder,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "160", **(env or {})},
            start_new_session=True,
        )
        for end in {terminal, stdout}:
            os.close(end)
        self._said = ""

    @property
    def said(self) -> str:
        """Return the output so far, without colors."""
        return _ESCAPES.sub("", self._said).replace("\r\n", "\n")

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Return once `text` has been printed."""
        deadline = time.monotonic() + timeout
        while text not in self.said:
            assert self._read(deadline), f"no {text!r} in:\n{self.said}"

    def enter(self, text: str) -> None:
        os.write(self._controller, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.killpg(self._process.pid, signal.SIGINT)

    def wait_for_sleep(self, timeout: float = 60) -> None:
        """Return once the command waits for input.

        readline defers a signal that arrives between the prompt and the read until there is input; a user would press
        Ctrl-C again.
        """
        process, deadline, quiet, seen = psutil.Process(self._process.pid), time.monotonic() + timeout, 0, None
        while quiet < 5:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)
            now = (process.status(), process.cpu_times())
            quiet = quiet + 1 if now == seen and now[0] == psutil.STATUS_SLEEPING else 0
            seen = now

    def wait_for_connection(self, port: int, timeout: float = 60) -> None:
        """Return once the command is connected to a local server."""
        process, deadline = psutil.Process(self._process.pid), time.monotonic() + timeout
        while port not in _ports(process):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def wait(self, timeout: float = 60) -> int:
        """Wait for the end and return the exit status."""
        deadline = time.monotonic() + timeout
        while self._read(deadline):
            pass
        return self._process.wait(max(deadline - time.monotonic(), 1))

    def _read(self, deadline: float) -> bool:
        """Read more output; return `False` at its end or at `deadline`."""
        ready, _, _ = select.select([self._controller], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            return False
        try:
            more = os.read(self._controller, 65_536)
        except OSError:  # the end of a terminal on Linux
            return False
        self._said += more.decode(errors="replace")
        return bool(more)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._controller)
