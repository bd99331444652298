"""Run plain functions in their calling thread while an event loop in another thread manages idempotency.

The manager is asynchronous; a plain `def` is not.  The event loop reserves and completes the key, and the calling
thread waits and runs the function, so that the function sees that thread's locals and locks.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeVar, cast

from integr8s_idem._util.futures import fail_future
from integr8s_idem.engine.active_runs import check_start, run_of
from integr8s_idem.engine.fork_guard import ForkGuard
from integr8s_idem.engine.leases import LateStartError
from integr8s_idem.engine.loop_guard import LIBRARY_LOOPS, LOOK_EVERY
from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import ApplicationError, ResultNotStoredError

T = TypeVar("T")


class Here(Protocol):
    """Called on the event loop: runs a function in the waiting thread and returns its result.

    The function is not called if the lease of the attempt is about to expire.
    """

    def __call__(self, function: Callable[[], Any], attempt: Attempt, *, is_work: bool = True) -> Awaitable[Any]:
        """`is_work`: whether the function does the work; it may only examine what an earlier attempt has done."""
        ...


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
                if sys.is_finalizing():
                    raise _no_loop("the interpreter is exiting")  # its thread would not run
                self._loop = asyncio.new_event_loop()
                LIBRARY_LOOPS.add(self._loop)
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
        ApplicationError: A function forked the process and returned in the child; or the event loop ended before a
            function ran.
        ResultNotStoredError: The event loop ended after a function returned, before its outcome was recorded.
        BaseException: Any error of `guard`.
    """
    # No `concurrent.futures.Future`: an interrupt could leave its lock locked, which the event loop needs as well.
    forks = ForkGuard.forks_now
    guarding = _Guarding(loop, guard)
    todo: Job | _End | None = None
    try:
        guarding.start()
        while isinstance(todo := guarding.next(todo), Job):
            todo.run()
            if ForkGuard.forks_now != forks:
                raise ApplicationError(
                    "a guarded function forked the process and returned in the child, where no event loop is running: "
                    "end the child within the function with os._exit"
                )
    except BaseException as error:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(guarding.leave, todo, error)
        raise
    return cast("T", todo.result())


@dataclass(slots=True, eq=False)
class _End:
    """How a guard has ended: with a value, or an error."""

    value: Any = None
    error: BaseException | None = None

    def result(self) -> Any:
        if isinstance(self.error, asyncio.CancelledError):
            raise CancelledError from self.error  # that of threads
        if self.error is not None:
            raise self.error
        return self.value


class _Guarding:
    """A guard on its event loop, and what the waiting thread has to do for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, guard: Callable[[Here], Coroutine[Any, Any, Any]]) -> None:
        self._loop = loop
        self._guard = guard
        self._task: asyncio.Task[None] | None = None
        self.todo = SimpleQueue[Job | _End]()
        """For the thread: functions to run, then the end."""

    def start(self) -> None:
        """Begin on the event loop; thread-safe.

        Raises:
            ApplicationError: The event loop is closed.
        """
        try:
            self._loop.call_soon_threadsafe(self.begin)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            raise _no_loop("the event loop has ended") from None

    def next(self, last: Job | _End | None) -> Job | _End:
        """Wait for what the thread has to do after `last`.

        Raises:
            ApplicationError, ResultNotStoredError: The event loop has ended; see `wait_for`.
            Exception: As well, but the function has raised this error.
        """
        has_stopped = False
        while True:
            try:
                return self.todo.get(timeout=LOOK_EVERY)
            except Empty:
                # Checked twice, since a loop may stop for a moment, between two calls of `run_until_complete`.
                is_stopped = not self._loop.is_running()
                if sys.is_finalizing() or self._loop.is_closed() or (is_stopped and has_stopped):
                    break
                has_stopped = is_stopped
        why = "the interpreter is exiting" if sys.is_finalizing() else "the event loop has ended"
        raise last.unrecorded(why) if isinstance(last, Job) else _no_loop(why)

    def begin(self) -> None:
        self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            value = await self._guard(partial(run_in_caller, todo=self.todo))
        except BaseException as error:  # noqa: BLE001  # raised in the thread
            self.todo.put(_End(error=error))
        else:
            self.todo.put(_End(value))

    def leave(self, last: Job | _End | None, error: BaseException) -> None:
        """End the guard of a thread that `error` has interrupted, which may not have reported its last function."""
        if isinstance(last, Job):
            last.report(error)
        if self._task is not None:
            self._task.cancel()


def _no_loop(why: str) -> ApplicationError:
    return ApplicationError(
        f"{why}, so this call of a plain function cannot be guarded: its function has not run. Call it while the event "
        "loop of its manager is running, and wait for its threads before the loop ends"
    )


class _ThreadExit(BaseException):
    """Ends the guard of a function that an error has ended which is no `Exception`, as after a crash.

    The error itself is raised in the thread: some, such as `SystemExit`, would end the event loop.
    """


class Job:
    """A function that a guard passes to the waiting thread."""

    def __init__(self, function: Callable[[], Any], attempt: Attempt, *, is_work: bool = True) -> None:
        self._function = function
        self._is_work = is_work
        self._attempt = attempt
        self._context = copy_context()
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self._loop.create_future()
        """The result of the function, or its error."""
        self._is_decided = threading.Lock()
        """Acquired by what comes first, the start of the function or a cancellation."""
        self._end: _End | None = None

    def withdraw(self) -> bool:
        """Prevent the start of the function; `False` if it has started."""
        is_withdrawn = self._is_decided.acquire(blocking=False)
        if is_withdrawn:
            self.done.cancel()
        return is_withdrawn

    def run(self) -> None:
        """Run the function in this thread unless it was withdrawn."""
        if not self._is_decided.acquire(blocking=False):
            return
        try:
            self._context.run(self._start)
        except Exception as error:
            if self._end is not None:
                raise  # an interrupt after the function has returned
            self._end = _End(error=error)
        try:
            self._loop.call_soon_threadsafe(self.report)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # The thread finds that out when it waits for the end.

    def unrecorded(self, why: str) -> Exception:
        """Return the error of a call whose outcome is not recorded, because of `why`."""
        end = self._end
        if end is None or not self._is_work or isinstance(end.error, LateStartError):
            return _no_loop(why)
        if end.error is None:
            return ResultNotStoredError(self._attempt.label or self._attempt.key, why)
        if isinstance(end.error, StopIteration):
            error = RuntimeError("a function raised StopIteration")  # as if the event loop had passed it on
            error.__cause__ = end.error
            return error
        assert isinstance(end.error, Exception), "others are raised at once"
        return end.error

    def _start(self) -> None:
        # The thread may have been busy since the loop checked.
        check_start(run_of(self._attempt))
        self._end = _End(self._function())

    def report(self, interruption: BaseException | None = None) -> None:
        """Report on the event loop how the function has ended, or `interruption` if that has ended it."""
        if self.done.done() or not self._is_decided.locked():
            return  # it has been reported or withdrawn, or has not started
        if self._end is None:
            is_released = isinstance(interruption, KeyboardInterrupt)
            fail_future(self.done, asyncio.CancelledError() if is_released else _ThreadExit(interruption))
        elif self._end.error is not None:
            fail_future(self.done, self._end.error)
        else:
            self.done.set_result(self._end.value)


async def run_in_caller(
    function: Callable[[], Any], attempt: Attempt, todo: SimpleQueue[Job | _End], *, is_work: bool = True
) -> Any:
    """Run `function` in the thread that takes its job.

    If the guard is cancelled after the function has started, it waits for it all the same: a thread cannot be
    cancelled, its function may succeed, and nobody else may run it until then.
    """
    job = Job(function, attempt, is_work=is_work)
    todo.put(job)
    while not job.done.done():
        try:
            await asyncio.wait({job.done})  # unlike `await job.done`, this does not cancel the future
        except asyncio.CancelledError:
            if job.withdraw():
                raise
    return job.done.result()
