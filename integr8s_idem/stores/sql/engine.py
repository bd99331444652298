"""Engines that are fit for records, and transactions of our own."""

from __future__ import annotations

import asyncio
import math
import os
import sqlite3
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from integr8s_idem.config import MysqlStoreSettings, PostgresqlStoreSettings, SqliteStoreSettings
from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.stores.sql.tls import refuse_plain, tls_context

_READS_ONLY: Final = "integr8s_idem_reads_only"
"""Execution option of a transaction that will not write: in SQLite it waits for no writer."""

_WAL_TRIES: Final = 100

_TURN: Final = "integr8s_idem_turn"
"""Where a connection keeps the lock that it holds."""

_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, defaultdict[str, asyncio.Lock]] = WeakKeyDictionary()
"""One for each SQLite file.  SQLite's own waiting is unfair: a writer of this process would starve among its
siblings, and time out although each of them takes a moment only."""

LONGEST_CONNECT: Final = 10.0
"""Seconds until a server that lets us in without a word is given up."""


def sql_engine(
    url: str | URL, *, pool_size: int = 8, lock_timeout_seconds: float = 2.0, tls: ssl.SSLContext | None = None
) -> AsyncEngine:
    """An engine whose transactions are as records need them.

    PostgreSQL: READ COMMITTED, connections looked at before use, a bounded wait for locked rows.
    MySQL and MariaDB: the same, and strict about values that do not fit.
    SQLite: write-ahead log, synchronous = FULL (a power loss takes nothing), a writing transaction waits for
    its turn at its start instead of failing in its middle, and those of one process have theirs in the order in
    which they asked.

    Args:
        tls: What connections to a server are wrapped in; a server that has none is not talked to.

    Raises:
        StoreConfigurationError: A SQLite database in memory, of which each connection would have its own.
        sqlalchemy.exc.ArgumentError: `url` is none.
    """
    backend = make_url(url).get_backend_name()
    if backend == "sqlite":
        return _sqlite_engine(url, pool_size, lock_timeout_seconds)
    if backend in {"mysql", "mariadb"}:
        return _mysql_engine(url, pool_size, lock_timeout_seconds, tls)
    return create_async_engine(
        url,
        pool_size=pool_size,
        pool_pre_ping=True,
        isolation_level="READ COMMITTED",
        connect_args={
            "server_settings": {"lock_timeout": str(int(lock_timeout_seconds * 1000))},
            **({"ssl": tls} if tls is not None else {}),
        },
    )


def settings_engine(settings: MysqlStoreSettings | PostgresqlStoreSettings | SqliteStoreSettings) -> AsyncEngine:
    """The engine of a store, by its section of the settings.

    Raises:
        StoreConfigurationError: A file for TLS cannot be used.
    """
    if isinstance(settings, SqliteStoreSettings):
        url = URL.create("sqlite+aiosqlite", database=settings.path)
        return sql_engine(url, lock_timeout_seconds=settings.lock_timeout_seconds)
    password = settings.password
    # Their scheme names no driver, or the one of another program.
    driver = "mysql+aiomysql" if isinstance(settings, MysqlStoreSettings) else "postgresql+asyncpg"
    url = make_url(settings.url).set(drivername=driver)
    if settings.username is not None:
        url = url.set(username=settings.username)
    if password is not None:
        url = url.set(password=password.get_secret_value())
    return sql_engine(
        url,
        pool_size=settings.max_connections,
        lock_timeout_seconds=settings.lock_timeout_seconds,
        tls=tls_context(settings),
    )


@asynccontextmanager
async def writing(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A transaction of our own: committed at the end of the block, rolled back by any exception."""
    async with engine.begin() as connection:
        yield connection


@asynccontextmanager
async def reading(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A snapshot to read from.  Waits for no writer."""
    async with engine.connect() as connection:
        await connection.execution_options(**{_READS_ONLY: True})
        yield connection


def _mysql_engine(
    url: str | URL, pool_size: int, lock_timeout_seconds: float, tls: ssl.SSLContext | None
) -> AsyncEngine:
    return create_async_engine(
        url,
        pool_size=pool_size,
        pool_pre_ping=True,
        # At REPEATABLE READ, which is theirs by default, a key that is not there locks its neighbours.
        isolation_level="READ COMMITTED",
        connect_args={
            "charset": "utf8mb4",
            "init_command": _said_first(lock_timeout_seconds),
            "async_creator_fn": _connected,
            **({"ssl": tls} if tls is not None else {}),
        },
    )


async def _connected(**options: Any) -> Any:
    """aiomysql forgets its socket if we are cancelled half way: so it connects to the end, and is closed then."""
    import aiomysql

    connecting = asyncio.ensure_future(asyncio.wait_for(aiomysql.connect(**options), LONGEST_CONNECT))
    try:
        connection = await asyncio.shield(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_close)
        raise
    if options.get("ssl") is not None:
        refuse_plain(connection)
    return connection


def _close(connecting: asyncio.Future[Any]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


def _said_first(lock_timeout_seconds: float) -> str:
    # Whole seconds; 0 would not wait at all in MariaDB, and is none in MySQL.
    wait = max(1, math.ceil(lock_timeout_seconds))
    # Elsewhere a text that is too long is cut with a warning that nobody sees.
    return f"SET SESSION innodb_lock_wait_timeout = {wait}, SESSION sql_mode = 'TRADITIONAL'"


def _sqlite_engine(url: str | URL, pool_size: int, lock_timeout_seconds: float) -> AsyncEngine:
    _refuse_memory(make_url(url))
    arguments = {"timeout": lock_timeout_seconds, "factory": _Connection}
    engine = create_async_engine(url, pool_size=pool_size, connect_args=arguments)
    file = os.path.realpath(str(make_url(url).database))

    @event.listens_for(engine.sync_engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        # The driver begins transactions late and behind our back; with None it leaves them to us.
        connection.isolation_level = None
        cursor = connection.cursor()
        _switch_to_wal(connection, cursor)
        for pragma in ("synchronous = FULL", "foreign_keys = ON"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get(_READS_ONLY, False):
            connection.exec_driver_sql("BEGIN")
            return
        driver: Any = connection.connection.dbapi_connection
        turns = _turns.setdefault(asyncio.get_running_loop(), defaultdict(asyncio.Lock))[file]
        driver.run_async(lambda _: turns.acquire())
        info = connection.info
        info[_TURN] = turns
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        except BaseException:
            _end_turn(info)
            raise

    for ending in ("commit", "rollback"):
        # Just before it ends: SQLite itself holds the next one back for that moment.
        event.listen(engine.sync_engine, ending, _end_turn_of)
    event.listen(engine.sync_engine, "checkin", lambda _, record: _end_turn(record.info))
    event.listen(engine.sync_engine, "invalidate", lambda _, record, error: _end_turn(record.info))
    return engine


def _refuse_memory(url: URL) -> None:
    if url.database in {None, "", ":memory:"} or "mode=memory" in str(url):
        raise StoreConfigurationError(
            "start",
            "each connection has a SQLite memory of its own: give a file, or use MemoryIdempotencyRepository",
        )


def _switch_to_wal(connection: Any, cursor: Any) -> None:
    # The mode stays in the file.  Of two processes that switch at once, one is refused without waiting.
    for attempt in range(1, _WAL_TRIES + 1):
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            if attempt == _WAL_TRIES:
                raise
            connection.run_async(lambda _: asyncio.sleep(0.05))
        else:
            return


def _end_turn_of(connection: Connection) -> None:
    # One that was cut short has lost its driver's connection, and its turn with that.  To ask it for either would
    # raise, in place of what has cut it short.
    if not connection.invalidated:
        _end_turn(connection.info)


def _end_turn(info: MutableMapping[Any, Any]) -> None:
    """Let the next writer of this process begin, if it was the turn of the connection that this belongs to."""
    turns = info.pop(_TURN, None)
    if turns is not None:
        turns.release()


class _Connection(sqlite3.Connection):
    """Holds no lock once it is closed."""

    _open = True

    def close(self) -> None:
        # SQLite keeps a transaction for as long as one of its statements is under way, and so is one that was cut
        # short, until the garbage collector comes by: whoever keeps the exception keeps the file locked.
        try:
            if self._open:  # a second close is nobody's mistake
                self._open = False
                self.rollback()
        finally:
            super().close()
