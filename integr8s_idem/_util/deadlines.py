"""Deadlines for those who set thousands in a second: all of one event loop share a timer.

As `asyncio.timeout_at`, whose timer of its own costs more than many a call that it guards.

A deadline that fires late, after a turn of the event loop that took long, gives the loop a few more turns before it
cancels: the answer that the work waits for may already be in the socket.  A lease that has ended gives none.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Final

from integr8s_idem._util.per_loop import PerLoop

LATE: Final = 0.01
"""Seconds after its time from which on a deadline fires late."""

GRACE_TURNS: Final = 4
"""Turns of the event loop between a deadline that fires late and the cancellation.

One to read the socket (uvloop runs timers before it polls), one to resume the task that reads, and two for the tasks
that share its answer.
"""


class Deadline:
    """`with` it around what must end before `when`, by the event loop's clock; `None` for no limit.

    What runs late is cancelled, and leaving the block raises `TimeoutError` instead of that cancellation.
    """

    __slots__ = ("_cancelling", "_clock", "_task", "expired", "when")

    def __init__(self, when: float | None) -> None:
        self.when = when
        self.expired = False
        """Whether it has cancelled what it limits."""
        self._clock: _Clock | None = None

    def reschedule(self, when: float | None) -> None:
        """Another limit from now on; no way back for one that has expired."""
        self.when = when
        if self._clock is not None:
            self._clock.heed(self)

    @property
    def entered(self) -> bool:
        """Whether the block that it limits runs now."""
        return self._clock is not None

    def enter(self, task: asyncio.Task[Any]) -> None:
        """Limit what `task` does, until `leave`."""
        self._task = task
        self._cancelling = task.cancelling()
        self._clock = _clock_of(asyncio.get_running_loop())
        self._clock.heed(self)

    def leave(self) -> bool:
        """End what `enter` began.  Whether the task was cancelled; that cancellation is withdrawn."""
        assert self._clock is not None, "it was entered"
        self._clock.forget(self)
        self._clock = None
        if self.expired:
            self._task.uncancel()
        return self.expired

    def __enter__(self) -> Deadline:
        task = asyncio.current_task()
        assert task is not None, "what has a deadline runs in a task"
        self._task = task
        self._cancelling = task.cancelling()
        self._clock = _clock_of(asyncio.get_running_loop())
        self._clock.heed(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._clock is not None, "it was entered"
        self._clock.forget(self)
        self._clock = None  # whoever moves it now is too late, and must not cancel what comes after the block
        # A cancellation that is ours alone becomes an error; any other goes on.
        if self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def has_grace(self, now: float) -> bool:
        """Whether the work may go on for a few turns of the event loop if this fires late, at `now`."""
        return True

    def expire(self) -> None:
        """Its time has come."""
        self.expired = True
        self._task.cancel()


class _Clock:
    """The deadlines of one event loop that have not expired, and one timer for the first of them."""

    def __init__(self) -> None:
        self._heeded: dict[Deadline, None] = {}
        """In the order in which they were heeded: those of one moment expire in the same order in every run."""
        self._timer: asyncio.Handle | None = None
        self._rings_at = 0.0
        self._in_grace = False

    def heed(self, deadline: Deadline) -> None:
        if deadline.when is None or deadline.expired:
            self._heeded.pop(deadline, None)
            return
        self._heeded[deadline] = None
        if not self._in_grace and (self._timer is None or deadline.when < self._rings_at):
            self._set(deadline.when)

    def forget(self, deadline: Deadline) -> None:
        # The timer stays: it is cheaper to let it ring in vain once than to set it anew each time.
        self._heeded.pop(deadline, None)

    def _set(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at = when
        self._timer = asyncio.get_running_loop().call_at(when, self._ring)

    def _ring(self) -> None:
        self._timer = None
        is_late = asyncio.get_running_loop().time() - self._rings_at > LATE
        self._in_grace = True
        self._wait(GRACE_TURNS if is_late else 0)

    def _wait(self, turns: int) -> None:
        now = asyncio.get_running_loop().time()
        for deadline in [late for late in self._heeded if late.when is not None and late.when <= now]:
            if not turns or not deadline.has_grace(now):
                self._heeded.pop(deadline, None)
                deadline.expire()
        if turns:
            asyncio.get_running_loop().call_soon(self._wait, turns - 1)
            return
        self._in_grace = False
        self._set_for_first()

    def _set_for_first(self) -> None:
        if self._heeded:
            self._set(min(deadline.when for deadline in self._heeded if deadline.when is not None))


_clock_of = PerLoop(lambda _: _Clock())
