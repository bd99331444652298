"""Pausing a process: all of its threads have stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.pausing import pause

BUSY = """
import threading

def compute():
    while True:
        pass

for _ in range(8):
    threading.Thread(target=compute, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""


def test_all_threads_have_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"

            pause(process.pid)

            stats = list(Path(f"/proc/{process.pid}/task").glob("*/stat"))
            assert len(stats) > 8
            assert {stat.read_text().rpartition(")")[2].split()[0] for stat in stats} == {"T"}
        finally:
            process.kill()
