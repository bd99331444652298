"""An event loop with simulated time: hours of leases pass in milliseconds, without real waits.

    def test_a_lease_is_renewed_for_hours() -> None:
        async def main() -> None:
            store = MemoryIdempotencyRepository(clock=virtual_now)
            ...
            await asyncio.sleep(3600)

        run_virtual(main())

or, as a decorator that makes the test a plain function for pytest:

    @virtual_time
    async def test_a_lease_is_renewed_for_hours() -> None: ...

`loop.time()` starts at 0 and does not change while any task can run.  Otherwise it moves exactly to the next timer;
timers less than a microsecond apart are due together.  The order of steps is deterministic.

The loop supports only pure asyncio code: tasks, futures, locks, queues and timers.  Sockets, subprocesses, threads
(`to_thread`, `call_soon_threadsafe`) and signals do not work, because time does not pass for them.  Code that reads
`time.monotonic()` or the wall clock gets real time.
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
"""The result of `virtual_now` when `loop.time()` is 0."""


class DeadlockError(Exception):
    """No task can run and no timer is set: a real loop would hang forever."""


class _JumpingSelector(selectors.BaseSelector):
    """A selector that advances the clock instead of waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[int, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("no task can go on and no timer is set")
        self.now += max(timeout, 0.0)
        return []

    # The loop registers its wake-up socket, which never becomes readable.

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
    """The event loop with simulated time, for direct use."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        # With a resolution of a nanosecond, timers a year ahead would never be due, because floats are coarser there.
        self._clock_resolution = 1e-6
        set_clock(self, self.time)

    def time(self) -> float:
        """Return the seconds since the loop was made; changes only while no task can run."""
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop with simulated time, like `asyncio.run`.

    Raises:
        DeadlockError: `main` waits for something that can never happen.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Decorate an async test function, so that it runs with `run_virtual` as a plain function.

    It may use pytest fixtures, except for async ones, which belong to another loop.
    """

    @functools.wraps(test)
    def on_virtual_time(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_virtual(test(*args, **kwargs))

    return on_virtual_time


def virtual_now() -> datetime:
    """Return `EPOCH` plus the running loop's time, for example as the clock of a `MemoryIdempotencyRepository`."""
    return EPOCH + timedelta(seconds=asyncio.get_running_loop().time())
