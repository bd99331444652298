"""Fixtures that any test may use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from tests.support.redis import RedisServer

pytest_plugins = ["tests.support.kafka.fixtures"]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One server for all tests, on a Unix socket.  Never stop, pause or configure it: start one of your own."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of an empty database."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[Redis]:
    """A client of an empty database."""
    client = Redis.from_url(redis_url)
    yield client
    await client.aclose()
