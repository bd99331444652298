"""The contract suite on a Redis Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import pytest

from integr8s_idem.stores.redis import RedisClusterIdempotencyRepository, redis_cluster_client
from integr8s_idem.stores.redis.buckets import stored_name
from integr8s_idem.testing.contract import RecordAdminContract, RepositoryContract, StoreUnderTest
from tests.support.aging import age_records
from tests.support.redis_cluster import RedisCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


class TestRedisCluster(RepositoryContract, RecordAdminContract):
    @pytest.fixture
    async def store(self, cluster: RedisCluster) -> AsyncIterator[StoreUnderTest]:
        await asyncio.to_thread(cluster.flush)
        client = redis_cluster_client(cluster.settings(timeout_seconds=20))

        async def advance(duration: timedelta) -> None:
            for primary in await client.primaries():
                await age_records(primary, duration, one_by_one=True)

        async def spoil(key: str) -> None:
            name = stored_name(key)
            for primary in await client.primaries():
                slot = await primary.execute_command("CLUSTER", "KEYSLOT", name)  # type: ignore[no-untyped-call]
                if cluster.owner(slot).port == primary.connection_pool.connection_kwargs["port"]:
                    await primary.set(name, b'{"status": "completed"}', ex=60)

        repository = RedisClusterIdempotencyRepository(
            client, timeout=timedelta(seconds=20), wait_replicas=1, wait_timeout=timedelta(seconds=15)
        )
        yield StoreUnderTest(repository, advance, spoil)
        await client.aclose()
