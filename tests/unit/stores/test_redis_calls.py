"""One call of a Redis store: its limit of time, and what its errors become, without a step of the event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta

import pytest
from redis import exceptions as driver

from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from integr8s_idem.stores.redis.errors import guarded
from integr8s_idem.testing.virtual_time import virtual_time

SECONDS = timedelta(seconds=2)


def cancelled_before() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


@virtual_time
async def test_no_answer_in_time_is_an_outage() -> None:
    with pytest.raises(StoreUnavailableError, match="no answer from Redis within 2 s"), guarded("reserve", SECONDS):
        await asyncio.sleep(10)

    assert asyncio.get_running_loop().time() == 2
    assert cancelled_before() == 0


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (driver.ConnectionError("gone"), StoreUnavailableError),
        (TimeoutError("slow"), StoreUnavailableError),
        (OSError("no route"), StoreUnavailableError),
        (driver.AuthenticationError("WRONGPASS"), StoreConfigurationError),
        (driver.DataError("not for Redis"), driver.DataError),
        (ValueError("ours"), ValueError),
    ],
)
@virtual_time
async def test_errors_of_the_driver_become_ours_and_others_stay(error: Exception, becomes: type[Exception]) -> None:
    with pytest.raises(becomes) as raised, guarded("reserve", SECONDS):
        raise error

    assert raised.value is error or raised.value.__cause__ is error
    assert isinstance(raised.value, StoreError) == (raised.value is not error)


@virtual_time
async def test_a_cancellation_by_the_caller_stays_one() -> None:
    async def call() -> None:
        with guarded("reserve", SECONDS):
            await asyncio.sleep(10)

    task = asyncio.create_task(call())
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait({task})

    assert task.cancelled()


@pytest.mark.parametrize("swallowed_after", [1, 2])
@virtual_time
async def test_a_cancellation_that_the_driver_has_swallowed_is_raised_unless_it_was_the_limit_s(
    swallowed_after: int,
) -> None:
    async def call() -> str:
        with guarded("reserve", SECONDS), suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        return "answered"

    task = asyncio.create_task(call())
    if swallowed_after == 1:
        asyncio.get_running_loop().call_later(1, task.cancel)
    await asyncio.wait({task})

    assert task.cancelled() == (swallowed_after == 1)
    assert task.cancelled() or task.result() == "answered"


@virtual_time
async def test_one_that_was_cancelled_earlier_may_still_ask() -> None:
    async def call() -> str:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            with guarded("release", SECONDS):
                await asyncio.sleep(1)
        return "released"

    task = asyncio.create_task(call())
    await asyncio.sleep(1)
    task.cancel()

    assert await task == "released"
