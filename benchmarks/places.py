"""The Redis that the questions are asked on: one server for all contestants, which keeps what it acknowledges."""

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
"""That a manager remembers of those which this process completed, where that is asked for."""


@dataclass(frozen=True)
class RedisPlace:
    """A running server, and clients that are closed at its end."""

    server: RedisServer
    version: str
    stack: AsyncExitStack

    @property
    def url(self) -> str:
        return self.server.url

    def plain_client(self) -> Redis:
        """redis-py as everybody makes it."""
        client = Redis.from_url(self.url)
        self.stack.push_async_callback(client.aclose)
        return client

    async def repository(self) -> IdempotencyRepository:
        """The store as settings make it, but for patience: a machine that is busy must not end a run."""
        return await self.stack.enter_async_context(open_place(self.url))

    async def manager(self, scope: str, *, local: bool = False, observer: Observer = SILENT) -> IdempotencyManager:
        """A manager as by default; `local`: with a memory of what this process completed."""
        config = IdempotencyConfig(local_memory_keys=LOCAL_KEYS if local else 0)
        manager = IdempotencyManager(config, await self.repository(), observer, scope=scope)
        self.stack.push_async_callback(manager.close)
        return manager


def open_place(url: str) -> AbstractAsyncContextManager[IdempotencyRepository]:
    """The store on a server that runs already."""
    return open_store(RedisStoreSettings(url=url, timeout_seconds=60), key_prefix="idempotency")


@asynccontextmanager
async def redis_place() -> AsyncIterator[RedisPlace]:
    """A server of its own, with appendonly yes and appendfsync everysec."""
    server = RedisServer(config={"appendonly": "yes"})
    async with running(server), AsyncExitStack() as stack:
        yield RedisPlace(server, await asyncio.to_thread(redis_version, server), stack)
