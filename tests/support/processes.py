"""A service in a separate process that tests can kill, pause and stop."""

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
from typing import Self


class ServiceProcess:
    """`python -m integr8s_idem run ...` in its own process group, with its output in `log`.

    Args:
        arguments: Arguments of the command: the application, `--service`, `--settings` and so on.
        log: File that its output is appended to, so that restarts can share it.
        env: Additional environment variables.
        folder: Working folder; that of this process by default.
        command: Another command than `run`.
        closed: Redirections of a shell that close standard streams, such as `<&- 2>&-`.
    """

    def __init__(
        self,
        *arguments: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        command: str = "run",
        closed: str = "",
    ) -> None:
        self.log = log
        shell = ["sh", "-c", f'exec "$@" {closed}', "sh"] if closed else []
        with log.open("ab") as output:
            self._said_before = output.tell()
            self._process = subprocess.Popen(
                [*shell, sys.executable, "-m", "integr8s_idem", command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                start_new_session=True,
            )
        atexit.register(self.kill)

    def __enter__(self) -> Self:
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
        return self.status is None

    @property
    def status(self) -> int | None:
        """Return the exit status, or `None` while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """Return the output of this process so far."""
        return self.log.read_bytes()[self._said_before :].decode(errors="replace")

    def wait_for_line(self, text: str, timeout: float = 30) -> str:
        """Return the first line with `text`, once it is written.

        Raises:
            AssertionError: The process ended, or `timeout` seconds passed; the message has the output.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = not self.running  # checked before reading, so that the last line is not missed
            line = self._line_with(text)
            if line is not None:
                return line
            assert not ended, f"the process ended ({self._process.returncode}) without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in {timeout:g} s:\n{self.output}"
            time.sleep(0.02)

    def wait(self, timeout: float = 30) -> int:
        """Wait for the end and return the exit status; the negative signal number after a signal.

        Raises:
            AssertionError: `timeout` seconds passed; the message has the output.
        """
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout:g} s:\n{self.output}") from None

    def kill(self) -> None:
        """Send SIGKILL to the process and its children, and wait for its end."""
        atexit.unregister(self.kill)
        if self.running:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> None:
        """Send SIGTERM: drain and exit."""
        self._process.send_signal(signal.SIGTERM)

    def stop_signal(self) -> None:
        """Send SIGSTOP: pause with open sockets."""
        self._process.send_signal(signal.SIGSTOP)

    def continue_signal(self) -> None:
        """Send SIGCONT: continue after `stop_signal`."""
        self._process.send_signal(signal.SIGCONT)

    def _line_with(self, text: str) -> str | None:
        # An incomplete line is read next time.
        whole = self.output.rpartition("\n")[0]
        return next((line for line in whole.split("\n") if text in line), None)
