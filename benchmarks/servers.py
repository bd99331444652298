"""Servers for the benchmarks of the stores, which persist what they acknowledge, and the contestants on each."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import aiomysql
import aiosqlite
import asyncpg
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.cluster import RedisCluster as ClusterClient
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.bare import (
    TABLES,
    BareAiomysql,
    BareAiosqlite,
    BareAsyncpg,
    BareDynamodb,
    BareRedis,
    BareRedisCluster,
    BareSqlalchemy,
)
from benchmarks.contestants import Contestant, Manager, Store
from integr8s_idem.config import DynamodbStoreSettings, MemoryStoreSettings, RedisStoreSettings
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.dynamodb import dynamo_client
from integr8s_idem.stores.dynamodb.table import KEYS, TYPES
from integr8s_idem.stores.factory import open_store
from integr8s_idem.stores.redis import redis_client, redis_sentinel_client
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine, writing
from tests.support.dynamodb.server import DynamoServer
from tests.support.kafka.broker import find_jars
from tests.support.mariadb import MariadbServer
from tests.support.postgres import PostgresServer
from tests.support.redis import RedisServer
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_sentinel import RedisGroup

CONNECTIONS: Final = 18
"""Pool size of each driver alone: the maximum of the pool of the SQL stores."""

_LONG_TIMEOUT: Final = {"timeout_seconds": 60}
"""A busy machine must not fail a run."""
_LONG_TIMEOUT_WAIT: Final = {**_LONG_TIMEOUT, "wait_replicas": 1, "wait_timeout_seconds": 10}


@dataclass(frozen=True)
class Contest:
    """The contestants on one server."""

    contestants: Mapping[str, Contestant]
    """The others are compared with `bare`."""
    server: str
    repository: IdempotencyRepository


Opened = AbstractAsyncContextManager[Contest]


def _contest(repository: IdempotencyRepository, bare: Mapping[str, Contestant], server: str) -> Contest:
    return Contest({**bare, "store": Store(repository), "manager": Manager(repository)}, server, repository)


@asynccontextmanager
async def running(server: Any) -> AsyncIterator[None]:
    """Run a server for the duration of the block."""
    await asyncio.to_thread(server.start)
    try:
        yield
    finally:
        await asyncio.to_thread(server.stop)


@asynccontextmanager
async def memory() -> AsyncIterator[Contest]:
    async with open_store(MemoryStoreSettings(kind="memory"), key_prefix="bench") as store:
        yield _contest(store, {}, "this process")


@asynccontextmanager
async def redis() -> AsyncIterator[Contest]:
    server = RedisServer(config={"appendonly": "yes"})
    async with running(server), AsyncExitStack() as stack:
        settings = RedisStoreSettings.model_validate({"kind": "redis", "url": server.url, **_LONG_TIMEOUT})
        store = await stack.enter_async_context(open_store(settings, key_prefix="bench"))
        client = redis_client(settings)
        stack.push_async_callback(client.aclose)
        yield _contest(store, {"bare": BareRedis(client)}, await asyncio.to_thread(redis_version, server))


@asynccontextmanager
async def redis_cluster() -> AsyncIterator[Contest]:
    cluster = RedisCluster()
    async with running(cluster), AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_store(cluster.settings(**_LONG_TIMEOUT), key_prefix="bench"))
        nodes = [ClusterNode("127.0.0.1", server.port) for server in cluster.servers]
        # Its pool does not wait: fewer connections than callers would be an error.
        client = ClusterClient(startup_nodes=nodes)
        stack.push_async_callback(client.aclose)
        version = await asyncio.to_thread(redis_version, cluster.servers[0])
        yield _contest(store, {"bare": BareRedisCluster(client)}, f"{version}, 3 primaries with a replica each")


@asynccontextmanager
async def redis_sentinel(*, wait: bool = False) -> AsyncIterator[Contest]:
    group = RedisGroup()
    async with running(group), AsyncExitStack() as stack:
        settings = group.settings(**(_LONG_TIMEOUT_WAIT if wait else _LONG_TIMEOUT))
        store = await stack.enter_async_context(open_store(settings, key_prefix="bench"))
        client = redis_sentinel_client(settings)
        stack.push_async_callback(client.aclose)
        version = await asyncio.to_thread(redis_version, group.servers[0])
        yield _contest(store, {"bare": BareRedis(client, wait=wait)}, f"{version}, a primary and 2 replicas")


@asynccontextmanager
async def redis_sentinel_wait() -> AsyncIterator[Contest]:
    async with redis_sentinel(wait=True) as contest:
        yield contest


def redis_version(server: RedisServer) -> str:
    """Describe the server and its settings. Blocks."""
    info = server.admin("INFO", "server")
    return f"Redis {info['redis_version']}, appendonly yes, appendfsync everysec"


def kafka_version() -> str:
    """Read the version from the name of the jar."""
    [jar] = find_jars().glob("kafka_*.jar")
    return jar.stem.rpartition("-")[2]


class DurablePostgres(PostgresServer):
    """A PostgreSQL that persists acknowledged commits, even across a crash of the machine."""

    def __init__(self) -> None:
        super().__init__(keeps_commits=True)
        self.settings = {**self.settings, "fsync": "on", "full_page_writes": "on"}


@asynccontextmanager
async def postgresql() -> AsyncIterator[Contest]:
    server = DurablePostgres()
    async with running(server), _sql(server.url, "postgresql") as (engine, store):
        pool = await asyncpg.create_pool(
            host=str(server.folder), user="postgres", database="postgres", min_size=1, max_size=CONNECTIONS
        )
        async with pool:
            bare: dict[str, Contestant] = {"bare": BareAsyncpg(pool), "core": BareSqlalchemy(engine)}
            version = await query(engine, "SELECT current_setting('server_version')")
            yield _contest(store, bare, f"PostgreSQL {version}, fsync on, Unix socket")


@asynccontextmanager
async def mysql() -> AsyncIterator[Contest]:
    server = MariadbServer(keeps_commits=True)
    async with running(server), _sql(server.url, "mysql") as (engine, store):
        pool = await aiomysql.create_pool(
            unix_socket=str(server.folder / "socket"),
            user="idem",
            db="test",
            autocommit=True,
            minsize=1,
            maxsize=CONNECTIONS,
        )
        async with pool:
            bare: dict[str, Contestant] = {"bare": BareAiomysql(pool), "core": BareSqlalchemy(engine)}
            version = await query(engine, "SELECT version()")
            yield _contest(store, bare, f"{version}, innodb_flush_log_at_trx_commit 1, Unix socket")


@asynccontextmanager
async def sqlite() -> AsyncIterator[Contest]:
    with TemporaryDirectory(prefix="idem-bench-") as folder:
        file = Path(folder) / "idem.db"
        async with (
            _sql(f"sqlite+aiosqlite:///{file}", "sqlite") as (engine, store),
            aiosqlite.connect(file, isolation_level=None, timeout=60) as connection,
        ):
            # WAL is a property of the file; other settings apply per connection.
            await connection.execute("PRAGMA synchronous = FULL")
            bare: dict[str, Contestant] = {"bare": BareAiosqlite(connection), "core": BareSqlalchemy(engine)}
            version = await query(engine, "SELECT sqlite_version()")
            yield _contest(store, bare, f"SQLite {version}, WAL, synchronous FULL")


@asynccontextmanager
async def _sql(url: str, kind: str) -> AsyncIterator[tuple[AsyncEngine, IdempotencyRepository]]:
    """Create the engine as settings do, but with long timeouts."""
    engine = sql_engine(url, lock_timeout_seconds=50)
    try:
        await migrate(engine)
        async with writing(engine) as connection:
            await connection.execute(text(TABLES[kind]))
        yield engine, SqlIdempotencyRepository(engine, timeout=timedelta(seconds=60))
    finally:
        await engine.dispose()


async def query(engine: AsyncEngine, statement: str) -> str:
    """Return the single value of a query."""
    async with engine.connect() as connection:
        return str((await connection.execute(text(statement))).scalar_one())


@asynccontextmanager
async def dynamodb() -> AsyncIterator[Contest]:
    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "none", "AWS_EC2_METADATA_DISABLED": "true"}
    server = DynamoServer()
    async with running(server), AsyncExitStack() as stack:
        settings: DynamodbStoreSettings = server.settings(**_LONG_TIMEOUT)
        client = await stack.enter_async_context(dynamo_client(settings))
        for table in (settings.table, "bare"):
            await client.create_table(
                TableName=table, KeySchema=KEYS, AttributeDefinitions=TYPES, BillingMode="PAY_PER_REQUEST"
            )
        store = await stack.enter_async_context(open_store(settings, key_prefix="bench"))
        yield _contest(store, {"bare": BareDynamodb(client, "bare")}, "DynamoDB Local, in memory: an emulator")


KINDS: Final[Mapping[str, Callable[[], Opened]]] = {
    "memory": memory,
    "redis": redis,
    "redis-cluster": redis_cluster,
    "redis-sentinel": redis_sentinel,
    "redis-sentinel-wait": redis_sentinel_wait,
    "postgresql": postgresql,
    "mysql": mysql,
    "sqlite": sqlite,
    "dynamodb": dynamodb,
}
