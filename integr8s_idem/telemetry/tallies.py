"""Numbers that several threads add to, and one reads from time to time.

Each thread has cells of its own, and a cell is written by its thread alone.  So adding takes no lock and
loses nothing, on an interpreter without a global lock either.  Whoever wants totals sums up the cells.
"""

from __future__ import annotations

from operator import add
from threading import Lock, Thread, current_thread, local
from typing import Generic, TypeVar

C = TypeVar("C")
"""Names what is counted."""
T = TypeVar("T")
"""Names what takes time."""


class Cells(Generic[C, T]):
    """What was counted, and how long things took, by the label they share."""

    __slots__ = ("counts", "times")

    def __init__(self) -> None:
        # In two steps: a tuple of label and name would be made and hashed each time, and cost more than both.
        self.counts: dict[str, dict[C, int]] = {}
        self.times: dict[str, dict[T, list[float]]] = {}
        """How many took no longer than each bound but longer than the one before; last the sum of seconds."""

    def take(self, others: Cells[C, T]) -> None:
        """Add what `others` have.  Their thread may go on meanwhile: to copy a `dict` or a `list` is one step."""
        for label, counts in others.counts.copy().items():
            ours = self.counts.setdefault(label, {})
            for name, count in counts.copy().items():
                ours[name] = ours.get(name, 0) + count
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
        """The sums over all threads.  No later one is smaller."""
        totals: Cells[C, T] = Cells()
        with self._lock:
            totals.take(self._ended)
            for _, cells in self._threads:
                totals.take(cells)
        return totals

    def cells_of_new_thread(self) -> Cells[C, T]:
        """Cells for the thread that asks.  Those of threads that have ended become one: a server may use up many."""
        running = [(current_thread(), Cells[C, T]())]
        with self._lock:
            for thread, cells in self._threads:
                if thread.is_alive():
                    running.append((thread, cells))
                else:
                    self._ended.take(cells)
            self._threads = running
        return running[0][1]


class Here(local, Generic[C, T]):
    """The cells of the thread that asks; `__init__` runs once in each thread."""

    def __init__(self, tallies: Tallies[C, T]) -> None:
        cells = tallies.cells_of_new_thread()
        self.counts = cells.counts
        self.times = cells.times
