"""Simulated processes in the event loop of a test, which can crash between any two steps, or stall for a while.

A context variable, inherited by tasks, identifies the process of a task, and this module runs each of its steps.  The
tasks of a crashed process take no more steps, not even `except` or `finally`, as after SIGKILL.  Those of a stalled
process continue later, as after SIGSTOP and SIGCONT.  Threads are not simulated.
"""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from enum import Enum
from functools import partial
from typing import Any, Final, TypeVar

from integr8s_idem._util.context_vars import SIMULATED_PROCESS

T = TypeVar("T")

MAX_CANCELLATIONS: Final = 10
"""How often to cancel the coroutine of a dead process before leaving it to the garbage collector."""

BURIAL_SECONDS: Final = 5.0


class _State(Enum):
    RUNNING = "running"
    STALLED = "stalled"
    DEAD = "dead"
    BURIED = "buried"
    """Dead, and its coroutines have been closed."""


class Process:
    """A group of tasks that crash and stall together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tasks: list[asyncio.Task[Any]] = []
        self._state = _State.RUNNING
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def running(self) -> bool:
        return self._state is _State.RUNNING

    @property
    def stalled(self) -> bool:
        return self._state is _State.STALLED

    @property
    def dead(self) -> bool:
        return self._state in (_State.DEAD, _State.BURIED)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start `work` in this process, within `processes_in_loop`."""
        return asyncio.get_running_loop().create_task(work, context=self._context())

    def call(self, function: Callable[[], None]) -> None:
        """Call `function`, whose tasks belong to this process."""
        self._context().run(function)

    def _context(self) -> Context:
        context = copy_context()
        context.run(SIMULATED_PROCESS.set, self)
        return context

    def die(self) -> None:
        """Crash: no task takes another step after its next `await`."""
        if not self.dead:
            self._state = _State.DEAD

    def stall(self) -> None:
        """Stall each task at its next `await`."""
        if self.running:
            self._state = _State.STALLED

    def resume(self) -> None:
        """Continue after a stall."""
        if self.stalled:
            self._state = _State.RUNNING
            self._wake()

    async def bury(self) -> None:
        """Clean up a dead process by cancelling its coroutines."""
        self._state = _State.BURIED
        self._wake()
        left = [task for task in self.tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=BURIAL_SECONDS)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def pause(self) -> asyncio.Future[None] | None:
        """Return a future to wait for before the next step, or `None` if the step may be taken."""
        if self._state not in (_State.STALLED, _State.DEAD):
            return None
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    @property
    def buried(self) -> bool:
        return self._state is _State.BURIED


def current_process() -> Process | None:
    """Return the process of the running code; `None` for the test itself."""
    found = SIMULATED_PROCESS.get()
    assert found is None or isinstance(found, Process)
    return found


@contextmanager
def processes_in_loop() -> Iterator[None]:
    """Let processes control their tasks inside the block; other tasks are not affected."""
    loop = asyncio.get_running_loop()
    before: Callable[..., asyncio.Task[Any]] | None = loop.get_task_factory()  # type: ignore[assignment]

    def make(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        process: Any = SIMULATED_PROCESS.get()
        context: Context | None = options.get("context")
        if context is not None:
            own = context.get(SIMULATED_PROCESS)
            if own is None and process is not None:  # a new context, such as that of a batch
                context.run(SIMULATED_PROCESS.set, process)
            process = own or process
        controlled = work if process is None else _controlled(process, work)
        task = asyncio.Task(controlled, loop=loop, **options) if before is None else before(loop, controlled, **options)
        if process is not None:
            process.tasks.append(task)
            task.add_done_callback(process.tasks.remove)
            task.add_done_callback(partial(_close_unstarted, work))
        return task

    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(before)


def _close_unstarted(work: Coroutine[Any, Any, Any], _: asyncio.Task[Any]) -> None:
    """Close `work` if its task was cancelled before its first step, or Python would warn that nobody awaited it."""
    if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
        work.close()


async def _controlled(process: Process, work: Coroutine[Any, Any, T]) -> T:
    return await _steps(process, work)


@types.coroutine
def _steps(process: Process, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    step: Any = work.send
    value: object = None
    while True:
        while (waiting := process.pause()) is not None:
            try:
                yield from waiting.__await__()
            except GeneratorExit:
                work.close()
                raise
            except asyncio.CancelledError as error:
                value, step = error, work.throw  # raised when the process continues
        if process.buried:
            yield from _end(work)
            raise asyncio.CancelledError
        try:
            waiting_for = step(value)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            value, step = (yield waiting_for), work.send
        except BaseException as error:  # noqa: BLE001 -- passed on to `work`
            value, step = error, work.throw


def _end(work: Coroutine[Any, Any, Any]) -> Generator[None, Any, None]:
    for _ in range(MAX_CANCELLATIONS):
        try:
            work.throw(asyncio.CancelledError())
        except BaseException:  # noqa: BLE001 -- errors of a dead process are ignored
            return
        # It may wait for another task of the dead process, which ends in this iteration of the loop.
        with suppress(asyncio.CancelledError):
            yield
