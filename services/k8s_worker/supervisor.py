"""Runs one script within limits and cleans up after it.  Run as a program: `python -I -S supervisor.py SPEC`.

It is the parent of the script because only a parent gets the resource usage of its child, and because it must clean up
if the worker is killed.

stdin          the lifeline: the run ends when the worker closes it or dies
stdout, stderr inherited by the script
report         file descriptor in SPEC: a line with the script's process id, then a line with its result

This is not a sandbox: the limits prevent accidents, and a script has all privileges of its user.  That is the worker's
user, or the user in SPEC if the worker runs as root.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CLEANING_SECONDS = 5.0


def main(spec: dict[str, Any]) -> None:
    report = spec["report"]
    os.set_inheritable(report, False)
    child_ended = _watch_children()
    _call_prctl(PR_SET_CHILD_SUBREAPER, 1)
    _call_prctl(PR_SET_DUMPABLE, 0)  # so that the script cannot read this process's memory or files under /proc
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _become_script(spec)
    os.write(report, b"%d\n" % child)
    try:
        status, usage = _wait(child, child_ended)
    finally:
        _end_descendants(child)
        shutil.rmtree(spec["folder"], ignore_errors=True)
    ended = {
        "exit_code": os.waitstatus_to_exitcode(status),
        "wall_seconds": time.monotonic() - started,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_memory_kib": usage.ru_maxrss // (1024 if sys.platform == "darwin" else 1),
    }
    os.write(report, json.dumps(ended).encode() + b"\n")


def _watch_children() -> int:
    """Return a file descriptor that becomes readable when a child ends."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    return readable


def _become_script(spec: dict[str, Any]) -> NoReturn:
    try:
        # A separate process group, so that it can be killed together with its children.
        os.setsid()
        os.chdir(spec["folder"])  # before the change of user, since the new user may lack access to the parent folders
        _drop_privileges(spec["user"])
        _call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
        for name in ("SIGPIPE", "SIGXFSZ"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        for name, limit in spec["limits"].items():
            _limit(getattr(resource, name), limit)
        os.execve(spec["command"][0], spec["command"], {})  # noqa: S606  # no shell is wanted
    except BaseException as error:  # noqa: BLE001  # a forked child must not continue as its parent
        os.write(2, f"could not start: {error}\n".encode())
    os._exit(127)


def _drop_privileges(user: int | None) -> None:
    """Become `user` permanently, without other groups; programs cannot regain privileges."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _call_prctl(PR_SET_NO_NEW_PRIVS, 1)


def _limit(kind: int, wanted: int) -> None:
    # The hard limit of CPU time kills without a reason; SIGXCPU is sent one second before.
    above = wanted + 1 if kind == resource.RLIMIT_CPU else wanted
    _, inherited = resource.getrlimit(kind)
    hard = above if inherited == resource.RLIM_INFINITY else min(above, inherited)
    resource.setrlimit(kind, (min(wanted, hard), hard))


def _wait(child: int, child_ended: int) -> tuple[int, resource.struct_rusage]:
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return status, usage
        readable, _, _ = select.select([0, child_ended], [], [])
        if child_ended in readable:
            os.read(child_ended, 4096)
        if 0 in readable and not os.read(0, 4096):
            _kill_group(child)
            # The child may not have created its group yet.
            _kill(child)
            _, status, usage = os.wait4(child, 0)
            return status, usage


def _end_descendants(group: int) -> None:
    """Kill all descendants of the script, which this process inherits as their reaper."""
    _kill_group(group)
    until = time.monotonic() + CLEANING_SECONDS
    while time.monotonic() < until:
        for pid in _children():
            _kill(pid)
        if not _reap():
            return
        time.sleep(0.001)


def _reap() -> bool:
    """Reap all children that have ended, and return whether others remain."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    mine = str(os.getpid())
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        # pid (name) state parent …, where the name may contain anything and ends at the last parenthesis.
        if text.rpartition(")")[2].split()[1] == mine:
            found.append(int(stat.parent.name))
    return found


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _call_prctl(option: int, value: int) -> None:
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
