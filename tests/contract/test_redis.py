"""The contract suite on Redis: the oldest supported version, a newer one, and Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.testing.contract import RecordAdminContract, RepositoryContract, StoreUnderTest
from tests.support.aging import age_records
from tests.support.redis import NO_VALKEY, RedisServer, bundled_binary, needs_newer_binary, valkey_binary


@pytest.fixture(scope="module")
def oldest_server() -> Iterator[RedisServer]:
    with RedisServer(binary=bundled_binary()) as server:
        yield server


@pytest.fixture(scope="module")
def newer_server() -> Iterator[RedisServer]:
    """The installed Redis server, or Valkey if there is none."""
    with RedisServer(binary=needs_newer_binary()) as server:
        yield server


@pytest.fixture(scope="module")
def valkey_server() -> Iterator[RedisServer]:
    binary = valkey_binary()
    if binary is None:
        pytest.skip(NO_VALKEY)
    with RedisServer(binary=binary) as server:
        yield server


@asynccontextmanager
async def _store_on(server: RedisServer) -> AsyncIterator[StoreUnderTest]:
    server.flush()
    client = server.client()

    async def advance(duration: timedelta) -> None:
        await age_records(client, duration)

    async def spoil(key: str) -> None:
        await client.set(key, b'{"status": "completed"}', ex=60)

    yield StoreUnderTest(RedisIdempotencyRepository(client, timeout=timedelta(seconds=30)), advance, spoil)
    await client.aclose()


class TestOldestRedis(RepositoryContract, RecordAdminContract):
    @pytest.fixture
    async def store(self, oldest_server: RedisServer) -> AsyncIterator[StoreUnderTest]:
        async with _store_on(oldest_server) as store:
            yield store


class TestNewerRedis(RepositoryContract, RecordAdminContract):
    @pytest.fixture
    async def store(self, newer_server: RedisServer) -> AsyncIterator[StoreUnderTest]:
        async with _store_on(newer_server) as store:
            yield store


class TestValkey(RepositoryContract, RecordAdminContract):
    @pytest.fixture
    async def store(self, valkey_server: RedisServer) -> AsyncIterator[StoreUnderTest]:
        async with _store_on(valkey_server) as store:
            yield store
