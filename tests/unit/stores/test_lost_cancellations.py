"""A cancellation that a driver swallows or replaces still ends the call of every store.

Before Python 3.12, `asyncio.wait_for` returns or raises what came at the same time as the cancellation; redis-py and
aiomysql connect with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta

import pytest
from redis import exceptions as redis
from sqlalchemy.exc import OperationalError

from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.stores.dynamodb.calls import retries
from integr8s_idem.stores.redis.errors import guarded as redis_call
from integr8s_idem.stores.sql.errors import guarded as sql_call
from integr8s_idem.testing.virtual_time import virtual_time

SECONDS = timedelta(seconds=2)


@asynccontextmanager
async def on_redis() -> AsyncIterator[None]:
    with redis_call("reserve", SECONDS):
        yield


@asynccontextmanager
async def on_sql() -> AsyncIterator[None]:
    async with sql_call("reserve", SECONDS, "mysql"):
        yield


@asynccontextmanager
async def on_dynamodb() -> AsyncIterator[None]:
    async with retries("reserve", SECONDS):
        yield


REFUSED_BY_REDIS = redis.ConnectionError("refused at the same time")
REFUSED_BY_MYSQL = OperationalError("SELECT 1", (), Exception(2003, "refused at the same time"))
REFUSED_TO_DYNAMODB = StoreUnavailableError("reserve", "refused at the same time")

Call = Callable[[], AbstractAsyncContextManager[None]]


@pytest.mark.parametrize("call", [on_redis, on_sql, on_dynamodb])
@pytest.mark.parametrize("swallowed_after", [1, 2])
@virtual_time
async def test_a_swallowed_cancellation_is_raised_unless_the_timeout_caused_it(
    call: Call, swallowed_after: int
) -> None:
    async def use() -> str:
        async with call():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(10)
        return "answered"

    task = asyncio.create_task(use())
    if swallowed_after == 1:
        asyncio.get_running_loop().call_later(1, task.cancel)
    await asyncio.wait({task})

    assert task.cancelled() == (swallowed_after == 1)
    assert task.cancelled() or task.result() == "answered"


@pytest.mark.parametrize(
    ("call", "refused"),
    [(on_redis, REFUSED_BY_REDIS), (on_sql, REFUSED_BY_MYSQL), (on_dynamodb, REFUSED_TO_DYNAMODB)],
)
@pytest.mark.parametrize("replaced_after", [1, 2])
@virtual_time
async def test_a_replaced_cancellation_is_raised_unless_the_timeout_caused_it(
    call: Call, refused: Exception, replaced_after: int
) -> None:
    async def use() -> None:
        async with call():
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                raise refused from None

    task = asyncio.create_task(use())
    if replaced_after == 1:
        asyncio.get_running_loop().call_later(1, task.cancel)
    await asyncio.wait({task})

    assert task.cancelled() == (replaced_after == 1)
    assert task.cancelled() or isinstance(task.exception(), StoreUnavailableError)
