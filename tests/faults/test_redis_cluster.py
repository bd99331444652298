"""Workers on a Redis Cluster that changes: slots move, primaries die, are cut off or step down.

The broker is in memory (see `tests.support.redis_shop`); the six servers, driver, store and worker are real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from integr8s_idem.stores.redis import RedisClusterIdempotencyRepository, redis_cluster_client
from integr8s_idem.stores.redis.buckets import BUCKET_SLOTS
from integr8s_idem.telemetry import Signal
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_shop import RedisShop, briefly, open_redis_shop

pytestmark = pytest.mark.usefixtures("_quick_watch")


@pytest.fixture
def _quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.worker.store_circuit.WATCH_SECONDS", 0.3)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
async def store(cluster: RedisCluster) -> AsyncIterator[RedisClusterIdempotencyRepository]:
    await asyncio.to_thread(cluster.flush)
    client = redis_cluster_client(cluster.settings(timeout_seconds=1))
    yield RedisClusterIdempotencyRepository(client, timeout=timedelta(seconds=1))
    await client.aclose()


@asynccontextmanager
async def loaded(shop: RedisShop) -> AsyncIterator[None]:
    """Publish new orders and duplicates of earlier ones during the block, and wait until they are settled."""

    async def keep_ordering() -> None:
        while True:
            shop.order(3)
            shop.publish(*shop.published[-30:-28])
            await asyncio.sleep(0.05)

    load = asyncio.create_task(keep_ordering())
    try:
        await eventually(lambda: shop.acknowledged >= 20)
        yield
    finally:
        load.cancel()
    await shop.settled()


@pytest.mark.scenario(50)
async def test_slots_move_under_load_without_loss_or_repeats(
    cluster: RedisCluster, store: RedisClusterIdempotencyRepository, effects: Effects
) -> None:
    target = cluster.primaries()[0]
    async with open_redis_shop(effects, store, behave=briefly) as shop:
        async with loaded(shop):
            slots_elsewhere = set(BUCKET_SLOTS) - cluster.slots_of(target)
            slots = sorted(slots_elsewhere)[::4]
            moved = await asyncio.to_thread(cluster.move_slots, slots, target)

        assert moved >= len(slots) / 2
        assert cluster.slots_of(target) >= set(slots)
        assert shop.observer.counts[Signal.STORE_DATA_LOST] + shop.observer.counts[Signal.STORE_FAILOVER] == 0
        assert shop.judge()["lost"] == 0
        shop.untouched()


@pytest.mark.scenario(44)
async def test_a_worker_follows_the_replica_that_replaces_a_primary(
    cluster: RedisCluster, store: RedisClusterIdempotencyRepository, effects: Effects
) -> None:
    slot = BUCKET_SLOTS[0]
    old = cluster.owner(slot)
    async with open_redis_shop(effects, store, behave=briefly) as shop:
        async with loaded(shop):
            old.kill()
            try:
                await asyncio.to_thread(cluster.await_owner, slot, other_than=old)
                await eventually(lambda: shop.observer.counts[Signal.STORE_FAILOVER])
            finally:
                await asyncio.to_thread(cluster.rejoin, old)

        assert shop.observer.counts[Signal.STORE_DATA_LOST] == 0
        assert shop.tally.retries == 0
        assert shop.judge(records_lost=True)["lost"] == 0


@pytest.mark.scenario(50)
async def test_a_manual_failover_in_a_cluster_repeats_nothing(
    cluster: RedisCluster, store: RedisClusterIdempotencyRepository, effects: Effects
) -> None:
    slot = BUCKET_SLOTS[0]
    old = cluster.owner(slot)
    async with open_redis_shop(effects, store, behave=briefly) as shop:
        async with loaded(shop):
            await asyncio.to_thread(cluster.hand_over, old)
            await asyncio.to_thread(cluster.await_owner, slot, other_than=old)

        await asyncio.to_thread(cluster.await_health)
        assert (shop.judge()["lost"], shop.judge()["repeats"]) == (0, 0)
