"""Whether a transaction of the application's is one.

The driver of SQLite, left to itself, begins a transaction with the first INSERT, UPDATE or DELETE, behind
SQLAlchemy's back.  A savepoint before that is the whole transaction then: its end commits, and no rollback of the
application's takes back what was written in it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from integr8s_idem.errors import ApplicationError


def refuse_unbegun(connection: Connection) -> None:
    """To be called once SQLAlchemy has begun a transaction on `connection`.

    Raises:
        ApplicationError: SQLite knows of none.
    """
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite" and not driver.in_transaction:
        raise ApplicationError(
            "this SQLite connection is in no transaction, although its engine says so: the driver begins one at the "
            "first write only, and a rollback would not undo all of it. Make the engine by "
            "integr8s_idem.stores.sql.sql_engine, or have it BEGIN as SQLAlchemy's documentation of SQLite shows"
        )


def refuse_unbegun_statements(connection: Connection) -> None:
    """Have each statement refused for which `connection` is in no transaction; none is to be begun for that."""

    def look(one: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        # A connection is told that a transaction begins before its engine is, which may have a BEGIN to say.
        if not statement.upper().startswith("BEGIN"):
            refuse_unbegun(one)

    if connection.dialect.name == "sqlite":
        event.listen(connection, "before_cursor_execute", look)


async def begun(connection: AsyncConnection) -> None:
    """Begin a transaction on `connection` if it is in none, and look at it.

    Raises:
        ApplicationError: As `refuse_unbegun`.
    """
    if not connection.in_transaction():
        await connection.begin()
    if connection.dialect.name == "sqlite":
        await connection.run_sync(refuse_unbegun)
