"""SQL databases for single trials."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import asyncpg
from sqlalchemy.engine import make_url

from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine
from tests.support.homes import CONNECTIONS, Home

LOCK_TIMEOUT = 2.0


@asynccontextmanager
async def open_sql_store(url: str, timeout: float) -> AsyncIterator[SqlIdempotencyRepository]:
    """Open a store at the SQLAlchemy URL `url`; its tables must exist."""
    engine = sql_engine(url, pool_size=CONNECTIONS, lock_timeout_seconds=LOCK_TIMEOUT)
    try:
        yield SqlIdempotencyRepository(engine, timeout=timedelta(seconds=timeout))
    finally:
        await engine.dispose()


@dataclass(frozen=True)
class Database:
    """A database of a single trial."""

    url: str
    store: SqlIdempotencyRepository


@asynccontextmanager
async def open_database(home: Home, name: str, folder: Path) -> AsyncIterator[Database]:
    """Create a database with the tables of the store, at `home` or as a file in `folder`, and drop it afterwards."""
    url = f"sqlite+aiosqlite:///{folder / 'store.db'}"
    if home.server is not None:
        await _on(home, f"CREATE DATABASE {name}")
        url = make_url(home.server.url).set(database=name).render_as_string(hide_password=False)
    try:
        async with open_sql_store(url, timeout=30) as store:
            await migrate(store.engine)
            yield Database(url, store)
    finally:
        if home.server is not None:
            await _on(home, f"DROP DATABASE {name} WITH (FORCE)")


async def _on(home: Home, statement: str) -> None:
    connection = await asyncpg.connect(host=str(home.server.folder), user="postgres", database="postgres")
    try:
        async with asyncio.timeout(60):
            await connection.execute(statement)
    finally:
        await connection.close()
