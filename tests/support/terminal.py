"""A command on a terminal of its own, as people have one: it is asked, and answered."""

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
    """Of the servers that it is connected to."""
    addresses: list[tuple[Any, ...]] = [tuple(one.raddr) for one in process.net_connections("tcp")]
    return [address[1] for address in addresses if address]


class Terminal:
    """`python -m integr8s_idem …` with a pseudo-terminal for its streams.

    Args:
        arguments: What follows `integr8s-idem`.
        folder: Where it runs.
        env: Environment variables over our own.
        output: File for its standard output, as `> FILE`; the terminal if not given.
    """

    def __init__(
        self, *arguments: str, folder: Path, env: Mapping[str, str] | None = None, output: Path | None = None
    ) -> None:
        self._ours, theirs = pty.openpty()
        stdout = theirs if output is None else os.open(output, os.O_WRONLY | os.O_CREAT)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "integr8s_idem", *arguments],
            stdin=theirs,
            stdout=stdout,
            stderr=theirs,
            cwd=folder,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "160", **(env or {})},
            start_new_session=True,
        )
        for end in {theirs, stdout}:
            os.close(end)
        self._said = ""

    @property
    def said(self) -> str:
        """All that stood on the screen so far, without colors."""
        return _ESCAPES.sub("", self._said).replace("\r\n", "\n")

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Return once `text` has been said."""
        deadline = time.monotonic() + timeout
        while text not in self.said:
            assert self._read(deadline), f"no {text!r} in:\n{self.said}"

    def enter(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.killpg(self._process.pid, signal.SIGINT)

    def wait_for_sleep(self, timeout: float = 60) -> None:
        """Return once it reads what people type, and does nothing else.

        A signal between a question and the reading of its answer is kept by readline until there is one: people press
        Ctrl-C once more.
        """
        process, deadline, quiet, seen = psutil.Process(self._process.pid), time.monotonic() + timeout, 0, None
        while quiet < 5:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)
            now = (process.status(), process.cpu_times())
            quiet = quiet + 1 if now == seen and now[0] == psutil.STATUS_SLEEPING else 0
            seen = now

    def wait_for_connection(self, port: int, timeout: float = 60) -> None:
        """Return once the command is connected to a server on this machine."""
        process, deadline = psutil.Process(self._process.pid), time.monotonic() + timeout
        while port not in _ports(process):
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def wait(self, timeout: float = 60) -> int:
        """Its exit status, once it has ended."""
        deadline = time.monotonic() + timeout
        while self._read(deadline):
            pass
        return self._process.wait(max(deadline - time.monotonic(), 1))

    def _read(self, deadline: float) -> bool:
        """Whether it said more before it ended, and before `deadline`."""
        ready, _, _ = select.select([self._ours], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            return False
        try:
            more = os.read(self._ours, 65_536)
        except OSError:  # Linux tells the end of a terminal so
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
        os.close(self._ours)
