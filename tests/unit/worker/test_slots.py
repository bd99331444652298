"""Slots: as many at once as there are, in the order of asking, none lost to a cancellation."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from integr8s_idem.testing.virtual_time import run_virtual, virtual_time
from integr8s_idem.worker.slots import Slots


@virtual_time
async def test_a_slot_is_taken_at_once_while_there_is_one() -> None:
    slots = Slots(2)

    assert [slots.take(), slots.take(), slots.take()] == [True, True, False]
    slots.give()
    assert slots.take()


@virtual_time
async def test_those_who_wait_are_woken_in_their_order_and_nobody_comes_in_between() -> None:
    slots, order = Slots(1), list[int]()

    async def work(number: int) -> None:
        async with slots:
            order.append(number)
            await asyncio.sleep(1)

    tasks = [asyncio.create_task(work(number)) for number in range(4)]
    await asyncio.sleep(0.5)
    while not all(task.done() for task in tasks[:-1]):
        assert not slots.take(), "somebody waits for it"
        await asyncio.sleep(0.5)
    await asyncio.wait(tasks)

    assert order == [0, 1, 2, 3]


@virtual_time
async def test_a_free_slot_is_told_only_where_nobody_waits_for_it() -> None:
    slots, told = Slots(1), list[float]()
    slots.when_free = lambda: told.append(asyncio.get_running_loop().time())

    async def work() -> None:
        async with slots:
            await asyncio.sleep(1)

    await asyncio.gather(work(), work())

    assert told == [2.0]


@virtual_time
async def test_who_hears_of_a_free_slot_may_take_it_at_once() -> None:
    slots, taken = Slots(1), list[bool]()
    slots.when_free = lambda: taken.append(slots.take())
    slots.take()

    slots.give()

    assert taken == [True]
    assert not slots.take()


@virtual_time
async def test_one_who_is_cancelled_in_the_moment_of_its_turn_hands_it_on() -> None:
    slots = Slots(1)
    slots.take()
    first, second = (asyncio.create_task(slots.__aenter__()) for _ in range(2))
    await asyncio.sleep(0)

    slots.give()
    first.cancel()
    await asyncio.wait({first})
    await asyncio.sleep(0)

    assert first.cancelled()
    assert second.done()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), number=st.integers(1, 5))
def test_whoever_is_cancelled_when_all_are_free_in_the_end_and_never_too_many_are_in_use(
    seed: int, number: int
) -> None:
    chance = random.Random(seed)

    async def main() -> None:
        slots, in_use = Slots(number), 0

        async def work() -> None:
            nonlocal in_use
            await asyncio.sleep(chance.choice([0, 0, 1]))
            if chance.random() < 0.3:
                if not slots.take():
                    return
                in_use += 1
                await holding()
                slots.give()
            else:
                async with slots:
                    in_use += 1
                    await holding()

        async def holding() -> None:
            nonlocal in_use
            assert in_use <= number
            with suppress(asyncio.CancelledError):  # it goes on to give it back
                await asyncio.sleep(chance.choice([0, 0, 1]))
            in_use -= 1

        tasks = [asyncio.create_task(work()) for _ in range(20)]
        for task in chance.sample(tasks, 8):
            await asyncio.sleep(chance.choice([0, 0, 0.5]))
            task.cancel()
        await asyncio.wait(tasks)
        assert not [task.exception() for task in tasks if not task.cancelled() and task.exception()]
        assert [slots.take() for _ in range(number + 1)] == [True] * number + [False]

    run_virtual(main())
