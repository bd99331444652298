"""Run plain functions in their calling thread while an event loop in another thread manages idempotency.

The manager is asynchronous; a plain `def` is not.  The event loop reserves and completes the key, and the calling
thread waits and runs the function, so that the function sees that thread's locals and locks.
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

from integr8s_idem._util.futures import fail_future
from integr8s_idem.engine.active_runs import check_start, run_of
from integr8s_idem.engine.fork_guard import fork_count
from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import ApplicationError

T = TypeVar("T")

Here: TypeAlias = Callable[[Callable[[], Any], Attempt], Awaitable[Any]]
"""Called on the event loop: runs a function in the waiting thread and returns its result.

The function is not called if the lease of the attempt is about to expire.
"""

Job: TypeAlias = Callable[[], None]


class _Loop:
    """An event loop in its own thread, started when the first plain function needs it."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # Threads do not survive a fork.
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="integr8s-idem", daemon=True).start()
            return self._loop


_OWN_LOOP: Final = _Loop()


def own_loop() -> asyncio.AbstractEventLoop:
    """Return the library's event loop, for programs without one."""
    return _OWN_LOOP.get()


def in_a_loop() -> bool:
    """Whether this thread runs an event loop, which a blocking call would stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def is_async(function: Callable[..., object]) -> bool:
    """Whether `function` is a coroutine function.  Wrappers are not unwrapped, because they may run the coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def named(function: Callable[..., object]) -> str:
    """Return the name of a function for messages."""
    return str(getattr(function, "__qualname__", function))


def refuse_awaitable(value: object, function: Callable[..., object]) -> None:
    """Reject an awaitable that a plain function returned instead of doing its work.

    Raises:
        ApplicationError: `value` is awaitable.
    """
    if not inspect.isawaitable(value):
        return
    if inspect.iscoroutine(value):
        value.close()  # avoid a second warning that it was never awaited
    raise ApplicationError(
        f"{named(function)} returned an awaitable ({type(value).__name__}), which is not awaited here, so its work is "
        "not done: use an async def where one is accepted, or a function that does its work before it returns"
    )


def wait_for(loop: asyncio.AbstractEventLoop, guard: Callable[[Here], Coroutine[Any, Any, T]]) -> T:
    """Run `guard` on `loop`, run the functions that it passes back in this thread, and return the result of `guard`.

    If this thread is interrupted while no function runs, or by `KeyboardInterrupt`, `guard` is cancelled and releases
    its reservations.

    Raises:
        ApplicationError: A function forked the process and returned in the child.
        BaseException: Any error of `guard`.
    """
    forks = fork_count()
    jobs: SimpleQueue[Job | None] = SimpleQueue()
    guarding = asyncio.run_coroutine_threadsafe(
        guard(lambda function, attempt: run_in_caller(function, attempt, jobs)), loop
    )
    guarding.add_done_callback(lambda _: jobs.put(None))
    try:
        while (job := jobs.get()) is not None:
            job()
            if fork_count() != forks:
                raise ApplicationError(
                    "a guarded function forked the process and returned in the child, where no event loop is running: "
                    "end the child within the function with os._exit"
                )
    except BaseException:
        guarding.cancel()
        raise
    return guarding.result()


class _ThreadExit(BaseException):
    """Ends the guard of a function that raised an error which is no `Exception`, as after a crash.

    The error itself is raised in the thread: some, such as `SystemExit`, would end the event loop.
    """


def _start(function: Callable[[], Any], attempt: Attempt) -> Any:
    # The thread may have been busy since the loop checked.
    check_start(run_of(attempt))
    return function()


async def run_in_caller(function: Callable[[], Any], attempt: Attempt, jobs: SimpleQueue[Job | None]) -> Any:
    """Run `function` in the thread that takes its job.

    If the guard is cancelled after the function has started, it waits for it all the same: a thread cannot be
    cancelled, its function may succeed, and nobody else may run it until then.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = copy_context()
    decided = threading.Lock()
    """Acquired by what comes first, the start of the function or a cancellation."""

    def job() -> None:
        if not decided.acquire(blocking=False):
            return
        try:
            value = context.run(_start, function, attempt)
        except Exception as error:  # noqa: BLE001  # raised by the awaiting guard
            loop.call_soon_threadsafe(fail_future, done, error)
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(done.cancel)
            raise
        except BaseException as error:
            loop.call_soon_threadsafe(done.set_exception, _ThreadExit(error))
            raise
        else:
            loop.call_soon_threadsafe(done.set_result, value)

    jobs.put(job)
    while not done.done():
        try:
            await asyncio.wait({done})  # unlike `await done`, this does not cancel the future
        except asyncio.CancelledError:
            if decided.acquire(blocking=False):
                raise
    return done.result()
