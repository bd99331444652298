"""A server as a child process that ends with its parent, even if the parent is killed with SIGKILL."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The shell execs the server, so that the process id is the server's.  Its background process waits for this process'
# end of the pipe, which the kernel closes when this process dies, and then kills the server.
_GUARD = 'exec 3<&0; (read -r _ || kill -9 $$) <&3 & exec "$@" </dev/null 3<&-'


class ChildServer:
    """A server process in its own process group, with its output in `log`."""

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
        """Prepare a server.

        Args:
            command: The command line of the server.
            log: File for its output.
            end_by: The signal that `terminate` sends.
            as_user: `user`, `group` and `extra_groups` of `Popen`.
        """
        self.command = tuple(command)
        self.folder = folder
        self.log = log
        self.env = env
        self._end_by = end_by
        self._as_user = dict(as_user or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the server.  Raises before `start`."""
        return self._started().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process.  The server may not listen yet when this returns."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - a fixed command
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
        """Send a signal to the server."""
        self._started().send_signal(number)

    def terminate(self, timeout: float) -> None:
        """Terminate the server, and kill it after `timeout` seconds."""
        if self._process is None:
            return
        self._process.send_signal(self._end_by)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass  # killed below
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill all processes of its process group."""
        process, self._process = self._process, None
        atexit.unregister(self.kill)
        if process is None:
            return
        try:
            # The group contains the guard process, so its id is not reused even if the server is gone.
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # both are gone
        finally:
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def last_words(self, lines: int = 20) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError(f"{self.command[0]} is not running")
        return self._process
