"""Processes within the event loop of a test: each can die between any two steps, or stand still for a while.

Which process a task belongs to is told by a context variable, which asyncio hands on by itself; every task of a process
takes its steps through here.  One that is dead takes none any more: no `except`, no `finally`, as after SIGKILL.  One
that stands still takes them when it goes on, as after SIGSTOP and SIGCONT.  Threads are not part of it: they run on.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from enum import Enum
from typing import Any, Final, TypeVar

from integr8s_idem._util.context_vars import SIMULATED_PROCESS

T = TypeVar("T")

LAST_WORDS: Final = 10
"""How often what is left of the dead is told to end, before it is left to the garbage collector."""

BURIAL_SECONDS: Final = 5.0


class _State(Enum):
    RUNNING = "running"
    STALLED = "stalled"
    DEAD = "dead"
    BURIED = "buried"
    """Dead, and its coroutines are cleared away."""


class Process:
    """Tasks that share a fate."""

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
        """Begin `work` as a part of it, within `processes_in_loop`."""
        context = copy_context()
        context.run(SIMULATED_PROCESS.set, self)
        return asyncio.get_running_loop().create_task(work, context=context)

    def die(self) -> None:
        """It takes no step any more, once the one that it is at has come to its next `await`."""
        if not self.dead:
            self._state = _State.DEAD

    def stall(self) -> None:
        """Stand still from the next `await` of each task on."""
        if self.running:
            self._state = _State.STALLED

    def resume(self) -> None:
        """Go on; what has come up meanwhile happens now."""
        if self.stalled:
            self._state = _State.RUNNING
            self._wake()

    async def bury(self) -> None:
        """Clear away what is left of it: its coroutines hear that they are cancelled, and nothing waits for them."""
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

    def stands_still(self) -> asyncio.Future[None] | None:
        """What a step of it waits for, if it is not to be taken now."""
        if self._state not in (_State.STALLED, _State.DEAD):
            return None
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    @property
    def buried(self) -> bool:
        return self._state is _State.BURIED


def current_process() -> Process | None:
    """The process whose code runs; `None` for the test itself."""
    found = SIMULATED_PROCESS.get()
    assert found is None or isinstance(found, Process)
    return found


@contextmanager
def processes_in_loop() -> Iterator[None]:
    """Tasks of a process are steered by it while inside; those of nobody are as ever."""
    loop = asyncio.get_running_loop()
    before: Callable[..., asyncio.Task[Any]] | None = loop.get_task_factory()  # type: ignore[assignment]

    def make(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        context = options.get("context")
        process: Any = SIMULATED_PROCESS.get() if context is None else context.get(SIMULATED_PROCESS)
        steered = work if process is None else _steered(process, work)
        task = asyncio.Task(steered, loop=loop, **options) if before is None else before(loop, steered, **options)
        if process is not None:
            process.tasks.append(task)
            task.add_done_callback(process.tasks.remove)
        return task

    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(before)


async def _steered(process: Process, work: Coroutine[Any, Any, T]) -> T:
    return await _steps(process, work)


@types.coroutine
def _steps(process: Process, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    step: Any = work.send
    told: object = None
    while True:
        while (pause := process.stands_still()) is not None:
            try:
                yield from pause.__await__()
            except GeneratorExit:
                work.close()
                raise
            except asyncio.CancelledError as error:
                told, step = error, work.throw  # it hears of that when it goes on
        if process.buried:
            yield from _end(work)
            raise asyncio.CancelledError
        try:
            waiting_for = step(told)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            told, step = (yield waiting_for), work.send
        except BaseException as error:  # noqa: BLE001 -- it is for `work` to say what comes of it
            told, step = error, work.throw


def _end(work: Coroutine[Any, Any, Any]) -> Generator[None, Any, None]:
    for _ in range(LAST_WORDS):
        try:
            work.throw(asyncio.CancelledError())
        except BaseException:  # noqa: BLE001 -- last words of the dead
            return
        # What it waits for now may be another task of the dead, which ends in this turn of the loop.
        with suppress(asyncio.CancelledError):
            yield
