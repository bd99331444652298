"""Plain functions in threads, and the event loop that guards them.

The guard is asynchronous; a plain `def` is not.  Its caller's thread lends itself: the loop, in another thread,
reserves and settles, and what is guarded runs where it was called, with that thread's locals and locks.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar

from integr8s_idem.engine.active_runs import check_start, run_of
from integr8s_idem.engine.fork_guard import fork_count
from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import ApplicationError

T = TypeVar("T")

Here: TypeAlias = Callable[[Callable[[], Any], Attempt], Awaitable[Any]]
"""Awaited on the loop, it runs a function in the thread that waits for the loop, and gives what it returns.

The attempt is that of the function: it is not called on a lease that is late.
"""

_Job: TypeAlias = Callable[[], None]


class _Loop:
    """One event loop in a thread of ours, begun when the first plain function needs it."""

    def __init__(self) -> None:
        self._begin_anew()
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        # Threads do not survive a fork.
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="integr8s-idem", daemon=True).start()
            return self._loop


_OURS: Final = _Loop()


def own_loop() -> asyncio.AbstractEventLoop:
    """The loop for plain functions of programs that have none."""
    return _OURS.get()


def in_a_loop() -> bool:
    """Whether this thread runs an event loop, which a call that waits would stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling `function` does nothing but make a coroutine; a wrapper may run what it wraps to its end."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def named(function: Callable[..., object]) -> str:
    """How a function is told of."""
    return str(getattr(function, "__qualname__", function))


def refuse_awaitable(value: object, function: Callable[..., object]) -> None:
    """Refuse what a plain function has returned instead of doing it.

    Raises:
        ApplicationError: It is something to await.
    """
    if not inspect.isawaitable(value):
        return
    if inspect.iscoroutine(value):
        value.close()  # it would be told of a second time, as never awaited
    raise ApplicationError(
        f"{named(function)} has returned {type(value).__name__} to await, which nobody does here, and whose work is "
        "not done yet: give an async def where one is taken, or a function that does it before it returns"
    )


def wait_for(loop: asyncio.AbstractEventLoop, guard: Callable[[Here], Coroutine[Any, Any, T]]) -> T:
    """Run `guard` on `loop`, lend it this thread, and return what it returns.

    If this thread is interrupted, the guard is cancelled, and gives back what it holds.

    Raises:
        ApplicationError: A function that ran here has forked the process, and returned in the child.
        BaseException: Any error of `guard`.
    """
    forks = fork_count()
    jobs: SimpleQueue[_Job | None] = SimpleQueue()
    guarding = asyncio.run_coroutine_threadsafe(
        guard(lambda function, attempt: _hand_over(function, attempt, jobs)), loop
    )
    guarding.add_done_callback(lambda _: jobs.put(None))
    try:
        while (job := jobs.get()) is not None:
            job()
            if fork_count() != forks:
                raise ApplicationError(
                    "a guarded function has forked the process and returned in the child, where no event loop waits "
                    "for it: end the child within the function, by os._exit"
                )
    except BaseException:
        guarding.cancel()
        raise
    return guarding.result()


def _start(function: Callable[[], Any], attempt: Attempt) -> Any:
    # The thread may have been busy since the loop checked.
    check_start(run_of(attempt))
    return function()


async def _hand_over(function: Callable[[], Any], attempt: Attempt, jobs: SimpleQueue[_Job | None]) -> Any:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = copy_context()

    def tell(settle: Callable[[Any], None], value: object) -> None:
        if not done.done():  # the guard may have given up meanwhile
            settle(value)

    def job() -> None:
        try:
            value = context.run(_start, function, attempt)
        except Exception as error:  # noqa: BLE001  # raised where it is awaited
            loop.call_soon_threadsafe(tell, done.set_exception, error)
        else:
            loop.call_soon_threadsafe(tell, done.set_result, value)

    jobs.put(job)
    return await done
