"""Work that a test can hold and end as it wants, on an event loop or in a thread."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any, Final

_LOOK: Final = 0.01


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as seen by the function."""

    payload: str
    attempt: int
    fence: int


class GatedWork:
    """Counts its runs, and ends them as configured.

    Args:
        ends: What the runs return or raise, in turn; the last one is repeated. Or a function that decides it for a run.
        held: Whether runs wait for `may_end`.
        stubborn: Whether a run ignores cancellation, like a run in a thread.
    """

    def __init__(self, *ends: Any, held: bool = False, stubborn: bool = False) -> None:
        self.ends = list(ends) or ["done"]
        self.stubborn = stubborn
        self.runs: list[Run] = []
        self.finished = 0
        """Runs that reached their end, where their effect would happen."""
        self.interrupted = threading.Event()
        """Interrupts a run in a thread like Ctrl-C."""
        self.may_end = threading.Event()
        if not held:
            self.may_end.set()

    @property
    def attempts(self) -> list[int]:
        return [run.attempt for run in self.runs]

    def here(self, run: Run) -> Any:
        """Run in the calling thread."""
        self.runs.append(run)
        end = self._next(run)
        while not self.may_end.wait(_LOOK):
            if self.interrupted.is_set():
                raise KeyboardInterrupt
        return self._ended(end)

    async def __call__(self, run: Run) -> Any:
        """Run on an event loop."""
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
