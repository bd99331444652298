"""Create SQLAlchemy engines for the store, and open connections and transactions on them."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from integr8s_idem.config import MysqlStoreSettings, PostgresqlStoreSettings, SqliteStoreSettings
from integr8s_idem.config.message_text import needing
from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.stores.sql.dialects import dialect_of
from integr8s_idem.stores.sql.server_engines import BEGINS_TRANSACTION, mysql_engine, postgresql_engine
from integr8s_idem.stores.sql.sqlite_engine import READ_ONLY, sqlite_engine
from integr8s_idem.stores.sql.tls import tls_context

_DRIVERS: Final[Mapping[str, str]] = {"mysql": "aiomysql", "postgresql": "asyncpg", "sqlite": "aiosqlite"}


def sql_engine(
    url: str | URL,
    *,
    pool_size: int = 8,
    lock_timeout_seconds: float = 2.0,
    pool_timeout_seconds: float = 30.0,
    tls: ssl.SSLContext | None = None,
) -> AsyncEngine:
    """Create an engine configured for the store.

    PostgreSQL: READ COMMITTED, a limited wait for row locks, at most `pool_size` connections (callers wait up to
    `pool_timeout_seconds` for a free one), and a ping before an idle connection is reused.
    MySQL and MariaDB: the same, and strict mode.
    SQLite: write-ahead log; synchronous = FULL, so that a power failure loses no data; a writing transaction waits for
    the write lock when it begins, instead of failing halfway; and the transactions of one process get the lock in
    the order of their requests.

    Args:
        url: The URL as in the settings.  A driver in it is replaced by the one that this library uses.
        tls: TLS context for connections to a server; servers without TLS are refused.

    Raises:
        StoreConfigurationError: The kind of database is not supported, its driver is not installed, or the URL is an
            in-memory SQLite database, which each connection would have its own copy of.
        sqlalchemy.exc.ArgumentError: `url` is not a valid URL.
    """
    parsed = _with_driver(make_url(url))
    kind = parsed.get_backend_name()
    try:
        if kind == "sqlite":
            return sqlite_engine(parsed, pool_size, lock_timeout_seconds)
        create = mysql_engine if kind == "mysql" else postgresql_engine
        return create(parsed, pool_size, lock_timeout_seconds, pool_timeout_seconds, tls)
    except ModuleNotFoundError as error:
        raise StoreConfigurationError("start", needing(kind, error)) from error


def _with_driver(url: URL) -> URL:
    # The scheme may lack a driver, or name the driver of another program.
    name = url.get_backend_name()
    dialect = dialect_of({"postgres": "postgresql"}.get(name, name))
    return url.set(drivername=f"{dialect.name}+{_DRIVERS[dialect.name]}")


def settings_engine(
    settings: MysqlStoreSettings | PostgresqlStoreSettings | SqliteStoreSettings, *, as_it_is: bool = False
) -> AsyncEngine:
    """Create the engine of a store from its settings.

    Args:
        as_it_is: Do not change the SQLite file, such as its journal mode.

    Raises:
        StoreConfigurationError: A TLS file cannot be used, or a driver is not installed.
    """
    if isinstance(settings, SqliteStoreSettings):
        url = URL.create("sqlite", database=settings.path)
        if as_it_is:
            return sqlite_engine(_with_driver(url), 1, settings.lock_timeout_seconds, as_it_is=True)
        return sql_engine(url, lock_timeout_seconds=settings.lock_timeout_seconds)
    password = settings.password
    url = make_url(settings.url)
    if isinstance(settings, MysqlStoreSettings):
        url = url.set(drivername="mysql")
    if settings.username is not None:
        url = url.set(username=settings.username)
    if password is not None:
        url = url.set(password=password.get_secret_value())
    return sql_engine(
        url,
        pool_size=settings.max_connections,
        lock_timeout_seconds=settings.lock_timeout_seconds,
        # Shorter than the timeout of the call, so that the error can name the pool as the cause.
        pool_timeout_seconds=0.8 * settings.timeout_seconds,
        tls=tls_context(settings),
    )


@asynccontextmanager
async def writing(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Open a transaction that is committed at the end of the block, or rolled back on an exception."""
    async with engine.connect() as connection:
        await connection.execution_options(**{BEGINS_TRANSACTION: True})
        async with connection.begin():
            yield connection


@asynccontextmanager
async def autocommit(engine: AsyncEngine, *, reads_only: bool = False) -> AsyncIterator[AsyncConnection]:
    """Open a connection on which each statement commits on its own, without an extra round trip.

    SQLite, and engines not created by `sql_engine`, may run the block in a single transaction instead.
    """
    options: dict[str, Any] = {BEGINS_TRANSACTION: False, READ_ONLY: reads_only}
    if engine.dialect.name == "postgresql":
        options["isolation_level"] = "AUTOCOMMIT"
    async with engine.connect() as connection:
        await connection.execution_options(**options)
        yield connection
        await connection.commit()


@asynccontextmanager
async def reading(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Open a read-only transaction that does not wait for writers."""
    async with engine.connect() as connection:
        await connection.execution_options(**{READ_ONLY: True})
        yield connection
