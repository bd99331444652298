"""Engines that are fit for records, and transactions of our own."""

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
from integr8s_idem.stores.sql.server_engines import BEGINS, mysql_engine, postgresql_engine
from integr8s_idem.stores.sql.sqlite_engine import READS_ONLY, sqlite_engine
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
    """An engine whose transactions are as records need them.

    PostgreSQL: READ COMMITTED, a bounded wait for locked rows, `pool_size` connections at most (who wants another
    waits `pool_timeout_seconds` for one), and those that lay idle looked at before use.
    MySQL and MariaDB: the same, and strict about values that do not fit.
    SQLite: write-ahead log, synchronous = FULL (a power loss takes nothing), a writing transaction waits for
    its turn at its start instead of failing in its middle, and those of one process have theirs in the order in
    which they asked.

    Args:
        url: As in the settings; it need name no driver, and the one that it names gives way to ours.
        tls: What connections to a server are wrapped in; a server that has none is not talked to.

    Raises:
        StoreConfigurationError: A kind of database that is no store, or whose driver is not installed; a SQLite
            database in memory, of which each connection would have its own.
        sqlalchemy.exc.ArgumentError: `url` is none.
    """
    ours = _with_our_driver(make_url(url))
    kind = ours.get_backend_name()
    try:
        if kind == "sqlite":
            return sqlite_engine(ours, pool_size, lock_timeout_seconds)
        make = mysql_engine if kind == "mysql" else postgresql_engine
        return make(ours, pool_size, lock_timeout_seconds, pool_timeout_seconds, tls)
    except ModuleNotFoundError as error:
        raise StoreConfigurationError("start", needing(kind, error)) from error


def _with_our_driver(url: URL) -> URL:
    # A scheme names no driver, or the one of another program.
    name = url.get_backend_name()
    dialect = dialect_of({"postgres": "postgresql"}.get(name, name))
    return url.set(drivername=f"{dialect.name}+{_DRIVERS[dialect.name]}")


def settings_engine(
    settings: MysqlStoreSettings | PostgresqlStoreSettings | SqliteStoreSettings, *, as_it_is: bool = False
) -> AsyncEngine:
    """The engine of a store, by its section of the settings.

    Args:
        as_it_is: Set nothing that stays in a file.

    Raises:
        StoreConfigurationError: A file for TLS cannot be used, or a driver is not installed.
    """
    if isinstance(settings, SqliteStoreSettings):
        url = URL.create("sqlite", database=settings.path)
        if as_it_is:
            return sqlite_engine(_with_our_driver(url), 1, settings.lock_timeout_seconds, as_it_is=True)
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
        # Before the call is given up, so that its error can say what it waited for.
        pool_timeout_seconds=0.8 * settings.timeout_seconds,
        tls=tls_context(settings),
    )


@asynccontextmanager
async def writing(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A transaction of our own: committed at the end of the block, rolled back by any exception."""
    async with engine.connect() as connection:
        await connection.execution_options(**{BEGINS: True})
        async with connection.begin():
            yield connection


@asynccontextmanager
async def alone(engine: AsyncEngine, *, reads_only: bool = False) -> AsyncIterator[AsyncConnection]:
    """Statements that need no transaction: each commits for itself, without a round trip for that.

    In SQLite, and on an engine that is not of `sql_engine`'s making, it may be one for all of them.
    """
    options: dict[str, Any] = {BEGINS: False, READS_ONLY: reads_only}
    if engine.dialect.name == "postgresql":
        options["isolation_level"] = "AUTOCOMMIT"
    async with engine.connect() as connection:
        await connection.execution_options(**options)
        yield connection
        await connection.commit()


@asynccontextmanager
async def reading(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A snapshot to read from.  Waits for no writer."""
    async with engine.connect() as connection:
        await connection.execution_options(**{READS_ONLY: True})
        yield connection
