"""`@idempotent` on plain functions, which run in the calling thread."""

from __future__ import annotations

import asyncio
import dis
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeAlias, TypeVar

import pytest
from dishka import Provider, Scope, make_async_container

from integr8s_idem import IdempotencyManager
from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import ApplicationError, ResultNotStoredError
from integr8s_idem.functions.decorator import idempotent
from integr8s_idem.functions.sync_bridge import Job, own_loop, run_in_caller, wait_for
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.flaky_store import FlakyStore
from tests.support.conditions import eventually
from tests.support.guarded import plain_manager

BRIDGE = {each.__code__ for each in (wait_for, Job.run, Job._start)}
"""What the calling thread executes."""

FEW = 6
"""Instructions between the return of a function and the assignment of its result."""

T = TypeVar("T")

TraceFunction: TypeAlias = Callable[[FrameType, str, Any], Any]


@dataclass
class Receipt:
    number: int


def test_a_plain_function_runs_once_in_the_calling_thread() -> None:
    ran_in: list[str] = []

    @idempotent(key="{name}", manager=plain_manager())
    def work(name: str) -> Receipt:
        ran_in.append(threading.current_thread().name)
        return Receipt(len(name))

    assert work("abc") == work("abc") == Receipt(3)
    assert ran_in == [threading.current_thread().name]


def test_a_plain_function_can_get_its_attempt() -> None:
    manager = plain_manager()

    @idempotent(key="refund:{number}", manager=manager)
    def refund(number: int) -> str:
        return manager.attempt().key_for("charge")

    assert refund(1) == refund(1)


def test_results_of_plain_methods_are_replayed_even_if_falsy() -> None:
    class Billing:
        runs = 0

        @idempotent(key="{order_id}", manager=plain_manager())
        def charge(self, order_id: str) -> int | None:
            self.runs += 1
            return None

    billing = Billing()
    assert billing.charge("1") is billing.charge("1") is None
    assert billing.runs == 1


def test_one_of_many_threads_runs_a_plain_function_and_all_get_its_result() -> None:
    started, go, runs = threading.Event(), threading.Event(), []

    @idempotent(key="{name}", manager=plain_manager(), lock_timeout=timedelta(seconds=60))
    def work(name: str) -> int:
        runs.append(name)
        started.set()
        assert go.wait(60)
        return len(runs)

    with ThreadPoolExecutor(16) as threads:
        results = [threads.submit(work, "x") for _ in range(16)]
        assert started.wait(60)
        go.set()
        assert [result.result(60) for result in results] == [1] * 16


def test_the_error_of_a_plain_function_is_raised_to_its_caller() -> None:
    runs = []

    @idempotent(key="{name}", manager=plain_manager())
    def work(name: str) -> int:
        runs.append(name)
        if len(runs) == 1:
            raise OSError("no")
        return len(runs)

    with pytest.raises(OSError, match="no"):
        work("x")
    assert work("x") == 2


def test_an_interrupted_plain_function_releases_its_key() -> None:
    manager, runs = plain_manager(), []

    @idempotent(key="{name}", manager=manager, lock_timeout=timedelta(seconds=60))
    def work(name: str) -> int:
        runs.append(name)
        if len(runs) == 1:
            raise KeyboardInterrupt
        return len(runs)

    with pytest.raises(KeyboardInterrupt):
        work("x")
    assert work("x") == 2


def test_a_plain_function_that_exits_leaves_its_key_reserved() -> None:
    manager = plain_manager()

    @idempotent(key="{name}", manager=manager)
    def work(name: str) -> None:
        raise SystemExit(name)

    with pytest.raises(SystemExit, match="x"):
        work("x")

    @idempotent(key="{name}", manager=manager)
    def count(name: str) -> int:
        return asyncio.run_coroutine_threadsafe(manager.count_active(), own_loop()).result()

    assert count("other") == 2, "the key of the function that exited, and that of this one"


async def test_a_plain_function_that_returned_before_its_guard_was_cancelled_has_succeeded() -> None:
    jobs = SimpleQueue[Any]()
    running = asyncio.create_task(run_in_caller(lambda: "done", Attempt("key", 1, 0, float("inf")), jobs))
    await asyncio.sleep(0)
    jobs.get_nowait().run()

    running.cancel()

    assert await running == "done"


class TimeIsUpError(Exception):
    """Raised by a signal handler, as the soft time limits of task queues are."""


def interrupted_at(instruction: int, call: Callable[[], object], error: type[BaseException]) -> bool:
    """Call `call`, and raise `error` before an instruction of the bridge; `False` if it has fewer instructions."""
    left = instruction

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        nonlocal left
        if frame.f_code not in BRIDGE:
            return None
        frame.f_trace_opcodes = True
        # Nothing is raised at this one but by a trace function, and Python 3.15 leaves it out of `try` blocks.
        if event == "opcode" and dis.opname[frame.f_code.co_code[frame.f_lasti]] != "NOT_TAKEN":
            left -= 1
            if not left:
                sys.settrace(None)
                raise error
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except error:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeIsUpError])
def test_a_thread_that_is_interrupted_anywhere_leaves_no_run_behind(error: type[BaseException]) -> None:
    manager, instructions, returned = plain_manager(), 0, list[int]()

    @idempotent(key="{number}", manager=manager)
    def work(number: int) -> int:
        returned.append(number)
        return number

    def ask(call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, own_loop()).result(60)

    interrupted_at(sys.maxsize, partial(work, -1), error)  # Python 3.12 reports no instructions of the first call
    while interrupted_at(instructions + 1, partial(work, instructions), error):
        instructions += 1

    ask(manager.close())
    assert instructions > 50  # about 120 in Python 3.11, and 90 in 3.13
    assert manager.executor.runs.keys() == []
    records = [ask(manager.get(str(number))) for number in returned]
    lost = [record for record in records if record is None or record.status is not IdempotencyStatus.COMPLETED]
    assert len(returned) > 10
    assert len(lost) <= FEW


async def test_a_plain_function_keeps_its_key_until_it_has_ended_even_if_its_guard_is_cancelled() -> None:
    manager, started, go, runs = plain_manager(), asyncio.Event(), threading.Event(), list[str]()
    loop = asyncio.get_running_loop()
    await manager.run("other", _nothing)  # its loop is this one

    @idempotent(key="{name}", manager=manager)
    def work(name: str) -> str:
        runs.append(name)
        loop.call_soon_threadsafe(started.set)
        assert go.wait(60)
        return "done"

    calling = asyncio.create_task(asyncio.to_thread(work, "x"))
    before = asyncio.all_tasks()
    await started.wait()
    for guard in asyncio.all_tasks() - before:
        guard.cancel()  # as the end of a program does
    for _ in range(20):
        await asyncio.sleep(0)
    held = await manager.count_active()
    go.set()

    assert await calling == "done"
    assert held == 1
    assert await asyncio.to_thread(work, "x") == "done"
    assert runs == ["x"]


async def test_a_plain_function_does_not_start_after_its_guard_was_cancelled() -> None:
    runs, jobs = list[str](), SimpleQueue[Any]()
    running = asyncio.create_task(run_in_caller(lambda: runs.append("x"), Attempt("key", 1, 0, float("inf")), jobs))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    jobs.get_nowait().run()

    assert runs == []


def test_decorated_plain_functions_may_call_each_other_but_not_themselves() -> None:
    manager = plain_manager()

    @idempotent(key="inner:{name}", manager=manager)
    def inner(name: str) -> str:
        return name

    @idempotent(key="outer:{name}", manager=manager)
    def outer(name: str) -> str:
        return inner(name) + inner(name)

    @idempotent(key="{name}", manager=manager)
    def itself(name: str) -> None:
        itself(name)

    assert outer("x") == "xx"
    with pytest.raises(ApplicationError, match="within its own run"):
        itself("x")


async def test_a_plain_function_is_rejected_in_the_event_loop_thread_but_works_in_others() -> None:
    manager = plain_manager()

    @idempotent(key="{name}", manager=manager)
    def work(name: str) -> str:
        return threading.current_thread().name

    with pytest.raises(ApplicationError, match=r"await asyncio.to_thread\(work, …\)"):
        work("x")
    await manager.run("other", _nothing)
    first = await asyncio.to_thread(work, "x")
    assert first == await asyncio.to_thread(work, "x") != threading.current_thread().name


async def _nothing() -> None: ...


def error_after_the_end_of_the_loop(
    call: Callable[[], object],
    manager: IdempotencyManager,
    started: Callable[[], object],
    go: threading.Event,
    closed: bool,
) -> BaseException | None:
    """Return the error of `call`, made in a thread, if the loop of its manager ends once it has `started`."""
    loop, calling = asyncio.new_event_loop(), ThreadPoolExecutor(1)

    async def until_started() -> Future[object]:
        await manager.run("other", _nothing)  # its loop is this one
        called = calling.submit(call)
        await eventually(started)
        return called

    called = loop.run_until_complete(until_started())
    if closed:
        loop.close()
    go.set()
    with calling:
        error = called.exception(30)
    loop.close()
    return error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "stopped"])
@pytest.mark.parametrize("fails", [True, False], ids=["fails", "returns"])
def test_a_plain_function_whose_loop_ends_reports_that_its_result_is_not_stored(closed: bool, fails: bool) -> None:
    manager, started, go = plain_manager(), threading.Event(), threading.Event()

    @idempotent(key="{name}", manager=manager)
    def work(name: str) -> str:
        started.set()
        assert go.wait(60)
        if fails:
            raise OSError(name)
        return name

    error = error_after_the_end_of_the_loop(lambda: work("x"), manager, started.is_set, go, closed)

    assert type(error) is (OSError if fails else ResultNotStoredError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("closed", [True, False], ids=["closed", "stopped"])
def test_a_plain_function_whose_loop_ends_before_it_runs_is_not_called(closed: bool) -> None:
    store, runs = FlakyStore(MemoryIdempotencyRepository()), list[str]()
    manager = IdempotencyManager(repository=store, scope="billing")

    @idempotent(key="{name}", manager=manager)
    def work(name: str) -> None:
        runs.append(name)

    def call() -> None:
        store.held["reserve"] = asyncio.Event()
        work("x")

    def started() -> bool:
        return store.calls["reserve"] == 2

    error = error_after_the_end_of_the_loop(call, manager, started, threading.Event(), closed)

    assert isinstance(error, ApplicationError)
    assert "the event loop has ended" in str(error)
    assert runs == []


EXITING = """
import os
import queue

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository, idempotent

manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="shop")

@idempotent(key="{number}", manager=manager)
def work(number: int) -> int:
    return number

class Last:
    def __del__(self, work=work, write=os.write) -> None:
        try:
            work(2)
        except Exception as error:
            write(1, str(error).encode())

queue.last = Last()  # a global variable of this module may be deleted before the interpreter exits
"""


@pytest.mark.parametrize("before", ["work(1)", ""], ids=["used", "unused"])
def test_a_plain_function_called_while_the_interpreter_exits_raises_an_error(before: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EXITING + before], capture_output=True, text=True, timeout=60, check=True
    )

    # Python may have deleted the globals of some module by then, which is another error.
    assert ended.stdout, "it raised an error"


def test_a_plain_function_finds_its_manager_in_a_container() -> None:
    provider = Provider(scope=Scope.APP)
    provider.provide(lambda: plain_manager(), provides=IdempotencyManager)

    @idempotent(key="{name}", container=make_async_container(provider))
    def work(name: str) -> str:
        return name

    assert work("x") == work("x") == "x"


def test_stop_iteration_of_a_plain_function_is_a_runtime_error() -> None:
    manager = plain_manager()

    @idempotent(key="first:{name}", manager=manager)
    def first(name: str) -> str:
        return next(iter(list[str]()))

    with pytest.raises(RuntimeError) as raised:
        first("a")

    assert isinstance(raised.value.__cause__, StopIteration)
