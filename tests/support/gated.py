"""Work that a test holds back, lets end as it says, and counts: on an event loop or in a thread."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any, Final

_LOOK: Final = 0.01


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as its function sees it."""

    payload: str
    attempt: int
    fence: int


class GatedWork:
    """Counts its runs, and ends them as it was told.

    Args:
        ends: What the runs return, or raise, one after the other; the last one again and again.  Or what says it
            of a run.
        held: Whether runs wait for `may_end`.
        stubborn: Whether a run goes on although it is cancelled, as one in a thread does.
    """

    def __init__(self, *ends: Any, held: bool = False, stubborn: bool = False) -> None:
        self.ends = list(ends) or ["done"]
        self.stubborn = stubborn
        self.runs: list[Run] = []
        self.finished = 0
        """Runs that came to their end, which is where their effect would be."""
        self.interrupted = threading.Event()
        """Interrupts a run in a thread, as Ctrl-C does."""
        self.may_end = threading.Event()
        if not held:
            self.may_end.set()

    @property
    def attempts(self) -> list[int]:
        return [run.attempt for run in self.runs]

    def here(self, run: Run) -> Any:
        """A run in the thread that calls."""
        self.runs.append(run)
        end = self._next(run)
        while not self.may_end.wait(_LOOK):
            if self.interrupted.is_set():
                raise KeyboardInterrupt
        return self._ended(end)

    async def __call__(self, run: Run) -> Any:
        """A run on an event loop."""
        self.runs.append(run)
        end = self._next(run)
        while not self.may_end.is_set():
            try:
                await asyncio.sleep(_LOOK)
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise
        return self._ended(end)

    def _next(self, run: Run) -> Any:
        end = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
        return end(run) if callable(end) else end

    def _ended(self, end: Any) -> Any:
        self.finished += 1
        if isinstance(end, BaseException):
            raise end
        return end
