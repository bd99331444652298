"""Engines for databases that are servers: PostgreSQL, and MySQL or MariaDB."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.engine import URL, Connection
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from integr8s_idem.stores.sql.idle import look_at_idle

LONGEST_CONNECT: Final = 10.0
"""Seconds until a server that lets us in without a word is given up."""


ALONE: Final = "integr8s_idem_alone"
"""Execution option of statements that each are a transaction for themselves."""


def postgresql_engine(url: str | URL, pool_size: int, lock_timeout_seconds: float) -> AsyncEngine:
    said_first = {
        "lock_timeout": str(int(lock_timeout_seconds * 1000)),
        # Of statements without a transaction, too.
        "default_transaction_isolation": "read committed",
    }
    engine = create_async_engine(
        url, pool_size=pool_size, isolation_level="READ COMMITTED", connect_args={"server_settings": said_first}
    )
    look_at_idle(engine, lambda driver: driver.is_closed())
    return engine


def mysql_engine(url: str | URL, pool_size: int, lock_timeout_seconds: float) -> AsyncEngine:
    """Its connections commit by themselves, and transactions are begun in words.

    The other way round, which is the driver's, every statement needs a COMMIT, and the pool says ROLLBACK after that.
    """
    engine = create_async_engine(
        url,
        pool_size=pool_size,
        connect_args={
            "autocommit": True,
            "charset": "utf8mb4",
            "init_command": _said_first(lock_timeout_seconds),
            "async_creator_fn": _connected,
        },
    )

    @event.listens_for(engine.sync_engine, "connect")
    def _prepare(connection: Any, _entry: Any) -> None:
        cursor = connection.cursor()
        # At REPEATABLE READ, which is theirs by default, a key that is not there locks its neighbours.
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Connection) -> None:
        if not connection.get_execution_options().get(ALONE, False):
            connection.exec_driver_sql("BEGIN")

    dialect: Any = engine.dialect
    dialect.do_commit, dialect.do_rollback = _if_begun(dialect.do_commit), _if_begun(dialect.do_rollback)
    look_at_idle(engine, _has_ended)
    return engine


def _if_begun(end: Callable[[Any], None]) -> Callable[[Any], None]:
    """Say COMMIT or ROLLBACK only where the server has told of a transaction, or does not commit by itself."""

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
        return await asyncio.shield(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_close)
        raise


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
