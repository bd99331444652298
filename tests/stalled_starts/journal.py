"""The journal of a trial's workers: a file of whole lines that outlives its writers.

All times are read from CLOCK_BOOTTIME, so that lines of different processes can be compared.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def boot_time() -> float:
    """Return the seconds since the machine was booted, including time in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a lease before a start."""

    at: float
    lease_end: float
    is_late: bool
    """The result of the check."""


@dataclass(frozen=True, slots=True)
class Start:
    """A call of a handler."""

    work: str
    key: str
    """The full key of the record."""
    attempt: int
    fence: int
    pid: int
    at: float
    check: Check | None
    """The last check of its reservation; `None` if there was none."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion that the store accepted."""

    key: str
    fence: int


class Journal:
    """The journal file of a trial."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "journal"

    def note_ready(self) -> None:
        """Note that this process is ready to consume."""
        self._note("ready", os.getpid())

    def note_start(self, work: str, key: str, attempt: int, fence: int, check: Check | None) -> None:
        """Note that a handler is called."""
        now = boot_time()
        fields = None if check is None else [check.at, check.lease_end, check.is_late]
        self._note("start", work, key, attempt, fence, os.getpid(), now, fields)

    def note_completion(self, key: str, fence: int) -> None:
        """Note that the store accepted a completion."""
        self._note("complete", key, fence)

    def note_count(self, name: str, count: int) -> None:
        """Note a count of this process's observer."""
        self._note("count", name, count)

    def _note(self, *line: Any) -> None:
        # A single write does not interleave with those of other processes.
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, (json.dumps(line) + "\n").encode())
        finally:
            os.close(file)

    def read(self) -> Lines:
        """Read all complete lines."""
        text = self._path.read_text() if self._path.exists() else ""
        # The last line may be incomplete while it is being written.
        return Lines(text.rpartition("\n")[0])


class Lines:
    """The contents of a journal."""

    def __init__(self, text: str) -> None:
        self.ready: set[int] = set()
        """Process IDs."""
        self.starts: list[Start] = []
        self.completions: list[Completion] = []
        self.counts: defaultdict[str, int] = defaultdict(int)
        """Sums over all processes."""
        for line in text.splitlines():
            what, *fields = json.loads(line)
            if what == "ready":
                self.ready.add(fields[0])
            elif what == "start":
                if fields[-1] is not None:
                    fields[-1] = Check(*fields[-1])
                self.starts.append(Start(*fields))
            elif what == "complete":
                self.completions.append(Completion(*fields))
            else:
                self.counts[fields[0]] += fields[1]

    def starts_of(self, pid: int) -> int:
        """Return how many handlers a process has started."""
        return sum(start.pid == pid for start in self.starts)
