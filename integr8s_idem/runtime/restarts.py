"""Decide whether and when a worker process that has ended is started again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final

from integr8s_idem.worker.backoff import Backoff

INVALID_INPUT: Final = 2
"""Exit status of a worker whose arguments or settings are invalid: it would be the same after every start."""

MOST_FAILED_STARTS: Final = 3
"""If no other process may work, the supervisor gives up when one has failed this often in a row before it was ready."""

STEADY_SECONDS: Final = 60.0
"""A process that lasted this long starts again without the delays of earlier failures."""

_ENDED_BY_SIGNAL: Final = {-signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT}
"""Of a process that does not handle them; Python turns SIGINT into KeyboardInterrupt."""

BACKOFF: Final = Backoff(initial=1.0, longest=30.0)


class Restarts:
    """The failures of one worker process in a row.

    Args:
        pause: Returns the seconds to wait after a number of failures.
    """

    def __init__(self, pause: Callable[[int], float] = BACKOFF.pause) -> None:
        self._pause = pause
        self._failures = 0
        self.failed_starts = 0
        """How often in a row it has ended before it was ready."""

    def pause_after(self, status: int, *, was_ready: bool, lasted: float, others_may_work: bool) -> float | None:
        """Return the seconds to wait before the next start, or `None` to give up.

        Args:
            status: Exit status of the process.
            was_ready: Whether it has been ready since its start.
            lasted: Seconds since its start.
            others_may_work: Whether another process is ready, or is starting and has not failed to start before.
        """
        self.failed_starts = 0 if was_ready else self.failed_starts + 1
        if not was_ready and status == INVALID_INPUT:
            return None
        if self.failed_starts >= MOST_FAILED_STARTS and not others_may_work:
            return None
        self._failures = 1 if lasted >= STEADY_SECONDS else self._failures + 1
        return self._pause(self._failures)


def exit_status(returncode: int) -> int:
    """Return the exit status of a process as shells do: 128 + N if signal N killed it."""
    return returncode if returncode >= 0 else 128 - returncode


def drained_status(returncode: int) -> int:
    """Return the exit status of a process that was asked to drain.

    Signals end only processes that have not started their services, or have already stopped them.
    """
    return 0 if returncode in _ENDED_BY_SIGNAL else exit_status(returncode)


def ending(returncode: int) -> str:
    """Describe how a process ended: `exit status 1`, or `killed by SIGKILL`."""
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-returncode}"
