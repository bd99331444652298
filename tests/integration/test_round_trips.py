"""What an event costs at the store, counted by the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from redis.asyncio import Redis

from integr8s_idem import IdempotencyManager
from integr8s_idem.stores.redis import RedisIdempotencyRepository


@pytest.fixture
async def manager(redis_client: Redis) -> AsyncIterator[IdempotencyManager]:
    repository = RedisIdempotencyRepository(redis_client, timeout=timedelta(seconds=5))
    manager = IdempotencyManager(repository=repository, scope="billing")
    await manager.run("warm-up", _work)  # loads the scripts
    await redis_client.config_resetstat()
    yield manager
    await manager.close()


async def _work() -> str:
    return "done"


async def calls(client: Redis) -> int:
    """Commands that came over the wire, without those that scripts call and without this one."""
    stats = await client.info("commandstats")
    inner = {"cmdstat_get", "cmdstat_set", "cmdstat_time", "cmdstat_pttl", "cmdstat_pexpire"}
    ours = {"cmdstat_info", "cmdstat_config|resetstat", "cmdstat_config"}
    return sum(values["calls"] for name, values in stats.items() if name not in inner | ours)


async def test_a_fresh_event_costs_two_round_trips(manager: IdempotencyManager, redis_client: Redis) -> None:
    await manager.run("order:1", _work)

    assert await calls(redis_client) == 2


async def test_a_duplicate_costs_one_round_trip(manager: IdempotencyManager, redis_client: Redis) -> None:
    await manager.run("order:1", _work)
    await redis_client.config_resetstat()

    assert await manager.run("order:1", _work) == "done"

    assert await calls(redis_client) == 1


async def test_a_hundred_events_at_once_share_their_round_trips(
    manager: IdempotencyManager, redis_client: Redis
) -> None:
    await asyncio.gather(*(manager.run(f"order:{number}", _work) for number in range(100)))

    assert await calls(redis_client) == 2
