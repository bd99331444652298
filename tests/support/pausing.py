"""Pause processes of tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.conditions import wait_until


def pause(pid: int) -> None:
    """Send SIGSTOP, and wait until all threads have stopped: one on another processor may still answer a request."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(map(_has_stopped, Path(f"/proc/{pid}/task").glob("*/stat"))))


def _has_stopped(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "Tt"  # the name before it may contain anything
    except OSError:  # the thread has ended
        return True
