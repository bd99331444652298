"""Use savepoints in a transaction of the application to undo a part of it, and to detect that it has ended.

PostgreSQL rejects all statements in an aborted transaction.  MySQL and MariaDB roll it back and run the next statement
in a new transaction, so code that continues would commit only a part of its writes.  CREATE TABLE and other DDL commit
implicitly.  Both cases remove all savepoints, so a missing savepoint reveals them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Protocol

from sqlalchemy import text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncTransaction

from integr8s_idem.errors import ApplicationError, StoreUnavailableError, TransactionAbortedError
from integr8s_idem.stores.sql.commit_listeners import before_commit
from integr8s_idem.stores.sql.driver_cursors import has_not_begun, roll_back
from integr8s_idem.stores.sql.errors import abort_reason, guarded_in_transaction, is_savepoint_missing, translate

SET_MARK: Final = "SAVEPOINT integr8s_idem"
"""Sets the savepoint that marks the start of the transaction."""

_ENDED: Final = (
    "the transaction ended before its outcome was written: the database aborted it and the code continued, or a "
    "statement such as CREATE TABLE committed it. Do not catch errors of the database, and create tables elsewhere"
)

_COMMITTED: Final = (
    "the work tried to commit the transaction before its outcome was written. Leave the commit to the code around "
    "manager.in_transaction, or use a separate session for the work"
)


class Undo(Protocol):
    """Undoes the changes in a transaction since this object was created."""

    async def undo(self) -> None:
        """Undo the changes.

        Raises:
            DBAPIError: The database refuses.
        """
        ...

    async def end(self) -> None:
        """Keep the changes.

        Raises:
            DBAPIError: The transaction has ended.
        """
        ...


class _Savepoint:
    def __init__(self, nested: AsyncTransaction) -> None:
        self._nested = nested
        self._undone = False

    async def undo(self) -> None:
        self._undone = True
        if self._nested.is_active:
            await self._nested.rollback()

    async def end(self) -> None:
        if not self._undone:
            await self._nested.commit()


class _WholeTransaction:
    """Undoes a transaction without earlier statements by rolling back all of it, which saves a savepoint.

    SQLAlchemy's asyncpg driver sends BEGIN with the first statement, and again with the first one after a ROLLBACK.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._transaction = connection.get_transaction()

    async def undo(self) -> None:
        transaction, connection = self._transaction, self._connection
        if transaction is not None and transaction.is_active and connection.get_transaction() is transaction:
            await roll_back(connection)

    async def end(self) -> None:
        """Do nothing, because there is no savepoint to release."""


async def _make_undo(connection: AsyncConnection) -> Undo:
    return _WholeTransaction(connection) if has_not_begun(connection) else _Savepoint(await connection.begin_nested())


@asynccontextmanager
async def undo_on_error(connection: AsyncConnection, operation: str) -> AsyncIterator[Undo]:
    """Undo the changes of the block if it raises an exception; the transaction continues.

    Raises:
        TransactionAbortedError: The database aborted the transaction.
        ApplicationError: The transaction ended within the block, but the block continued.
        Exception: Any other exception of the block, unchanged.
    """
    async with guarded_in_transaction(operation, connection.dialect.name):
        undoable = await _make_undo(connection)
    try:
        yield undoable
    except BaseException as error:
        await undo(undoable, operation, error, connection.dialect.name)
        if reason := abort_reason(error):
            raise TransactionAbortedError(operation, reason) from error
        raise
    async with guarded_in_transaction(operation, connection.dialect.name), _reporting_ended_transaction():
        await undoable.end()


@asynccontextmanager
async def forbid_commit(connection: AsyncConnection) -> AsyncIterator[None]:
    """Refuse commits within the block, because they would keep its writes without an outcome.

    Raises:
        ApplicationError: The block tried to commit.  The transaction is rolled back and its connection closed.
        Exception: Any other exception of the block, unchanged.
    """
    refused: list[ApplicationError] = []

    def refuse(committing: Connection) -> None:
        committing.invalidate()
        refused.append(ApplicationError(_COMMITTED))
        raise refused[0]

    sync_connection = connection.sync_connection
    assert sync_connection is not None
    try:
        with before_commit(sync_connection, refuse):
            yield
    except Exception as error:
        if refused and error is not refused[0]:
            raise refused[0] from error
        raise
    if refused:
        raise refused[0]


async def release_mark(connection: AsyncConnection, operation: str) -> None:
    """Release the savepoint that marks the start of the transaction.

    Raises:
        ApplicationError: The savepoint does not exist, because the transaction is another one.
    """
    async with guarded_in_transaction(operation, connection.dialect.name), _reporting_ended_transaction():
        await connection.execute(text(f"RELEASE {SET_MARK}"))


@asynccontextmanager
async def _reporting_ended_transaction() -> AsyncIterator[None]:
    try:
        yield
    except DBAPIError as error:
        if is_savepoint_missing(error):
            raise ApplicationError(_ENDED) from error
        raise


async def undo(undoable: Undo, operation: str, error: BaseException, kind: str) -> None:
    """Undo changes because of `error`.

    Raises:
        TransactionAbortedError: The database rolled back the whole transaction.
        StoreError: The changes could not be undone.
    """
    try:
        await undoable.undo()
    except DBAPIError as failed:
        if not isinstance(error, Exception) or isinstance(error, TransactionAbortedError):
            return  # the caller raises `error`
        if reason := _rollback_reason(error, failed):
            raise TransactionAbortedError(operation, reason) from error
        raise translate(operation, failed, kind) from error


def _rollback_reason(error: Exception, failed: DBAPIError) -> str:
    """Return why the transaction was rolled back; empty if it may still exist, such as after a lost connection."""
    if is_savepoint_missing(failed) and isinstance(error, StoreUnavailableError):
        return error.reason  # innodb_rollback_on_timeout
    return abort_reason(error) or abort_reason(failed)
