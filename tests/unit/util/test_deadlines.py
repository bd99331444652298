"""Deadlines behave like `asyncio.timeout`, with one timer per event loop."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import time
import weakref
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from integr8s_idem._util.deadlines import Deadline
from integr8s_idem._util.first_step import as_coroutine, rest
from integr8s_idem._util.loop_fairness import turn_of_the_loop
from integr8s_idem.testing.virtual_time import run_virtual, virtual_time

T = TypeVar("T")


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual_time
async def test_a_block_that_exceeds_its_deadline_is_cancelled_with_a_timeout_error() -> None:
    with pytest.raises(TimeoutError) as raised, Deadline(now() + 2) as deadline:
        await asyncio.sleep(10)

    assert now() == 2
    assert deadline.expired
    assert isinstance(raised.value.__cause__, asyncio.CancelledError)
    await asyncio.sleep(1)


@virtual_time
async def test_a_block_that_ends_in_time_is_not_cancelled() -> None:
    with Deadline(now() + 2) as deadline:
        await asyncio.sleep(1)

    await asyncio.sleep(10)
    assert not deadline.expired


@virtual_time
async def test_a_deadline_in_the_past_cancels_at_the_first_await() -> None:
    with pytest.raises(TimeoutError), Deadline(now() - 1):
        await asyncio.sleep(10)

    assert now() == 0


@virtual_time
async def test_a_block_without_a_deadline_can_get_one_later() -> None:
    async def set_late(deadline: Deadline) -> None:
        await asyncio.sleep(100)
        deadline.reschedule(now() + 1)
        await asyncio.sleep(100)

    with pytest.raises(TimeoutError), Deadline(None) as deadline:
        await set_late(deadline)

    assert now() == 101


@pytest.mark.parametrize(("moved_to", "ends_at"), [(3.0, 3.0), (0.5, 0.5), (None, 10.0), (-1.0, 0.0)])
@virtual_time
async def test_a_rescheduled_deadline_expires_at_its_new_time(moved_to: float | None, ends_at: float) -> None:
    expired = False
    try:
        with Deadline(2.0) as deadline:
            deadline.reschedule(moved_to)
            await asyncio.sleep(10)
    except TimeoutError:
        expired = True

    assert now() == ends_at
    assert expired == (moved_to is not None)


@virtual_time
async def test_an_expired_deadline_cannot_be_rescheduled() -> None:
    async def stubborn(deadline: Deadline) -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            deadline.reschedule(now() + 100)
            raise

    with pytest.raises(TimeoutError), Deadline(1.0) as deadline:
        await stubborn(deadline)


@virtual_time
async def test_rescheduling_after_the_block_cancels_nothing() -> None:
    with Deadline(1.0) as deadline:
        pass
    deadline.reschedule(2.0)

    await asyncio.sleep(10)


@virtual_time
async def test_other_errors_and_cancellations_propagate_unchanged() -> None:
    with pytest.raises(ValueError, match="mine"), Deadline(1.0):
        raise ValueError("mine")

    async def work() -> None:
        with Deadline(5.0):
            await asyncio.sleep(10)

    task = asyncio.create_task(work())
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


@virtual_time
async def test_another_cancellation_at_the_same_time_takes_precedence() -> None:
    async def work() -> None:
        with Deadline(5.0):
            await asyncio.sleep(10)

    task = asyncio.create_task(work())
    asyncio.get_running_loop().call_at(5.0, task.cancel)
    await asyncio.wait({task})

    assert task.cancelled()


@virtual_time
async def test_of_two_nested_deadlines_the_expired_one_raises() -> None:
    with Deadline(5.0) as outer:
        with pytest.raises(TimeoutError), Deadline(1.0):
            await asyncio.sleep(10)
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        await asyncio.sleep(1)
    assert not outer.expired

    inner = Deadline(50.0)
    with pytest.raises(TimeoutError), Deadline(now() + 1), inner:
        await asyncio.sleep(10)
    assert not inner.expired


@virtual_time
async def test_an_error_raised_on_cancellation_propagates() -> None:
    async def fails_late() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            raise KeyError from None

    with pytest.raises(KeyError), Deadline(1.0):
        await fails_late()

    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


@virtual_time
async def test_a_thousand_deadlines_share_a_timer() -> None:
    loop, timers, original = asyncio.get_running_loop(), list[float](), asyncio.get_running_loop().call_at

    def call_at(when: float, *args: object, **options: object) -> asyncio.TimerHandle:
        timers.append(when)
        return original(when, *args, **options)  # type: ignore[arg-type]

    loop.call_at = call_at  # type: ignore[method-assign]
    for _ in range(1_000):
        with Deadline(loop.time() + 30):
            pass

    assert timers == [30.0]


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, pytest.importorskip("uvloop").new_event_loop])
def test_deadlines_and_pace_do_not_keep_an_event_loop_alive(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def late() -> None:
        await turn_of_the_loop()
        with pytest.raises(TimeoutError), Deadline(now() + 0.001):
            await asyncio.sleep(60)

    loops = []
    for _ in range(3):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(late())
            loops.append(weakref.ref(runner.get_loop()))
    del runner
    gc.collect()

    assert [loop() for loop in loops] == [None] * 3


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, pytest.importorskip("uvloop").new_event_loop])
def test_the_timer_of_a_deadline_that_was_met_does_not_keep_its_event_loop_alive(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def in_time() -> None:
        with Deadline(now() + 60):
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(in_time())
        loop = weakref.ref(runner.get_loop())
    del runner
    gc.collect()

    assert loop() is None


async def test_the_timer_of_a_deadline_that_was_met_does_not_keep_context_variables_alive() -> None:
    class Event: ...

    async def in_time() -> weakref.ref[Event]:
        ContextVar[Event]("event").set(event := Event())
        with Deadline(now() + 60):
            await asyncio.sleep(0)
        return weakref.ref(event)

    event = await asyncio.create_task(in_time())
    await asyncio.sleep(0)  # the callback that resumed this task references the other one
    gc.collect()

    assert event() is None


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32))
def test_any_history_ends_as_with_asyncio_timeout_at(seed: int) -> None:
    """Run the same history with both: the same outcomes at the same times."""

    async def history(timeout: Callable[[float], object]) -> list[object]:
        chance = random.Random(seed)

        async def work(set_to: float, moved_after: float, moved_to: float, lasts: float) -> object:
            try:
                limit: object = timeout(set_to)
                if isinstance(limit, Deadline):
                    with limit:
                        await steps(limit, moved_after, moved_to, lasts)
                else:
                    assert isinstance(limit, asyncio.Timeout)
                    async with limit:
                        await steps(limit, moved_after, moved_to, lasts)
            except TimeoutError:
                return "late", round(now(), 6)
            except asyncio.CancelledError:
                return "cancelled", round(now(), 6)
            return "done", round(now(), 6)

        async def steps(limit: Deadline | asyncio.Timeout, after: float, to: float, lasts: float) -> None:
            await asyncio.sleep(after)
            limit.reschedule(now() + to)
            await asyncio.sleep(lasts)

        # Distinct times, since the order of simultaneous events is not defined.
        tasks = [asyncio.create_task(work(*(chance.uniform(0.1, 9) for _ in range(4)))) for _ in range(30)]
        for task in chance.sample(tasks, 10):
            asyncio.get_running_loop().call_at(chance.uniform(0.1, 20), task.cancel)
        return list(await asyncio.gather(*tasks))

    assert run_virtual(history(Deadline)) == run_virtual(history(asyncio.timeout_at))


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_an_answer_in_the_socket_is_read_before_a_late_deadline_cancels(
    factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """A blocked event loop must not make a store that answered in time look unavailable."""

    async def main() -> bytes:
        here, there = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=here)
        reading = asyncio.create_task(read(reader))
        await asyncio.sleep(0)  # it waits for the answer
        there.sendall(b"answer\n")
        time.sleep(0.3)  # noqa: ASYNC251  # block the event loop longer than the deadline
        try:
            return await reading
        finally:
            writer.close()
            there.close()

    async def read(reader: asyncio.StreamReader) -> bytes:
        with Deadline(now() + 0.1):
            return await reader.readline()

    with asyncio.Runner(loop_factory=factory) as runner:
        assert runner.run(main()) == b"answer\n"


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_late_deadline_cancels_a_block_without_an_answer(
    factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        with Deadline(now() + 0.05):
            asyncio.get_running_loop().call_soon(time.sleep, 0.2)
            await asyncio.sleep(60)

    with asyncio.Runner(loop_factory=factory) as runner, pytest.raises(TimeoutError):
        runner.run(main())


# Coroutines that may never wait.


class Watched(Deadline):
    """A deadline that notes how often it was entered."""

    entries = 0

    def __enter__(self) -> Watched:
        Watched.entries += 1
        super().__enter__()
        return self


async def limited(work: Coroutine[Any, Any, T], deadline: Deadline) -> T:
    """Limit a coroutine that waits from its first step on, as a run does."""
    waiting_for = work.send(None)
    with deadline:
        return await rest(work, waiting_for)


@virtual_time
async def test_a_coroutine_that_waits_is_limited_and_keeps_its_task() -> None:
    Watched.entries, tasks = 0, list[asyncio.Task[object] | None]()

    async def waits(seconds: float) -> str:
        tasks.append(asyncio.current_task())
        async with asyncio.timeout(60):  # needs the task in which it was entered
            await asyncio.sleep(seconds)
        tasks.append(asyncio.current_task())
        return "done"

    assert await limited(waits(1), Watched(now() + 2)) == "done"
    with pytest.raises(TimeoutError):
        await limited(waits(10), Watched(now() + 2))

    assert (now(), Watched.entries) == (3, 2)
    assert set(tasks) == {asyncio.current_task()}


@virtual_time
async def test_errors_and_cancellations_reach_a_coroutine_that_waits() -> None:
    seen = list[BaseException]()

    async def waits(until: asyncio.Future[str]) -> str:
        try:
            return await until
        except BaseException as error:
            seen.append(error)
            raise

    until: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(limited(waits(until), Deadline(None)))
    await asyncio.sleep(0)
    until.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await task

    task = asyncio.ensure_future(limited(waits(asyncio.get_running_loop().create_future()), Deadline(None)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [type(error) for error in seen] == [ValueError, asyncio.CancelledError]


@virtual_time
async def test_any_awaitable_can_be_limited() -> None:
    class Later:
        def __await__(self) -> Generator[object, None, str]:
            yield from asyncio.sleep(1).__await__()
            return "later"

    future: asyncio.Future[str]

    assert await limited(as_coroutine(Later()), Deadline(None)) == "later"
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, "future")
    assert await limited(as_coroutine(future), Deadline(None)) == "future"
