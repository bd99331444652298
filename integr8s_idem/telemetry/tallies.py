"""Numbers that several threads add to without a lock.

Each thread adds only to its own cells, so that no update is lost, even without a global interpreter lock.  Totals are
the sums over the cells of all threads.
"""

from __future__ import annotations

from operator import add
from threading import Lock, Thread, current_thread, local
from typing import Generic, TypeVar

C = TypeVar("C")
"""Name of a counter."""
T = TypeVar("T")
"""Name of a histogram."""


class Cells(Generic[C, T]):
    """Counts and durations by label."""

    __slots__ = ("counts", "times")

    def __init__(self) -> None:
        # Nested, since creating and hashing a tuple of label and name each time would cost more than two lookups.
        self.counts: dict[str, dict[C, int]] = {}
        self.times: dict[str, dict[T, list[float]]] = {}
        """Number of durations between each bound and the one before it, followed by the sum in seconds."""

    def add(self, others: Cells[C, T]) -> None:
        """Add the numbers of `others`.  Their thread may continue, since copying a `dict` or `list` is atomic."""
        for label, counts in others.counts.copy().items():
            sums = self.counts.setdefault(label, {})
            for name, count in counts.copy().items():
                sums[name] = sums.get(name, 0) + count
        for label, times in others.times.copy().items():
            rows = self.times.setdefault(label, {})
            for what, row in times.copy().items():
                rows[what] = list(map(add, rows[what], row.copy())) if what in rows else row.copy()


class Tallies(Generic[C, T]):
    """The cells of all threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._threads: list[tuple[Thread, Cells[C, T]]] = []
        self._ended: Cells[C, T] = Cells()
        self.here: Here[C, T] = Here(self)

    def totals(self) -> Cells[C, T]:
        """Return the sums over all threads, which never decrease."""
        totals: Cells[C, T] = Cells()
        with self._lock:
            totals.add(self._ended)
            for _, cells in self._threads:
                totals.add(cells)
        return totals

    def cells_of_new_thread(self) -> Cells[C, T]:
        """Return new cells for the current thread, and merge those of threads that have ended."""
        running = [(current_thread(), Cells[C, T]())]
        with self._lock:
            for thread, cells in self._threads:
                if thread.is_alive():
                    running.append((thread, cells))
                else:
                    self._ended.add(cells)
            self._threads = running
        return running[0][1]


class Here(local, Generic[C, T]):
    """The cells of the current thread; `__init__` runs once in each thread."""

    def __init__(self, tallies: Tallies[C, T]) -> None:
        cells = tallies.cells_of_new_thread()
        self.counts = cells.counts
        self.times = cells.times
