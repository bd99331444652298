"""Create engines for database servers: PostgreSQL, and MySQL or MariaDB."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy.engine import URL, Connection
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from integr8s_idem.stores.sql.begin_hook import call_at_begin
from integr8s_idem.stores.sql.idle_connections import ping_idle_connections
from integr8s_idem.stores.sql.tls import refuse_plain

CONNECT_TIMEOUT_SECONDS: Final = 10.0
"""Limit for servers that accept a connection and then do not respond."""


BEGINS_TRANSACTION: Final = "integr8s_idem_begins"
"""Execution option of the store's connections: whether to open a transaction or use autocommit."""


def postgresql_engine(
    url: str | URL,
    pool_size: int,
    lock_timeout_seconds: float,
    pool_timeout_seconds: float,
    tls: ssl.SSLContext | None,
) -> AsyncEngine:
    server_settings = {
        # In whole milliseconds; 0 would mean no limit.
        "lock_timeout": str(max(1, math.ceil(lock_timeout_seconds * 1000))),
        # Also applies to statements outside a transaction.
        "default_transaction_isolation": "read committed",
        # A plan cached while the table was empty would scan the whole table for each row until the next ANALYZE.
        "plan_cache_mode": "force_custom_plan",
    }
    engine = create_async_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=pool_timeout_seconds,
        isolation_level="READ COMMITTED",
        connect_args={"server_settings": server_settings, **_tls_arguments(tls)},
    )
    ping_idle_connections(engine, lambda driver: driver.is_closed())
    return engine


def mysql_engine(
    url: str | URL,
    pool_size: int,
    lock_timeout_seconds: float,
    pool_timeout_seconds: float,
    tls: ssl.SSLContext | None,
) -> AsyncEngine:
    """Create an engine whose connections use autocommit outside transactions, which saves the COMMITs."""
    engine = create_async_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=pool_timeout_seconds,
        # At REPEATABLE READ, the default, a lookup of a missing key also locks its neighbors.
        isolation_level="READ COMMITTED",
        connect_args={
            "charset": "utf8mb4",
            "init_command": _init_command(lock_timeout_seconds),
            "async_creator_fn": _connect,
            **_tls_arguments(tls),
        },
    )

    def _begin(connection: Connection) -> None:
        begins = connection.get_execution_options().get(BEGINS_TRANSACTION, None)
        # Application code may continue after the database ended its transaction early; those statements must not
        # commit on their own.
        autocommit = begins is not None
        driver: Any = connection.connection.driver_connection
        if driver.get_autocommit() != autocommit:
            connection.exec_driver_sql(f"SET autocommit = {int(autocommit)}")
        if begins:
            connection.exec_driver_sql("BEGIN")

    call_at_begin(engine, _begin)
    dialect: Any = engine.dialect
    dialect.do_commit, dialect.do_rollback = _if_open(dialect.do_commit), _if_open(dialect.do_rollback)
    ping_idle_connections(engine, _is_closed)
    return engine


def _tls_arguments(tls: ssl.SSLContext | None) -> dict[str, Any]:
    return {} if tls is None else {"ssl": tls}


def _if_open(end: Callable[[Any], None]) -> Callable[[Any], None]:
    """Send COMMIT or ROLLBACK only if a transaction may be open."""

    def _end(connection: Any) -> None:
        driver = connection.driver_connection
        if driver.get_transaction_status() or not driver.get_autocommit():
            end(connection)

    return _end


async def _connect(**options: Any) -> Any:
    """Connect, and close the connection if the caller was cancelled meanwhile.

    aiomysql leaks its socket when it is cancelled while connecting, so the attempt always runs to its end.
    """
    import aiomysql

    connecting = asyncio.ensure_future(asyncio.wait_for(aiomysql.connect(**options), CONNECT_TIMEOUT_SECONDS))
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


def _is_closed(driver: Any) -> bool:
    # As aiomysql's own pool does; there is no public API.
    return bool(driver.closed or driver._reader.eof_received or driver._reader.exception())  # noqa: SLF001


def _init_command(lock_timeout_seconds: float) -> str:
    # In whole seconds; 0 means no wait in MariaDB and is invalid in MySQL.
    wait = max(1, math.ceil(lock_timeout_seconds))
    # Other modes truncate long strings with just a warning.
    return f"SET SESSION innodb_lock_wait_timeout = {wait}, SESSION sql_mode = 'TRADITIONAL'"
