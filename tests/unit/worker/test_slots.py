"""Slots: the limit holds, waiters are served in order, and cancellations lose no slot."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from integr8s_idem.testing.virtual_time import run_virtual, virtual_time
from integr8s_idem.worker.slots import Slots


def take(slots: Slots) -> bool:
    """Take a free slot, as the pipeline does."""
    if not slots.free:
        return False
    slots.take()
    return True


async def acquire(slots: Slots) -> None:
    assert await slots.acquire(unless=asyncio.get_running_loop().create_future())


@asynccontextmanager
async def held(slots: Slots) -> AsyncIterator[None]:
    await acquire(slots)
    try:
        yield
    finally:
        slots.release()


@virtual_time
async def test_a_free_slot_is_acquired_without_waiting() -> None:
    slots = Slots(2)

    assert [take(slots), take(slots), take(slots)] == [True, True, False]
    slots.release()
    assert take(slots)


@virtual_time
async def test_waiters_are_served_in_order_and_cannot_be_overtaken() -> None:
    slots, order = Slots(1), list[int]()

    async def work(number: int) -> None:
        async with held(slots):
            order.append(number)
            await asyncio.sleep(1)

    tasks = [asyncio.create_task(work(number)) for number in range(4)]
    await asyncio.sleep(0.5)
    while not all(task.done() for task in tasks[:-1]):
        assert not take(slots), "the slot belongs to a waiter"
        await asyncio.sleep(0.5)
    await asyncio.wait(tasks)

    assert order == [0, 1, 2, 3]


@virtual_time
async def test_a_free_slot_is_reported_only_if_nobody_waits() -> None:
    slots, times = Slots(1), list[float]()
    slots.on_free(lambda: times.append(asyncio.get_running_loop().time()))

    async def work() -> None:
        async with held(slots):
            await asyncio.sleep(1)

    await asyncio.gather(work(), work())

    assert times == [2.0]


@virtual_time
async def test_the_callback_of_a_free_slot_may_acquire_it() -> None:
    slots, acquired = Slots(1), list[bool]()
    slots.on_free(lambda: acquired.append(take(slots)))
    take(slots)

    slots.release()

    assert acquired == [True]
    assert not take(slots)


@virtual_time
async def test_a_waiter_cancelled_when_it_gets_a_slot_passes_it_on() -> None:
    slots = Slots(1)
    take(slots)
    first, second = (asyncio.create_task(acquire(slots)) for _ in range(2))
    await asyncio.sleep(0)

    slots.release()
    first.cancel()
    await asyncio.wait({first})
    await asyncio.sleep(0)

    assert first.cancelled()
    assert second.done()


@pytest.mark.parametrize("is_passed_on", [False, True])
@virtual_time
async def test_a_waiter_that_gives_up_keeps_no_slot(is_passed_on: bool) -> None:
    slots, closing = Slots(1), asyncio.get_running_loop().create_future()
    take(slots)
    waiter = asyncio.create_task(slots.acquire(unless=closing))
    await asyncio.sleep(0)

    closing.set_result(None)
    if is_passed_on:
        slots.release()
    assert not await waiter
    if not is_passed_on:
        slots.release()

    assert slots.free == 1
    assert not await slots.acquire(unless=closing)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), number=st.integers(1, 5))
def test_random_cancellations_neither_lose_slots_nor_exceed_the_limit(seed: int, number: int) -> None:
    chance = random.Random(seed)

    async def main() -> None:
        slots, in_use = Slots(number), 0

        async def work() -> None:
            nonlocal in_use
            await asyncio.sleep(chance.choice([0, 0, 1]))
            if chance.random() < 0.3:
                if not take(slots):
                    return
                in_use += 1
                await holding()
                slots.release()
            else:
                closing = asyncio.get_running_loop().create_future()
                asyncio.get_running_loop().call_later(chance.choice([0, 1, 9]), closing.set_result, None)
                if not await slots.acquire(unless=closing):
                    return
                try:
                    in_use += 1
                    await holding()
                finally:
                    slots.release()

        async def holding() -> None:
            nonlocal in_use
            assert in_use <= number
            with suppress(asyncio.CancelledError):  # releases the slot nevertheless
                await asyncio.sleep(chance.choice([0, 0, 1]))
            in_use -= 1

        tasks = [asyncio.create_task(work()) for _ in range(20)]
        for task in chance.sample(tasks, 8):
            await asyncio.sleep(chance.choice([0, 0, 0.5]))
            task.cancel()
        await asyncio.wait(tasks)
        assert not [task.exception() for task in tasks if not task.cancelled() and task.exception()]
        assert [take(slots) for _ in range(number + 1)] == [True] * number + [False]

    run_virtual(main())
