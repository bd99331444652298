"""The contract suite on a Redis primary found through Sentinels, with every write confirmed by both replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import pytest

from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_sentinel_client
from integr8s_idem.testing.contract import RecordAdminContract, RepositoryContract, StoreUnderTest
from tests.support.aging import age_records
from tests.support.redis_sentinel import RedisGroup


@pytest.fixture(scope="module")
def group() -> Iterator[RedisGroup]:
    with RedisGroup() as group:
        yield group


class TestRedisBySentinel(RepositoryContract, RecordAdminContract):
    @pytest.fixture
    async def store(self, group: RedisGroup) -> AsyncIterator[StoreUnderTest]:
        group.primary().flush()
        client = redis_sentinel_client(group.settings(timeout_seconds=20))

        async def advance(duration: timedelta) -> None:
            await age_records(client, duration)

        async def spoil(key: str) -> None:
            await client.set(key, b'{"status": "completed"}', ex=60)

        repository = RedisIdempotencyRepository(
            client, timeout=timedelta(seconds=20), wait_replicas=2, wait_timeout=timedelta(seconds=15)
        )
        yield StoreUnderTest(repository, advance, spoil)
        await client.aclose()
