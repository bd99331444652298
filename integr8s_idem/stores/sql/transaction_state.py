"""Check that the database really is in a transaction when SQLAlchemy says so.

By default, the driver of SQLite begins a transaction only at the first INSERT, UPDATE or DELETE, and SQLAlchemy does
not know.  A savepoint set before that is then the whole transaction: releasing it commits, and the application cannot
roll back what was written in it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from integr8s_idem.errors import ApplicationError


def refuse_unbegun(connection: Connection) -> None:
    """Check that SQLite is in a transaction.  Call this after SQLAlchemy has begun one on `connection`.

    Raises:
        ApplicationError: SQLite is not in a transaction.
    """
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite" and not driver.in_transaction:
        raise ApplicationError(
            "this SQLite connection is not in a transaction, although its engine says so: the driver begins one only "
            "at the first write, so a rollback would not undo everything. Create the engine with "
            "integr8s_idem.stores.sql.sql_engine, or make it emit BEGIN as SQLAlchemy's documentation of SQLite shows"
        )


def refuse_unbegun_statements(connection: Connection) -> None:
    """Refuse each statement that `connection` executes outside a transaction, without beginning one."""

    def check(checked: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        # Connections are notified of a new transaction before their engine, whose listener may emit BEGIN.
        if not statement.upper().startswith("BEGIN"):
            refuse_unbegun(checked)

    if connection.dialect.name == "sqlite":
        event.listen(connection, "before_cursor_execute", check)


async def ensure_begun(connection: AsyncConnection, sync_connection: Connection) -> None:
    """Begin a transaction on `connection` unless it is in one, and check it.

    Args:
        sync_connection: The connection that `connection` wraps.

    Raises:
        ApplicationError: SQLite is not in a transaction.
    """
    if not sync_connection.in_transaction():
        await connection.begin()
    if sync_connection.dialect.name == "sqlite":
        await connection.run_sync(refuse_unbegun)
