"""All durations of the public API accept a `timedelta` or seconds."""

from __future__ import annotations

import asyncio
import math
from datetime import timedelta
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from integr8s_idem import (
    EventRouter,
    IdempotencyManager,
    IdempotentEventDispatcher,
    IdempotentEventHandler,
    RedisIdempotencyRepository,
    idempotent,
)
from integr8s_idem.config.durations import duration
from integr8s_idem.errors import ApplicationError, IdempotencyConflictError
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from integr8s_idem.integrations.dishka import IdempotentDispatcherProvider
from integr8s_idem.integrations.faststream import IdempotencyMiddleware
from integr8s_idem.integrations.httpx import RetryingTransport
from tests.support.guarded import guarded
from tests.support.workers import OrderPlaced


async def work() -> str:
    return "receipt"


async def handle(event: OrderPlaced) -> None: ...


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (60, timedelta(minutes=1)),
        (0.25, timedelta(milliseconds=250)),
        (0, timedelta()),
        (timedelta(days=8), timedelta(days=8)),
        (None, None),
    ],
)
def test_seconds_and_timedeltas_are_durations(value: Any, expected: timedelta | None) -> None:
    assert duration(value, "ttl") == expected


@pytest.mark.parametrize("value", [-1, -0.5, timedelta(seconds=-1), math.nan, math.inf, 1e300, "60", True])
def test_other_values_are_rejected_with_an_example(value: Any) -> None:
    with pytest.raises(ApplicationError, match=r"ttl must be a non-negative timedelta or number of seconds"):
        duration(value, "ttl")


async def kept_for(manager: IdempotencyManager, key: str) -> timedelta:
    record = await manager.get(key)
    assert record is not None
    assert record.expires_at is not None
    assert record.settled_at is not None
    return record.expires_at - record.settled_at


@pytest.mark.parametrize("ttl", [600, 600.0, timedelta(minutes=10)])
async def test_a_ttl_in_seconds_sets_how_long_the_outcome_is_kept(ttl: Any) -> None:
    here = guarded()

    await here.manager.run("order:1", work, ttl=ttl)

    assert await kept_for(here.manager, "order:1") == timedelta(minutes=10)


async def test_all_methods_of_the_manager_accept_seconds() -> None:
    manager = guarded().manager
    verdicts = await manager.acquire_batch(["order:1", "order:2", "order:3", "order:4"])
    first, second, third, fourth = cast(Any, list(verdicts.values()))

    assert await manager.complete(first, "receipt", ttl=600)
    assert await manager.fail(second, "no stock", ttl=600.0)
    assert await manager.confirm_batch([third], ttl=600) == [True]
    assert await manager.complete_many([manager.completion(fourth, ttl=600)]) == [True]
    for key in verdicts:
        assert await kept_for(manager, key) == timedelta(minutes=10)


@pytest.mark.parametrize("longest", [0, 0.0])
async def test_a_wait_in_seconds_ends(longest: float) -> None:
    manager = guarded().manager
    await manager.reserve("order:1")

    with pytest.raises(IdempotencyConflictError):
        await manager.run("order:1", work, on_in_progress="wait", wait_timeout=longest)


async def test_the_decorator_accepts_seconds() -> None:
    manager = guarded().manager
    started, may_end = asyncio.Event(), asyncio.Event()

    @idempotent(key="refund:{order_id}", ttl=600, lock_timeout=0, manager=manager)
    async def refund(order_id: str) -> None:
        started.set()
        await may_end.wait()

    first = asyncio.create_task(refund("1"))
    await started.wait()
    with pytest.raises(IdempotencyConflictError):
        await refund("1")
    may_end.set()
    await first


def test_classes_and_loops_accept_seconds() -> None:
    manager = guarded().manager
    router = EventRouter()
    router.on_batch(OrderPlaced, max_wait=0.5, name="charge")(cast(Any, lambda events: work()))

    IdempotentEventHandler(handle, manager, ttl=600, timeout=5)
    IdempotentDispatcherProvider(EventRouter(), ttl=600)
    IdempotencyMiddleware(manager, ttl=600)
    IdempotencyKeyMiddleware(cast(Any, None), manager=manager, ttl=600, wait=10, identity=anyone)
    RetryingTransport(cast(Any, None), longest=30)
    RedisIdempotencyRepository(Redis(), timeout=1, wait_replicas=1, wait_timeout=0.5)
    assert IdempotentEventDispatcher(EventRouter(), manager, ttl=600, timeout=5).ttl == timedelta(minutes=10)
    (handler,) = router.handlers
    assert handler.batch is not None
    assert handler.batch.wait == timedelta(milliseconds=500)


@pytest.mark.filterwarnings("error")
async def test_passing_a_coroutine_instead_of_the_function_is_rejected() -> None:
    here = guarded()
    ran: list[str] = []

    async def charge() -> None:
        ran.append("charged")

    with pytest.raises(ApplicationError, match=r"pass the function itself, as in manager.run\(key, function\)"):
        await here.manager.run("order:1", cast(Any, charge()))

    assert ran == []
    assert await here.manager.get("order:1") is None


@pytest.mark.parametrize("on_failure", ["retry", "block"])
async def test_a_function_without_an_awaitable_result_releases_its_key(on_failure: Any) -> None:
    manager = guarded().manager

    def charge() -> str:
        return "receipt"

    with pytest.raises(ApplicationError, match=r"charge is not an async function: it returned str, .* key is released"):
        await manager.run("order:1", cast(Any, charge), on_failure=on_failure)

    assert await manager.run("order:1", work) == "receipt"
