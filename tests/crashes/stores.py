"""The stores of workers and trials, by kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal

import asyncpg
from sqlalchemy.engine import make_url

from integr8s_idem.config import RedisStoreSettings
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_client
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine
from tests.support.postgres import PostgresServer

StoreKind = Literal["redis", "postgresql", "sqlite"]

CONNECTIONS: Final = 4
"""Of one process to PostgreSQL, by each of its engines, unless more are needed for a moment."""

LOCK_TIMEOUT: Final = 2.0


@asynccontextmanager
async def open_store(kind: StoreKind, url: str, timeout: float) -> AsyncIterator[IdempotencyRepository]:
    """The store of a worker; its tables are there."""
    if kind == "redis":
        client = redis_client(RedisStoreSettings(url=url, timeout_seconds=timeout))
        yield RedisIdempotencyRepository(client, timeout=timedelta(seconds=timeout))
        await client.aclose()
        return
    async with open_sql_store(url, timeout) as store:
        yield store


@asynccontextmanager
async def open_sql_store(url: str, timeout: float) -> AsyncIterator[SqlIdempotencyRepository]:
    """As `open_store`."""
    engine = sql_engine(url, pool_size=CONNECTIONS, lock_timeout_seconds=LOCK_TIMEOUT)
    yield SqlIdempotencyRepository(engine, timeout=timedelta(seconds=timeout))
    await engine.dispose()


@dataclass(frozen=True)
class Database:
    """One that a trial has for itself."""

    url: str
    store: SqlIdempotencyRepository


@asynccontextmanager
async def open_database(server: PostgresServer | None, name: str, folder: Path) -> AsyncIterator[Database]:
    """A database with the tables of the store: on `server`, or, without one, a SQLite file in `folder`."""
    url = f"sqlite+aiosqlite:///{folder / 'store.db'}"
    if server is not None:
        await _on(server, f"CREATE DATABASE {name}")
        url = make_url(server.url).set(database=name).render_as_string(hide_password=False)
    async with open_sql_store(url, timeout=30) as store:
        await migrate(store.engine)
        yield Database(url, store)
    if server is not None:
        await _on(server, f"DROP DATABASE {name} WITH (FORCE)")


async def _on(server: PostgresServer, statement: str) -> None:
    connection = await asyncpg.connect(host=str(server.folder), user="postgres", database="postgres")
    try:
        async with asyncio.timeout(60):
            await connection.execute(statement)
    finally:
        await connection.close()
