"""Deadlines that share one timer per event loop, so that thousands per second are cheap.

They work like `asyncio.timeout_at`, which creates a timer for each use and can cost more than the call it guards.
Code that never waits cannot be cancelled: a run enters its deadline only when its coroutine waits for something.

If a deadline fires late, after a long iteration of the event loop, the loop gets a few more iterations before the
task is cancelled, because the answer may already be in the socket.  A lease that has ended has no such grace period.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from types import TracebackType
from typing import Any, Final, Self
from weakref import ref

from integr8s_idem._util.per_loop import PerLoop

LATE: Final = 0.01
"""Delay in seconds after which a deadline counts as late."""

GRACE_TURNS: Final = 4
"""Iterations of the event loop between a late deadline and the cancellation.

One to read the socket (uvloop runs timers before it polls), one to resume the reading task, and two for tasks
that share its answer.
"""


class Deadline:
    """Context manager that limits a block to end before `when`, by the event loop's clock; `None` for no limit.

    A block that exceeds the limit is cancelled, and the cancellation becomes a `TimeoutError`.
    """

    __slots__ = ("_cancelling", "_clock", "_task", "expired", "when")

    def __init__(self, when: float | None) -> None:
        self.when = when
        self.expired = False
        """Whether it has cancelled the block."""
        self._clock: _Clock | None = None

    def reschedule(self, when: float | None) -> None:
        """Change the limit; has no effect after the deadline has expired."""
        self.when = when
        if self._clock is not None:
            self._clock.watch(self)

    @property
    def entered(self) -> bool:
        """Whether the block is running."""
        return self._clock is not None

    def enter(self, task: asyncio.Task[Any]) -> None:
        """Limit `task` until `leave` is called."""
        self._task = task
        self._cancelling = task.cancelling()
        self._clock = _clock_of(task.get_loop())  # cheaper than the lookup of the running loop
        self._clock.watch(self)

    def leave(self) -> bool:
        """End the limit, and return whether it cancelled the task; the cancellation is undone."""
        assert self._clock is not None, "it was entered"
        self._clock.forget(self)
        self._clock = None
        if self.expired:
            self._task.uncancel()
        return self.expired

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "a deadline needs a task"
        self.enter(task)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._clock is not None, "it was entered"
        self._clock.forget(self)
        self._clock = None  # rescheduling after the block must not cancel the code that follows
        if error is not None or self.expired or self._task.cancelling() > self._cancelling:
            self.ended(error)

    def ended(self, error: BaseException | None) -> None:
        """Decide what a block raises that has raised `error`, or was cancelled and returned nevertheless.

        Raises:
            TimeoutError: The cancellation was that of this deadline.
        """
        if self.expired and self._task.uncancel() <= self._cancelling and type(error) is asyncio.CancelledError:
            raise TimeoutError from error

    def has_grace(self, now: float) -> bool:
        """Return whether the block may continue for a few iterations if the deadline fires late, at `now`."""
        return True

    def expire(self) -> None:
        """Cancel the block."""
        self.expired = True
        self._task.cancel()


class CallDeadline(Deadline):
    """Limits a call of a driver, which may swallow a cancellation: the block raises it nevertheless.

    Before Python 3.12, `asyncio.wait_for` returns or raises what came at the same time as the cancellation, such as a
    refused connection; redis-py and aiomysql connect with it.
    """

    __slots__ = ()

    def ended(self, error: BaseException | None) -> None:
        super().ended(error)
        if (error is None or isinstance(error, Exception)) and self._task.cancelling() > self._cancelling:
            raise asyncio.CancelledError from error


class _Clock:
    """The active deadlines of an event loop, and a timer for the earliest one."""

    def __init__(self) -> None:
        self._active: dict[Deadline, None] = {}
        """In insertion order, so that deadlines with the same time expire in the same order in every run."""
        self._timer: ref[asyncio.Handle] | None = None
        """Weak, because a timer references its loop, which may end before it fires."""
        self._fires_at = 0.0
        self._in_grace = False
        self._context = Context()
        """Not that of the first deadline's code, with whose variables the timers would keep its event in memory."""

    def watch(self, deadline: Deadline) -> None:
        if deadline.when is None or deadline.expired:
            self._active.pop(deadline, None)
            return
        self._active[deadline] = None
        if not self._in_grace and (self._timer is None or deadline.when < self._fires_at):
            self._set(deadline.when)

    def forget(self, deadline: Deadline) -> None:
        # The timer stays set: one unnecessary call is cheaper than resetting it each time.
        self._active.pop(deadline, None)

    def _set(self, when: float) -> None:
        if self._timer is not None and (timer := self._timer()) is not None:
            timer.cancel()
        self._fires_at = when
        self._timer = ref(asyncio.get_running_loop().call_at(when, self._fire, context=self._context))

    def _fire(self) -> None:
        self._timer = None
        is_late = asyncio.get_running_loop().time() - self._fires_at > LATE
        self._in_grace = True
        self._wait(GRACE_TURNS if is_late else 0)

    def _wait(self, turns: int) -> None:
        now = asyncio.get_running_loop().time()
        for deadline in [each for each in self._active if each.when is not None and each.when <= now]:
            if not turns or not deadline.has_grace(now):
                self._active.pop(deadline, None)
                deadline.expire()
        if turns:
            asyncio.get_running_loop().call_soon(self._wait, turns - 1)
            return
        self._in_grace = False
        self._set_for_first()

    def _set_for_first(self) -> None:
        if self._active:
            self._set(min(deadline.when for deadline in self._active if deadline.when is not None))


_clock_of = PerLoop(lambda _: _Clock())
