"""A service as a process of its own, to be killed, stalled and asked to end."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType


class ServiceProcess:
    """`python -m integr8s_idem run ...` in a process group of its own; what it says goes to `log`.

    Args:
        arguments: What follows `run`: the application, `--service`, `--settings` and so on.
        log: File for its output; appended to, so that several lives may share it.
        env: Environment variables over our own.
        folder: Where it runs; our own working folder if not given.
    """

    def __init__(
        self, *arguments: str, log: Path, env: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self._said_before = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "integr8s_idem", "run", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                start_new_session=True,
            )
        atexit.register(self.kill)

    def __enter__(self) -> ServiceProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def output(self) -> str:
        """What this life has said so far."""
        return self.log.read_bytes()[self._said_before :].decode(errors="replace")

    def wait_for_line(self, text: str, timeout: float = 30) -> str:
        """The first line that holds `text`, once it has been said.

        Raises:
            AssertionError: It ended, or `timeout` seconds passed; the message has what it said instead.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = not self.running  # asked before reading, or its last line could be missed
            line = self._line_with(text)
            if line is not None:
                return line
            assert not ended, f"it ended ({self._process.returncode}) without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in {timeout:g} s:\n{self.output}"
            time.sleep(0.02)

    def wait(self, timeout: float = 30) -> int:
        """Its exit status, once it has ended; minus the signal's number if one ended it."""
        return self._process.wait(timeout)

    def kill(self) -> None:
        """SIGKILL to it and everything it started; waits until it is gone."""
        atexit.unregister(self.kill)
        if self.running:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> None:
        """SIGTERM: drain and end."""
        self._process.send_signal(signal.SIGTERM)

    def stop_signal(self) -> None:
        """SIGSTOP: stall, sockets open, as a long pause would."""
        self._process.send_signal(signal.SIGSTOP)

    def continue_signal(self) -> None:
        """SIGCONT: go on after `stop_signal`."""
        self._process.send_signal(signal.SIGCONT)

    def _line_with(self, text: str) -> str | None:
        # A line still being written has no end yet: it is read next time.
        whole = self.output.rpartition("\n")[0]
        return next((line for line in whole.split("\n") if text in line), None)
