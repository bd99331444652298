"""Functions that occupy the event loop leave enough time for store calls."""

from __future__ import annotations

import asyncio

import pytest

from integr8s_idem._util import loop_fairness
from integr8s_idem._util.loop_fairness import LONGEST_TURN, pace_of, turn_of_the_loop
from integr8s_idem.testing.fast_forward import fast_forward

TURNS = 20
"""Iterations of the event loop per store call in these tests; a transaction takes about ten."""


async def block(name: str, log: list[str]) -> None:
    await turn_of_the_loop()
    log.append(name)
    fast_forward().leap(2 * LONGEST_TURN)


async def call_store(name: str, log: list[str], turns: int = TURNS) -> None:
    with pace_of(asyncio.get_running_loop()).call_of_a_store():
        for _ in range(turns):
            await asyncio.sleep(0)
    log.append(name)


async def test_functions_wait_for_a_store_call_in_progress() -> None:
    fast_forward()
    log: list[str] = []

    await asyncio.gather(call_store("call", log), block("first", log), block("second", log))

    assert log == ["first", "call", "second"]


async def test_functions_wait_for_an_endless_call_only_for_a_limited_time() -> None:
    fast_forward()
    log: list[str] = []
    call = asyncio.create_task(call_store("call", log, turns=10**9))

    await asyncio.gather(block("first", log), block("second", log))

    assert log == ["first", "second"]
    call.cancel()


async def test_functions_do_not_wait_for_calls_that_began_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_fairness, "LONGEST_REST", 3600.0)
    fast_forward()
    log: list[str] = []

    async def call_repeatedly() -> None:
        while "second" not in log:
            await call_store("call", log)

    callers = [asyncio.create_task(call_repeatedly())]
    for _ in range(TURNS // 2):  # so that one of the two calls is always in progress
        await asyncio.sleep(0)
    callers.append(asyncio.create_task(call_repeatedly()))
    await asyncio.gather(block("first", log), block("second", log))

    assert log.index("second") > log.index("first")
    await asyncio.gather(*callers)


async def test_functions_do_not_wait_for_a_failed_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_fairness, "LONGEST_REST", 3600.0)
    fast_forward()
    log: list[str] = []
    with pytest.raises(RuntimeError), pace_of(asyncio.get_running_loop()).call_of_a_store():
        raise RuntimeError("no answer")

    await asyncio.gather(block("first", log), block("second", log))

    assert log == ["first", "second"]


class Turns:
    """Counts the iterations of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._next()

    def _next(self) -> None:
        self.count += 1
        asyncio.get_running_loop().call_soon(self._next)


async def test_short_functions_that_wait_start_in_one_iteration() -> None:
    fast_forward()
    log: list[int] = []
    started_in: list[int] = []

    async def short(number: int) -> None:
        await turn_of_the_loop()
        log.append(number)
        started_in.append(turns.count)

    turns = Turns()
    await asyncio.gather(block("first", []), *map(short, range(100)))

    assert log == list(range(100))
    assert len(set(started_in)) == 1


async def test_functions_that_wait_again_are_served_before_later_ones() -> None:
    fast_forward()
    log: list[str] = []

    async def later() -> None:
        await asyncio.sleep(0)
        await asyncio.gather(*(block(f"later {number}", log) for number in range(5)))

    await asyncio.gather(*(block(f"early {number}", log) for number in range(5)), later())

    assert log == [f"{when} {number}" for when in ("early", "later") for number in range(5)]


async def test_a_runner_that_waits_beside_others_handles_many_items_in_a_turn() -> None:
    fast_forward()
    pace, left, turns = pace_of(asyncio.get_running_loop()), list(range(1_000)), Turns()

    async def runner() -> None:
        while left:
            if pace.is_turn_over():
                await pace.wait()
            if left:
                left.pop()

    await asyncio.gather(block("first", []), *(runner() for _ in range(4)))

    assert turns.count < 50


async def test_functions_that_arrive_all_the_time_do_not_overtake_one_that_waits() -> None:
    clock, log = fast_forward(), list[str]()

    async def blocks(name: str) -> None:
        await turn_of_the_loop()
        log.append(name)
        clock.leap(1.1 * LONGEST_TURN)

    async def arrive() -> None:
        for number in range(200):
            tasks.append(asyncio.create_task(blocks(f"later {number}")))
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(blocks("first")), asyncio.create_task(blocks("second"))]
    await arrive()
    await asyncio.gather(*tasks)

    assert log[:2] == ["first", "second"]


async def test_functions_start_although_those_resumed_before_them_are_cancelled() -> None:
    fast_forward()
    log: list[str] = []
    waiting = [asyncio.create_task(block(name, log)) for name in ("first", "second", "third")]
    pace = pace_of(asyncio.get_running_loop())
    while not pace._are_resuming:  # noqa: ASYNC110  # nothing tells
        await asyncio.sleep(0)
    for each in waiting[1:]:
        each.cancel()
    async with asyncio.timeout(60):
        await block("fourth", log)  # in this task, so that it waits before the others notice that they are cancelled

    assert log == ["first", "fourth"]


async def test_functions_start_although_one_resumed_before_them_never_runs_again() -> None:
    """As in a simulated process that has crashed."""
    fast_forward()
    pace, log = pace_of(asyncio.get_running_loop()), list[str]()
    await block("first", log)
    crashed = pace.wait()
    crashed.send(None)

    async with asyncio.timeout(60):
        await block("second", log)
        for _ in range(TURNS):  # until the turn is over
            await asyncio.sleep(0)
        await block("third", log)

    assert log == ["first", "second", "third"]
    crashed.close()
