"""The event loop with simulated time."""

from __future__ import annotations

import asyncio
import time

import pytest

from integr8s_idem._util.wall_clock import set_wall_clock, wall_time_ns
from integr8s_idem.testing.virtual_time import EPOCH, DeadlockError, run_virtual, virtual_now, virtual_time


@virtual_time
async def test_a_sleep_of_a_year_takes_no_real_time() -> None:
    loop, began = asyncio.get_running_loop(), time.monotonic()

    await asyncio.sleep(365 * 86_400)

    assert loop.time() == 365 * 86_400
    assert time.monotonic() - began < 5


@virtual_time
async def test_time_does_not_move_while_a_task_can_run() -> None:
    loop = asyncio.get_running_loop()
    alarm = loop.call_later(1, lambda: None)

    for _ in range(1_000):
        await asyncio.sleep(0)

    assert loop.time() == 0
    assert not alarm.cancelled()


@virtual_time
async def test_timers_fire_in_order_and_on_time() -> None:
    loop = asyncio.get_running_loop()
    fired: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        fired.append((name, loop.time()))

    await asyncio.gather(sleeper("late", 7_200), sleeper("early", 0.25), sleeper("middle", 30))

    assert fired == [("early", 0.25), ("middle", 30), ("late", 7_200)]


@virtual_time
async def test_timeouts_and_cancelled_timers_work() -> None:
    loop = asyncio.get_running_loop()

    async with asyncio.timeout(3_600):
        await asyncio.sleep(10)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3_600):
            await asyncio.sleep(5_000)

    assert loop.time() == 3_610


def test_an_endless_wait_raises_a_deadlock_error() -> None:
    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlockError):
        run_virtual(forever())


def test_run_virtual_returns_values_and_raises_errors() -> None:
    async def good() -> int:
        return 42

    async def bad() -> int:
        raise KeyError("no")

    assert run_virtual(good()) == 42
    with pytest.raises(KeyError, match="no"):
        run_virtual(bad())


def test_tasks_that_still_run_at_the_end_are_cancelled() -> None:
    ends: list[str] = []

    async def left_behind() -> None:
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def main() -> None:
        task = asyncio.get_running_loop().create_task(left_behind())
        await asyncio.sleep(1)
        assert not task.done()

    run_virtual(main())

    assert ends == ["cancelled"]


@virtual_time
async def test_the_wall_clock_of_stores_follows_the_loop() -> None:
    before = virtual_now()

    await asyncio.sleep(90)

    assert before == EPOCH
    assert (virtual_now() - before).total_seconds() == 90


def test_code_without_a_loop_reads_the_real_wall_clock() -> None:
    loop = asyncio.new_event_loop()
    try:
        set_wall_clock(loop, lambda: 0)
        assert wall_time_ns() > 0
    finally:
        loop.close()


@pytest.mark.parametrize("number", [1, 2])
@virtual_time
async def test_parameters_and_fixtures_reach_a_decorated_test(number: int, tmp_path_factory: object) -> None:
    assert number in (1, 2)
    assert tmp_path_factory is not None
