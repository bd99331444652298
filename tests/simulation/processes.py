"""Processes within one event loop, which can be killed or stalled between any two steps.

A context variable, which asyncio propagates, holds the process of a task, timer or callback. Broker, store, network and
the script of a run belong to no process.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from typing import Any, Final

from integr8s_idem.testing.virtual_time import VirtualTimeLoop

MOST_STEPS: Final = 2_000_000
"""Steps after which a run is considered endless."""


class State(Enum):
    """State of a process."""

    RUNNING = "running"
    STALLED = "stalled"
    """Stalled, as after SIGSTOP: due callbacks wait."""
    DEAD = "dead"
    """Killed: nothing of it runs again, not even a `finally`."""


class Process:
    """A worker process: tasks, timers and callbacks that stop and die together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = State.RUNNING
        self.cut_off = False
        """Whether the process runs without a connection to the outside."""
        self.stalls = 0
        """Number of stalls."""
        self.tasks: list[SimulatedTask] = []
        self.on_step: Callable[[], None] | None = None
        """Called once, after `steps_left` more steps."""
        self.steps_left = 0
        self._waiting: list[_Step] = []

    @property
    def running(self) -> bool:
        return self.state is State.RUNNING

    @property
    def dead(self) -> bool:
        return self.state is State.DEAD

    def kill(self) -> None:
        self.state = State.DEAD
        self._waiting.clear()

    def stall(self) -> None:
        if self.running:
            self.state = State.STALLED
            self.stalls += 1

    def resume(self) -> None:
        """Continue, and run the callbacks that became due, in order."""
        if self.state is not State.STALLED:
            return
        self.state = State.RUNNING
        loop = asyncio.get_running_loop()
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            asyncio.SelectorEventLoop.call_soon(loop, step, context=step.context)  # type: ignore[arg-type]  # its own loop

    def after_steps(self, steps: int, call: Callable[[], None]) -> None:
        """Call `call` between two steps of this process, after `steps` steps."""
        self.steps_left, self.on_step = steps, call

    def hold_back(self, step: _Step) -> None:
        self._waiting.append(step)

    def count_step(self) -> None:
        if self.on_step is None:
            return
        self.steps_left -= 1
        if self.steps_left <= 0:
            call, self.on_step = self.on_step, None
            call()


PROCESS: Final[ContextVar[Process | None]] = ContextVar("PROCESS", default=None)
"""The process whose code runs; `None` outside all processes."""


class _Step:
    """A callback of a process."""

    __slots__ = ("_args", "_callback", "_process", "context", "handle")

    def __init__(self, process: Process, callback: Callable[..., object], args: Any, context: Context) -> None:
        self._process = process
        self._callback = callback
        self._args = args
        self.context = context
        self.handle: asyncio.Handle

    def __call__(self) -> None:
        process = self._process
        if process.state is not State.RUNNING:
            if process.state is State.STALLED:
                process.hold_back(self)
            return
        if self.handle.cancelled():  # while the process was stalled
            return
        self._callback(*self._args)
        process.count_step()


class SimulatedTask(asyncio.Task[Any]):
    """A task with a number as its hash, so that sets of tasks have the same order in every run."""

    number: int
    owner: Process | None
    context: Context

    def __hash__(self) -> int:
        return self.number


class SimulatedLoop(VirtualTimeLoop):
    """Virtual time for many processes."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self._tasks_made = 0
        self.loose: list[SimulatedTask] = []
        """Tasks outside all processes."""
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]  # typeshed wants any loop

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> SimulatedTask:
        context = context or copy_context()
        owner = context.get(PROCESS)
        task = SimulatedTask.__new__(SimulatedTask)
        self._tasks_made += 1
        task.number = self._tasks_made
        task.owner = owner
        task.context = context
        task.__init__(work, loop=self, context=context)  # type: ignore[misc]  # the number comes first: it is the hash
        (self.loose if owner is None else owner.tasks).append(task)
        return task

    def call_soon(  # type: ignore[override]  # typeshed uses a TypeVarTuple
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        self.steps += 1
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        step = _Step(process, callback, args, context or copy_context())
        step.handle = super().call_soon(step, context=step.context)
        return step.handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        step = _Step(process, callback, args, context or copy_context())
        handle = super().call_at(when, step, context=step.context)
        step.handle = handle
        return handle

    def _run_once(self) -> None:
        if self.steps > MOST_STEPS:
            self.steps = 0
            raise RuntimeError(f"more than {MOST_STEPS} steps: the run does not end")
        super()._run_once()  # type: ignore[misc]  # asyncio's own, one turn of the loop


def spawn(process: Process, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start `work` as a task of `process`, from any context."""
    context = copy_context()
    context.run(PROCESS.set, process)
    return asyncio.get_running_loop().create_task(work, context=context)


def bury(loop: asyncio.AbstractEventLoop, processes: list[Process]) -> None:
    """Close the coroutines of dead processes after the run, so that nothing runs when they are collected."""
    with warnings.catch_warnings(), _running(loop):
        warnings.simplefilter("ignore")
        for process in processes:
            process.kill()
            for task in process.tasks:  # grows while coroutines are closed
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]  # it is meant to be pending
                    task.context.run(_close, task.get_coro())


@contextmanager
def _running(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Set the running loop, since closing a coroutine may start tasks, which are closed as well."""
    asyncio.events._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio.events._set_running_loop(None)


def _close(work: Any) -> None:
    for _ in range(10):
        try:
            work.close()
            return
        except (Exception, asyncio.CancelledError):  # noqa: BLE001  # last words of the dead
            pass
