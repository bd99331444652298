"""Which database a store says it is, for metrics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from redis.asyncio import Redis

from integr8s_idem.config import RedisClusterStoreSettings, RedisSentinelStoreSettings, RedisStoreSettings
from integr8s_idem.records import Database
from integr8s_idem.stores import DatabaseStore
from integr8s_idem.stores.dynamodb import DynamoIdempotencyRepository
from integr8s_idem.stores.redis import (
    RedisClusterIdempotencyRepository,
    RedisIdempotencyRepository,
    redis_client,
    redis_cluster_client,
    redis_sentinel_client,
)
from integr8s_idem.stores.sql import SqlIdempotencyRepository, sql_engine


@pytest.mark.parametrize(
    ("url", "database"),
    [
        ("redis://cache.example:6380/3", Database("redis", "3", "cache.example", 6380)),
        ("redis://user:secret@cache.example", Database("redis", "0", "cache.example", 6379)),
        ("rediss://[::1]:6379", Database("redis", "0", "::1", 6379)),
        ("unix:///run/redis.sock", Database("redis", "0", "/run/redis.sock")),
    ],
)
def test_a_redis_store_names_its_server(url: str, database: Database) -> None:
    found = RedisIdempotencyRepository(redis_client(RedisStoreSettings(url=url))).database

    assert found._replace(port=found.port or 6379 if database.port else None) == database


def test_a_redis_client_of_the_application_is_named_too() -> None:
    store = RedisIdempotencyRepository(Redis(host="cache.example", port=6380, db=1))

    assert isinstance(store, DatabaseStore)
    assert store.database == Database("redis", "1", "cache.example", 6380)


def test_redis_servers_that_may_change_have_no_address() -> None:
    by_sentinel = RedisSentinelStoreSettings(kind="redis-sentinel", sentinels=("a:26379",))
    cluster = RedisClusterStoreSettings(kind="redis-cluster", urls=("redis://a:7000", "redis://b:7000"))

    assert RedisIdempotencyRepository(redis_sentinel_client(by_sentinel)).database == Database("redis", "0")
    assert RedisClusterIdempotencyRepository(redis_cluster_client(cluster)).database == Database("redis")


@pytest.mark.parametrize(
    ("url", "database"),
    [
        ("postgresql+asyncpg://me:secret@db.example:5433/shop", Database("postgresql", "shop", "db.example", 5433)),
        ("postgresql+asyncpg://me@/shop?host=/run/postgresql", Database("postgresql", "shop", "/run/postgresql")),
        ("postgresql+asyncpg://me@/shop?host=a:5432&host=b:5432", Database("postgresql", "shop")),
        ("mysql+aiomysql://me:secret@db.example/shop", Database("mysql", "shop", "db.example")),
        ("sqlite+aiosqlite:///records.db", Database("sqlite")),
    ],
)
def test_a_sql_store_names_its_database(url: str, database: Database) -> None:
    assert SqlIdempotencyRepository(sql_engine(url)).database == database


def test_a_dynamodb_store_names_its_endpoint() -> None:
    client = SimpleNamespace(meta=SimpleNamespace(endpoint_url="http://localhost:8000"))

    assert DynamoIdempotencyRepository(client, "records").database == Database(
        "aws.dynamodb", address="localhost", port=8000
    )
