"""Open stores from settings.  Drivers are imported only when they are needed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from integr8s_idem.config import (
    DynamodbStoreSettings,
    MemoryStoreSettings,
    MysqlStoreSettings,
    PostgresqlStoreSettings,
    RedisClusterStoreSettings,
    RedisSentinelStoreSettings,
    RedisStoreSettings,
    SqliteStoreSettings,
    StoreSettings,
)
from integr8s_idem.config.message_text import needing
from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.stores import IdempotencyRepository

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

SqlSettings: TypeAlias = MysqlStoreSettings | PostgresqlStoreSettings | SqliteStoreSettings
"""Settings of SQL stores."""

_inspected: Final[ContextVar[list[IdempotencyRepository] | None]] = ContextVar("integr8s_idem_inspected", default=None)


@contextmanager
def as_it_is() -> Iterator[list[IdempotencyRepository]]:
    """Open stores in this block without changing them: no tables, files or persistent settings are created.

    Yields the list of the stores that were opened.
    """
    opened: list[IdempotencyRepository] = []
    before = _inspected.set(opened)
    try:
        yield opened
    finally:
        _inspected.reset(before)


@asynccontextmanager
async def open_store(settings: StoreSettings, *, key_prefix: str) -> AsyncIterator[IdempotencyRepository]:
    """Open a store and close it at the end of the block; it connects on first use.

    Raises:
        StoreConfigurationError: The driver of this kind of store is not installed.
    """
    async with _store(settings, key_prefix) as store:
        inspected = _inspected.get()
        if inspected is not None:
            inspected.append(store)
        yield store


@asynccontextmanager
async def _store(settings: StoreSettings, key_prefix: str) -> AsyncIterator[IdempotencyRepository]:
    match settings:
        case MemoryStoreSettings():
            from integr8s_idem.stores.memory import MemoryIdempotencyRepository

            yield MemoryIdempotencyRepository()
        case RedisStoreSettings() | RedisClusterStoreSettings() | RedisSentinelStoreSettings():
            async with _redis(settings, key_prefix) as store:
                yield store
        case MysqlStoreSettings() | PostgresqlStoreSettings() | SqliteStoreSettings():
            async with _sql(settings) as store:
                yield store
        case DynamodbStoreSettings():
            async with _dynamodb(settings) as store:
                yield store


@asynccontextmanager
async def _redis(
    settings: RedisStoreSettings | RedisClusterStoreSettings | RedisSentinelStoreSettings, key_prefix: str
) -> AsyncIterator[IdempotencyRepository]:
    from integr8s_idem.stores import redis

    options: dict[str, Any] = {
        "timeout": timedelta(seconds=settings.timeout_seconds),
        "key_prefix": key_prefix,
        "wait_replicas": settings.wait_replicas,
        "wait_timeout": timedelta(seconds=settings.wait_timeout_seconds),
    }
    if isinstance(settings, RedisClusterStoreSettings):
        cluster = redis.redis_cluster_client(settings)
        async with aclosing(cluster):
            yield redis.RedisClusterIdempotencyRepository(cluster, **options)
        return
    if isinstance(settings, RedisSentinelStoreSettings):
        client = redis.redis_sentinel_client(settings)
    else:
        client = redis.redis_client(settings)
    async with aclosing(client):
        yield redis.RedisIdempotencyRepository(client, **options)


@asynccontextmanager
async def _sql(settings: SqlSettings) -> AsyncIterator[IdempotencyRepository]:
    async with open_engine(settings) as engine:
        from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate

        if isinstance(settings, SqliteStoreSettings) and _inspected.get() is None:
            # A local file has no administrator who would create its tables.
            await migrate(engine)
        yield SqlIdempotencyRepository(
            engine,
            timeout=timedelta(seconds=settings.timeout_seconds),
            purge_every=timedelta(seconds=settings.purge_interval_seconds),
        )


@asynccontextmanager
async def open_engine(settings: SqlSettings) -> AsyncIterator[AsyncEngine]:
    """Create the engine of an SQL store and dispose of it at the end of the block; it connects on first use.

    Raises:
        StoreConfigurationError: The driver of this database is not installed.
    """
    try:
        from integr8s_idem.stores.sql import settings_engine

        engine = settings_engine(settings, as_it_is=_inspected.get() is not None)
    except ModuleNotFoundError as error:
        raise StoreConfigurationError("start", needing(settings.kind, error)) from error
    try:
        yield engine
    finally:
        await engine.dispose()


@asynccontextmanager
async def _dynamodb(settings: DynamodbStoreSettings) -> AsyncIterator[IdempotencyRepository]:
    async with open_dynamo(settings) as client:
        from integr8s_idem.stores.dynamodb import DynamoIdempotencyRepository

        yield DynamoIdempotencyRepository(
            client,
            settings.table,
            timeout=timedelta(seconds=settings.timeout_seconds),
            concurrency=settings.max_connections,
            count_every=timedelta(seconds=settings.count_interval_seconds),
        )


@asynccontextmanager
async def open_dynamo(settings: DynamodbStoreSettings) -> AsyncIterator[Any]:
    """Create the client of a DynamoDB store and close it at the end of the block; it connects on first use.

    Raises:
        StoreConfigurationError: The driver is not installed, or no region is configured.
    """
    try:
        from integr8s_idem.stores.dynamodb import dynamo_client
    except ModuleNotFoundError as error:
        raise StoreConfigurationError("start", needing(settings.kind, error)) from error
    async with dynamo_client(settings) as client:
        yield client
