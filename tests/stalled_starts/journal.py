"""What the workers of one trial did: a file of whole lines, which outlives its writers.

Every time in it is read from CLOCK_BOOTTIME, so lines of different processes can be compared.
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
    """Return the seconds since the machine was started, suspends included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Check:
    """One look at a lease before a start."""

    at: float
    lease_end: float
    is_late: bool
    """What the check answered."""


@dataclass(frozen=True, slots=True)
class Start:
    """One call of a handler."""

    work: str
    key: str
    """The full key: that of the record."""
    attempt: int
    fence: int
    pid: int
    at: float
    check: Check | None
    """The last check of its reservation; `None` if there was none."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A completion that the store has accepted."""

    key: str
    fence: int


class Journal:
    """The file of one trial."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "journal"

    def note_ready(self) -> None:
        """This process is about to consume."""
        self._note("ready", os.getpid())

    def note_start(self, work: str, key: str, attempt: int, fence: int, check: Check | None) -> None:
        """A handler has been called."""
        now = boot_time()
        told = None if check is None else [check.at, check.lease_end, check.is_late]
        self._note("start", work, key, attempt, fence, os.getpid(), now, told)

    def note_completion(self, key: str, fence: int) -> None:
        """The store has accepted a completion."""
        self._note("complete", key, fence)

    def note_count(self, name: str, count: int) -> None:
        """What the observer of this process has counted."""
        self._note("count", name, count)

    def _note(self, *line: Any) -> None:
        # In one write: lines of several processes do not mix.
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, (json.dumps(line) + "\n").encode())
        finally:
            os.close(file)

    def read(self) -> Lines:
        """Everything noted so far."""
        text = self._path.read_text() if self._path.exists() else ""
        # A line that is being written may be read in part: it is read next time.
        return Lines(text.rpartition("\n")[0])


class Lines:
    """What a journal holds."""

    def __init__(self, text: str) -> None:
        self.ready: set[int] = set()
        """Process ids."""
        self.starts: list[Start] = []
        self.completions: list[Completion] = []
        self.counts: defaultdict[str, int] = defaultdict(int)
        """Of all processes together."""
        for line in text.splitlines():
            what, *told = json.loads(line)
            if what == "ready":
                self.ready.add(told[0])
            elif what == "start":
                if told[-1] is not None:
                    told[-1] = Check(*told[-1])
                self.starts.append(Start(*told))
            elif what == "complete":
                self.completions.append(Completion(*told))
            else:
                self.counts[told[0]] += told[1]

    def starts_of(self, pid: int) -> int:
        """Return how many handlers a process has started."""
        return sum(start.pid == pid for start in self.starts)
