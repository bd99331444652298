"""A manager works in one event loop at a time, and survives each of them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import pytest

from integr8s_idem import IdempotencyManager, idempotent
from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.errors import ApplicationError
from integr8s_idem.records import Reserved
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.flaky_store import FlakyStore
from tests.support.conditions import eventually
from tests.support.guarded import plain_manager

# Python reports the pending tasks of a closed loop when it deletes them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

T = TypeVar("T")

SOON: Final = 30.0
"""Seconds for what takes a moment; a test that needs as many has failed."""

Use = Callable[[IdempotencyManager, Reserved], Awaitable[object]]


async def one() -> int:
    return 1


def stuck(*operations: str) -> FlakyStore:
    """Return a store in memory whose calls of some operations do not return."""
    store = FlakyStore(MemoryIdempotencyRepository())
    store.held = {operation: asyncio.Event() for operation in operations}
    return store


def manager_of(store: FlakyStore, lease: float = 30.0) -> IdempotencyManager:
    return IdempotencyManager(IdempotencyConfig(processing_timeout_seconds=lease), store, scope="shop")


def in_other_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, T]:
    """Run `work` in the event loop of another thread."""
    return asyncio.to_thread(lambda: asyncio.run(work()))


@contextmanager
def loop_left_in(
    work: Callable[[], Coroutine[Any, Any, object]], store: FlakyStore, operation: str, *, closed: bool
) -> Iterator[None]:
    """Stop a loop while a call of `work` is pending in `store`, without cancelling anything."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(work())
    loop.run_until_complete(eventually(lambda: store.calls[operation]))
    if closed:
        loop.close()
    held, store.held = store.held, {}
    yield
    if not closed:
        task.cancel()
        for event in held.values():
            event.set()
        loop.run_until_complete(asyncio.wait(asyncio.all_tasks(loop)))
        loop.close()


USES: dict[str, Use] = {
    "run": lambda manager, _: manager.run("other", one),
    "run in another scope": lambda manager, _: manager.in_scope("depot").run("other", one),
    "reserve": lambda manager, _: manager.reserve("other"),
    "acquire_batch": lambda manager, _: manager.acquire_batch(["other"]),
    "complete": lambda manager, held: manager.complete(held),
    "confirm_batch": lambda manager, held: manager.confirm_batch([held]),
    "fail": lambda manager, held: manager.fail(held, "no"),
    "release": lambda manager, held: manager.release(held),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_manager_is_refused_in_a_second_event_loop_while_the_first_one_runs(use: Use) -> None:
    manager = plain_manager()
    held = await manager.reserve("mine")
    assert isinstance(held, Reserved)

    async def elsewhere() -> None:
        await use(manager, held)

    with pytest.raises(ApplicationError, match="make a manager and a store for each event loop"):
        await in_other_loop(elsewhere)

    assert await manager.get("other") is await manager.in_scope("depot").get("other") is None
    assert await manager.complete(held), "it is still reserved"


async def test_a_function_does_not_run_in_a_second_event_loop_beside_the_first_one() -> None:
    store, runs = stuck("complete"), list[str]()
    manager = manager_of(store)
    first = asyncio.create_task(manager.run("first", one))
    await eventually(lambda: store.calls["complete"])

    async def function() -> None:
        runs.append("second")

    with pytest.raises(ApplicationError):
        await in_other_loop(lambda: manager.run("second", function))
    store.held["complete"].set()

    assert await first == 1
    assert runs == []


def test_a_manager_may_be_used_in_one_event_loop_after_the_other() -> None:
    manager = plain_manager()

    assert [asyncio.run(manager.run(str(number), one)) for number in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "stopped"])
@pytest.mark.parametrize("operation", ["reserve", "complete", "release", "renew"])
def test_a_manager_whose_loop_ended_within_a_call_works_in_the_next_one(operation: str, closed: bool) -> None:
    store = stuck(operation)
    manager = manager_of(store, lease=1)

    async def function() -> None:
        if operation == "renew":
            await asyncio.sleep(SOON)
        if operation == "release":
            raise OSError

    async def twice() -> None:  # the calls of the second are queued
        await asyncio.gather(*(manager.run(key, function) for key in ("a", "b")))

    async def later() -> list[int]:
        async with asyncio.timeout(SOON):
            values = await asyncio.gather(*(manager.run(key, one) for key in ("c", "d")))
            await manager.close()
        return values

    with loop_left_in(twice, store, operation, closed=closed):
        assert asyncio.run(later()) == [1, 1]


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "stopped"])
def test_the_key_of_a_run_whose_loop_ended_is_taken_over_after_its_lease(closed: bool) -> None:
    store = stuck("renew")
    manager = manager_of(store, lease=1)

    async def endless() -> None:
        await asyncio.sleep(SOON)

    async def later() -> int:
        async with asyncio.timeout(SOON):
            return await manager.run("a", one)

    async def renewing() -> int:
        async with asyncio.timeout(SOON):
            waiting = asyncio.create_task(later())
            await manager.run("b", lambda: asyncio.sleep(2))  # its lease is renewed by then, and only its own
            return await waiting

    with loop_left_in(lambda: manager.run("a", endless), store, "renew", closed=closed):
        assert asyncio.run(renewing()) == 1


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "stopped"])
def test_closing_in_another_loop_does_not_wait_for_a_loop_that_has_ended(closed: bool) -> None:
    store = stuck("complete")
    manager = manager_of(store)

    async def close() -> None:
        await asyncio.wait_for(manager.close(), SOON)

    with loop_left_in(lambda: manager.run("a", one), store, "complete", closed=closed):
        asyncio.run(close())


async def test_closing_in_another_loop_waits_for_writes_in_a_loop_that_runs() -> None:
    store = stuck("complete")
    manager = manager_of(store)
    running = asyncio.create_task(manager.run("a", one))
    await eventually(lambda: store.calls["complete"])

    closing = asyncio.create_task(in_other_loop(manager.close))
    await asyncio.sleep(0.1)
    still_waits = not closing.done()
    store.held["complete"].set()

    await asyncio.wait_for(closing, SOON)
    assert still_waits
    assert await running == 1


def test_a_loop_that_runs_again_ends_its_run_beside_those_of_the_next_loop() -> None:
    store = stuck("complete")
    manager, loop = manager_of(store), asyncio.new_event_loop()
    first = loop.create_task(manager.run("a", one))
    loop.run_until_complete(eventually(lambda: store.calls["complete"] == 1))
    first_may_go = store.held.pop("complete")

    async def between() -> list[int]:
        await manager.run("b", one)
        store.held["complete"] = asyncio.Event()
        second = asyncio.create_task(manager.run("c", one))
        await eventually(lambda: store.calls["complete"] == 3)
        loop.call_soon_threadsafe(first_may_go.set)
        await asyncio.to_thread(loop.run_until_complete, first)
        third = asyncio.create_task(manager.run("d", one))
        await asyncio.sleep(0.05)
        assert store.calls["complete"] == 3, "one call at a time, as before"
        store.held.pop("complete").set()
        return [await second, await third]

    assert asyncio.run(asyncio.wait_for(between(), SOON)) == [1, 1]
    assert first.result() == 1
    loop.close()


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "returns"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_function_that_forks_and_ends_in_the_child_gets_an_application_error_there(fails: bool) -> None:
    manager, parent = plain_manager(), os.getpid()

    async def forks() -> str:
        child = os.fork()
        if child:
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            return str(os.waitstatus_to_exitcode(status))
        if fails:
            raise OSError
        return "child"

    try:
        in_parent = await manager.run("a", forks)
    except BaseException as error:
        if os.getpid() != parent:
            os._exit(7 if isinstance(error, ApplicationError) else 8)
        raise
    if os.getpid() != parent:
        os._exit(9)

    assert in_parent == "7"


async def test_a_loop_takes_over_a_manager_that_plain_functions_have_used() -> None:
    manager = plain_manager()
    plain = idempotent(key="plain:{number}", manager=manager)(lambda number: number)

    assert await asyncio.to_thread(plain, 1) == 1
    assert await manager.in_scope("depot").run("other", one) == 1
    assert await manager.run("other", one) == 1
    assert await asyncio.to_thread(plain, 2) == 2


async def test_a_loop_does_not_take_a_manager_over_while_a_plain_function_is_running() -> None:
    manager, started, may_end = plain_manager(), threading.Event(), threading.Event()

    @idempotent(key="plain:{number}", manager=manager)
    def plain(number: int) -> str:
        started.set()
        assert may_end.wait(SOON)
        return "done"

    running = asyncio.create_task(asyncio.to_thread(plain, 1))
    assert await asyncio.to_thread(started.wait, SOON)
    with pytest.raises(ApplicationError, match="wait for them"):
        await manager.in_scope("depot").run("other", one)
    may_end.set()

    assert await running == "done"
    assert await manager.run("other", one) == 1
