"""The store that settings ask for.  A driver is imported only for a store of its kind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

from integr8s_idem.config import (
    MemoryStoreSettings,
    MysqlStoreSettings,
    PostgresqlStoreSettings,
    RedisStoreSettings,
    SqliteStoreSettings,
    StoreSettings,
)
from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.stores import IdempotencyRepository

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

SqlSettings: TypeAlias = MysqlStoreSettings | PostgresqlStoreSettings | SqliteStoreSettings
"""Of the stores that have tables."""


@asynccontextmanager
async def open_store(settings: StoreSettings, *, key_prefix: str) -> AsyncIterator[IdempotencyRepository]:
    """A store that is closed at the end of the block; it connects at its first use.

    Raises:
        StoreConfigurationError: What this kind needs is not installed.
    """
    match settings:
        case MemoryStoreSettings():
            from integr8s_idem.stores.memory import MemoryIdempotencyRepository

            yield MemoryIdempotencyRepository()
        case RedisStoreSettings():
            async with _redis(settings, key_prefix) as store:
                yield store
        case MysqlStoreSettings() | PostgresqlStoreSettings() | SqliteStoreSettings():
            async with _sql(settings) as store:
                yield store


@asynccontextmanager
async def _redis(settings: RedisStoreSettings, key_prefix: str) -> AsyncIterator[IdempotencyRepository]:
    from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_client

    client = redis_client(settings)
    try:
        timeout = timedelta(seconds=settings.timeout_seconds)
        yield RedisIdempotencyRepository(client, timeout=timeout, key_prefix=key_prefix)
    finally:
        await client.aclose()


@asynccontextmanager
async def _sql(settings: SqlSettings) -> AsyncIterator[IdempotencyRepository]:
    async with open_engine(settings) as engine:
        from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate

        if isinstance(settings, SqliteStoreSettings):
            # A file of one machine: nobody else would make its tables.
            await migrate(engine)
        yield SqlIdempotencyRepository(
            engine,
            timeout=timedelta(seconds=settings.timeout_seconds),
            purge_every=timedelta(seconds=settings.purge_interval_seconds),
        )


@asynccontextmanager
async def open_engine(settings: SqlSettings) -> AsyncIterator[AsyncEngine]:
    """The engine of a store in SQL, disposed of at the end of the block; it connects at its first use.

    Raises:
        StoreConfigurationError: What this kind needs is not installed.
    """
    try:
        from integr8s_idem.stores.sql import settings_engine

        engine = settings_engine(settings)
    except ModuleNotFoundError as error:
        raise StoreConfigurationError(
            "start", f'a store of kind "{settings.kind}" needs {error.name}: pip install "integr8s-idem[sql]"'
        ) from error
    try:
        yield engine
    finally:
        await engine.dispose()
