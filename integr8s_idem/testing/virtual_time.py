"""An event loop whose time jumps: hours of leases in milliseconds, without a single real wait.

    def test_a_lease_is_renewed_for_hours() -> None:
        async def main() -> None:
            store = MemoryIdempotencyRepository(clock=virtual_now)
            ...
            await asyncio.sleep(3600)

        run_virtual(main())

or, as a decorator that keeps pytest-asyncio away:

    @virtual_time
    async def test_a_lease_is_renewed_for_hours() -> None: ...

`loop.time()` starts at 0 and stands still while anything can run.  When nothing can, it moves to the
moment of the next timer, exactly; timers less than a microsecond apart count as due together.  One
history of timers gives one order of steps, every time.

Only pure asyncio code fits: tasks, futures, locks, queues, timers.  Time does not pass for what happens
outside of the loop: no sockets, no subprocesses, no threads (`to_thread`, `call_soon_threadsafe`), no
signals.  Code that reads `time.monotonic()` or the wall clock by itself sees real time.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, ParamSpec, TypeVar

from integr8s_idem._util.lease_clock import set_clock

__all__ = ["EPOCH", "DeadlockError", "VirtualTimeLoop", "run_virtual", "virtual_now", "virtual_time"]

P = ParamSpec("P")
T = TypeVar("T")

EPOCH: Final = datetime(2030, 1, 1, tzinfo=UTC)
"""What `virtual_now` says when `loop.time()` is 0."""


class DeadlockError(Exception):
    """Nothing can run, and no timer will ever change that: on a real loop this would hang for ever."""


class _JumpingSelector(selectors.BaseSelector):
    """Never waits.  Where a real selector would sleep, it moves the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[int, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("no task can go on and no timer is set")
        self.now += max(timeout, 0.0)
        return []

    # The loop registers its own wake-up socket; nothing ever comes from there.

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[number] = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        return self._keys.pop(number)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop itself, for those who drive one by hand."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        # With a real clock's nanosecond, a timer of next year would never be due: floats are coarser there.
        self._clock_resolution = 1e-6
        set_clock(self, self.time)

    def time(self) -> float:
        """Seconds since the loop was made; moves only while nothing can run."""
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """What `asyncio.run` does, on a loop of virtual time.

    Raises:
        DeadlockError: `main` waits for something that can never come.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Decorator: the async function as a plain one that runs by `run_virtual`.

    Fixtures of pytest reach it as always; async fixtures do not fit, they live on another loop.
    """

    @functools.wraps(test)
    def on_virtual_time(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_virtual(test(*args, **kwargs))

    return on_virtual_time


def virtual_now() -> datetime:
    """`EPOCH` plus the running loop's time: the clock for a `MemoryIdempotencyRepository`."""
    return EPOCH + timedelta(seconds=asyncio.get_running_loop().time())
