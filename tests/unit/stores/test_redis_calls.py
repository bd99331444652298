"""Timeouts, cancellation and errors of one call of the Redis store."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from redis import exceptions as driver

from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from integr8s_idem.stores.redis.errors import guarded
from integr8s_idem.testing.virtual_time import virtual_time

SECONDS = timedelta(seconds=2)


def pending_cancellations() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


@virtual_time
async def test_a_timeout_is_an_unavailable_store() -> None:
    with pytest.raises(StoreUnavailableError, match="no answer from Redis within 2 s"), guarded("reserve", SECONDS):
        await asyncio.sleep(10)

    assert asyncio.get_running_loop().time() == 2
    assert pending_cancellations() == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (driver.ConnectionError("gone"), StoreUnavailableError),
        (TimeoutError("slow"), StoreUnavailableError),
        (OSError("no route"), StoreUnavailableError),
        (driver.AuthenticationError("WRONGPASS"), StoreConfigurationError),
        (driver.DataError("not for Redis"), driver.DataError),
        (ValueError("of the library"), ValueError),
    ],
)
@virtual_time
async def test_driver_errors_are_translated_and_others_are_not(error: Exception, expected: type[Exception]) -> None:
    with pytest.raises(expected) as raised, guarded("reserve", SECONDS):
        raise error

    assert raised.value is error or raised.value.__cause__ is error
    assert isinstance(raised.value, StoreError) == (raised.value is not error)


@virtual_time
async def test_a_cancellation_by_the_caller_is_not_translated() -> None:
    async def call() -> None:
        with guarded("reserve", SECONDS):
            await asyncio.sleep(10)

    task = asyncio.create_task(call())
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.wait({task})

    assert task.cancelled()


@virtual_time
async def test_a_cancelled_task_can_still_call_the_store() -> None:
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
