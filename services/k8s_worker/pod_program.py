"""Runs one script inside a pod.  The text of this program is the command of the pod's container.

It starts the script in the container, as `supervisor.py` does on the worker's machine, because a cluster includes the
image pull in its time limits, does not report CPU time and memory, and does not limit output.

EXECUTION_0, EXECUTION_1, ...  base64 of zlib of JSON: script, timeout, keep, flood, limits
stdout                         the beginning of the script's stdout and stderr
argument                       file for the report, which the cluster shows as the container's termination message

It requires Python 3.8 and its standard library.  It must not contain dollar signs, which the cluster would expand.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CHUNK = 65_536
LAST_WORDS_SECONDS = 1.0


def main(report: str) -> None:
    spec = json.loads(zlib.decompress(base64.b64decode("".join(_pieces()))))
    Path("main.py").write_bytes(spec["script"].encode())
    woken, terminated = _watch_signals()
    started = time.monotonic()
    # Kept until the end: a garbage-collected Popen would reap the child.
    process, output = _begin(spec["limits"])
    child = process.pid
    copied = Copy(output, spec["keep"])
    end, waited = "exited", None
    while waited is None:
        left = started + spec["timeout"] - time.monotonic()
        if terminated or left <= 0 or copied.received > spec["flood"]:
            end = "terminated" if terminated else "timed_out" if left <= 0 else "flooded"
            _kill_group(child)
            waited = os.wait4(child, 0)
            break
        ready = select.select([woken, *copied.open], [], [], left)[0]
        if woken in ready:
            os.read(woken, 4096)
            waited = _reap(child)
        if output in ready:
            copied.some()
    _kill_group(child)
    wall_seconds = time.monotonic() - started
    copied.rest()
    exit_code, usage = _exit_code(waited[1]), waited[2]
    result = {
        "end": end,
        "exit_code": exit_code,
        "dropped": copied.received - copied.kept,
        "wall_seconds": wall_seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_memory_kib": usage.ru_maxrss,
    }
    Path(report).write_text(json.dumps(result))
    # The convention of shells, for those who inspect the pod.
    sys.exit(exit_code if exit_code >= 0 else 128 - exit_code)


def _watch_signals() -> tuple[int, list[bool]]:
    """Return a file descriptor that becomes readable with a signal, and a list that SIGTERM appends to."""
    terminated: list[bool] = []
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    # The first process of a container receives only signals that it handles.
    signal.signal(signal.SIGTERM, lambda *_: terminated.append(True))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return woken, terminated


def _begin(limits: dict[str, int]) -> tuple[subprocess.Popen[bytes], int]:
    """Start the script; return its process and the readable end of its output pipe."""
    output, writable = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-I", "-u", "-X", "utf8", "main.py"],
        stdin=subprocess.DEVNULL,
        stdout=writable,
        stderr=writable,
        env={},
        start_new_session=True,
        preexec_fn=lambda: _limit(limits),
    )
    os.close(writable)
    return process, output


class Copy:
    """Copies the beginning of a pipe to stdout, and counts the rest."""

    def __init__(self, pipe: int, keep: int) -> None:
        self.open = [pipe]
        self.received = 0
        self.kept = 0
        self._keep = keep
        os.set_blocking(pipe, False)

    def some(self) -> bool:
        """Copy the available data, and return whether there may be more."""
        try:
            chunk = os.read(self.open[0], CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.open = []
            return False
        self.received += len(chunk)
        passed = chunk[: self._keep - self.kept]
        self.kept += len(passed)
        while passed:
            passed = passed[os.write(1, passed) :]
        return True

    def rest(self) -> None:
        """Copy the remaining data, for a limited time, since an escaped process may continue to write."""
        until = time.monotonic() + LAST_WORDS_SECONDS
        while self.open and time.monotonic() < until and self.some():
            pass


def _pieces() -> Iterator[str]:
    number = 0
    while f"EXECUTION_{number}" in os.environ:
        yield os.environ[f"EXECUTION_{number}"]
        number += 1


def _limit(limits: dict[str, int]) -> None:
    for name, wanted in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (limit, limit))


def _reap(child: int) -> tuple[int, int, resource.struct_rusage] | None:
    """Reap all processes that have ended. As the first process of its container, this one inherits every orphan."""
    found = None
    try:
        while True:
            waited = os.wait4(-1, os.WNOHANG)
            if not waited[0]:
                return found
            if waited[0] == child:
                found = waited
    except ChildProcessError:
        return found


def _exit_code(status: int) -> int:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
