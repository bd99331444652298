"""A server as a child process that never outlives its parent, not even a parent killed with SIGKILL."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The shell becomes the server, so that the process id is the server's.  What it leaves behind waits for our end
# of the pipe: the kernel closes it however we die, and then the server goes too.
_GUARD = 'exec 3<&0; (read -r _ || kill -9 $$) <&3 & exec "$@" </dev/null 3<&-'


class ChildServer:
    """One server process, leader of its own process group, its output in `log`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        log: Path,
        env: Mapping[str, str] | None = None,
        end_by: signal.Signals = signal.SIGTERM,
        as_user: Mapping[str, Any] | None = None,
    ) -> None:
        """`end_by`: the signal that `terminate` asks by; `as_user`: `user`, `group` and `extra_groups` of `Popen`."""
        self.command = tuple(command)
        self.folder = folder
        self.log = log
        self.env = env
        self._end_by = end_by
        self._as_user = dict(as_user or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the server; an error before `start`."""
        return self._started().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it; what it listens on is not open yet when this returns."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - the command is ours, no shell reads it
                ["/bin/sh", "-c", _GUARD, "sh", *self.command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                env=self.env,
                start_new_session=True,
                **self._as_user,
            )
        atexit.register(self.kill)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._started().send_signal(number)

    def terminate(self, timeout: float) -> None:
        """Ask it to end; after `timeout` seconds, kill it."""
        if self._process is None:
            return
        self._process.send_signal(self._end_by)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass  # killed below, as announced
        finally:
            self.kill()

    def kill(self) -> None:
        """End it now (SIGKILL), with everything in its process group."""
        process, self._process = self._process, None
        atexit.unregister(self.kill)
        if process is None:
            return
        try:
            # The guard is in the group as well and keeps its number taken, even when the server is gone already.
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # server and guard are both gone
        finally:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def last_words(self, lines: int = 20) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.command[0]} is not running")
        return self._process
