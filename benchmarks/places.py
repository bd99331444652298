"""The Redis that benchmarks run on: one server for all contestants, which persists what it acknowledges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from redis.asyncio import Redis

from benchmarks.servers import redis_version, running
from integr8s_idem.config import IdempotencyConfig, RedisStoreSettings
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import open_store
from integr8s_idem.telemetry import SILENT, Observer
from tests.support.redis import RedisServer

LOCAL_KEYS: Final = 100_000
"""Capacity of the local memory, for managers that have one."""


@dataclass(frozen=True)
class RedisEnvironment:
    """A running server, and clients that are closed with it."""

    server: RedisServer
    version: str
    stack: AsyncExitStack

    @property
    def url(self) -> str:
        return self.server.url

    def plain_client(self) -> Redis:
        """Create a redis-py client with its defaults."""
        client = Redis.from_url(self.url)
        self.stack.push_async_callback(client.aclose)
        return client

    async def repository(self) -> IdempotencyRepository:
        """Open the store as settings do, but with a long timeout, so that a busy machine does not fail a run."""
        return await self.stack.enter_async_context(open_redis_store(self.url))

    async def manager(self, scope: str, *, local: bool = False, observer: Observer = SILENT) -> IdempotencyManager:
        """Create a manager with defaults; with `local`, it remembers the keys that this process completed."""
        config = IdempotencyConfig(local_memory_keys=LOCAL_KEYS if local else 0)
        manager = IdempotencyManager(config, await self.repository(), observer, scope=scope)
        self.stack.push_async_callback(manager.close)
        return manager


def open_redis_store(url: str) -> AbstractAsyncContextManager[IdempotencyRepository]:
    """Open the store on a running server."""
    return open_store(RedisStoreSettings(url=url, timeout_seconds=60), key_prefix="idempotency")


@asynccontextmanager
async def redis_environment() -> AsyncIterator[RedisEnvironment]:
    """Start a server with appendonly yes and appendfsync everysec."""
    server = RedisServer(config={"appendonly": "yes"})
    async with running(server), AsyncExitStack() as stack:
        yield RedisEnvironment(server, await asyncio.to_thread(redis_version, server), stack)
