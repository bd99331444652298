"""Engines for databases that are servers: PostgreSQL, and MySQL or MariaDB."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.engine import URL, Connection
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from integr8s_idem.stores.sql.idle_connections import look_at_idle
from integr8s_idem.stores.sql.tls import refuse_plain

LONGEST_CONNECT: Final = 10.0
"""Seconds until a server that lets us in without a word is given up."""


BEGINS: Final = "integr8s_idem_begins"
"""Execution option of our own connections: whether there is a transaction, or each statement commits for itself."""


def postgresql_engine(
    url: str | URL,
    pool_size: int,
    lock_timeout_seconds: float,
    pool_timeout_seconds: float,
    tls: ssl.SSLContext | None,
) -> AsyncEngine:
    said_first = {
        # Whole milliseconds; 0 would be no limit.
        "lock_timeout": str(max(1, math.ceil(lock_timeout_seconds * 1000))),
        # Of statements without a transaction, too.
        "default_transaction_isolation": "read committed",
        # A plan made when the table was empty would read all of it for each row, until statistics come round.
        "plan_cache_mode": "force_custom_plan",
    }
    engine = create_async_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=pool_timeout_seconds,
        isolation_level="READ COMMITTED",
        connect_args={"server_settings": said_first, **_wrapped(tls)},
    )
    look_at_idle(engine, lambda driver: driver.is_closed())
    return engine


def mysql_engine(
    url: str | URL,
    pool_size: int,
    lock_timeout_seconds: float,
    pool_timeout_seconds: float,
    tls: ssl.SSLContext | None,
) -> AsyncEngine:
    """Its connections commit by themselves as long as nobody wants a transaction of them, and spare COMMITs so."""
    engine = create_async_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=pool_timeout_seconds,
        # At REPEATABLE READ, which is theirs by default, a key that is not there locks its neighbors.
        isolation_level="READ COMMITTED",
        connect_args={
            "charset": "utf8mb4",
            "init_command": _said_first(lock_timeout_seconds),
            "async_creator_fn": _connected,
            **_wrapped(tls),
        },
    )

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Connection) -> None:
        ours = connection.get_execution_options().get(BEGINS, None)
        # A stranger may go on where the database has ended a transaction early: that must not commit by itself.
        by_itself = ours is not None
        driver: Any = connection.connection.driver_connection
        if driver.get_autocommit() != by_itself:
            connection.exec_driver_sql(f"SET autocommit = {int(by_itself)}")
        if ours:
            connection.exec_driver_sql("BEGIN")

    dialect: Any = engine.dialect
    dialect.do_commit, dialect.do_rollback = _if_open(dialect.do_commit), _if_open(dialect.do_rollback)
    look_at_idle(engine, _has_ended)
    return engine


def _wrapped(tls: ssl.SSLContext | None) -> dict[str, Any]:
    return {} if tls is None else {"ssl": tls}


def _if_open(end: Callable[[Any], None]) -> Callable[[Any], None]:
    """Say COMMIT or ROLLBACK only where a transaction may be open."""

    def _end(connection: Any) -> None:
        driver = connection.driver_connection
        if driver.get_transaction_status() or not driver.get_autocommit():
            end(connection)

    return _end


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


def _has_ended(driver: Any) -> bool:
    # As its own pool looks: it has no other name for this.
    return bool(driver.closed or driver._reader.eof_received or driver._reader.exception())  # noqa: SLF001


def _said_first(lock_timeout_seconds: float) -> str:
    # Whole seconds; 0 would not wait at all in MariaDB, and is none in MySQL.
    wait = max(1, math.ceil(lock_timeout_seconds))
    # Elsewhere a text that is too long is cut with a warning that nobody sees.
    return f"SET SESSION innodb_lock_wait_timeout = {wait}, SESSION sql_mode = 'TRADITIONAL'"
