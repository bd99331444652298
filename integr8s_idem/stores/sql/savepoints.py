"""Use savepoints in a transaction of the application to undo a part of it, and to detect that it has ended.

PostgreSQL rejects all statements in an aborted transaction.  MySQL and MariaDB roll it back and run the next statement
in a new transaction, so code that continues would commit only a part of its writes.  CREATE TABLE and other DDL commit
implicitly.  Both cases remove all savepoints, so a missing savepoint reveals them.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, Protocol

from sqlalchemy import event, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncTransaction

from integr8s_idem.errors import ApplicationError, StoreError, StoreUnavailableError, TransactionAbortedError
from integr8s_idem.stores.sql.driver_cursors import has_not_begun, roll_back
from integr8s_idem.stores.sql.errors import abort_reason, is_savepoint_missing, translate, translate_in_transaction

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

_COMMIT_METHOD: Final = "_commit_impl"
"""Private method of SQLAlchemy's connections that commits.

With a listener for commits instead, SQLAlchemy would dispatch all its events for each statement.
"""


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

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._transaction = connection.get_transaction()

    async def undo(self) -> None:
        transaction, connection = self._transaction, self._connection
        if connection.invalidated:
            return  # the database has rolled back
        if transaction is not None and transaction.is_active and connection.get_transaction() is transaction:
            await roll_back(connection)

    async def end(self) -> None:
        """Do nothing, because there is no savepoint to release."""


async def _make_undo(connection: AsyncConnection) -> Undo:
    sync_connection = connection.sync_connection
    if sync_connection is not None and has_not_begun(sync_connection):
        return _WholeTransaction(sync_connection)
    return _Savepoint(await connection.begin_nested())


class UndoOnError:
    """Undoes the changes of a block if it raises an exception; the transaction continues.

    Raises:
        TransactionAbortedError: The database aborted the transaction.
        ApplicationError: The transaction ended within the block, but the block continued.
        Exception: Any other exception of the block, unchanged.
    """

    # A class, because every run enters it, and a generator takes several times as long.

    def __init__(self, connection: AsyncConnection, operation: str) -> None:
        self._connection = connection
        self._operation = operation
        self._undo: Undo | None = None

    async def __aenter__(self) -> Undo:
        try:
            self._undo = await _make_undo(self._connection)
        except DBAPIError as error:
            raise translate_in_transaction(self._operation, error, self._connection.dialect.name) from error
        return self._undo

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._undo is not None
        if error is None:
            try:
                await self._undo.end()
            except DBAPIError as failed:
                raise _while_ending(failed, self._operation, self._connection) from failed
            return
        await undo(self._undo, self._operation, error, self._connection.dialect.name)
        if reason := abort_reason(error):
            raise TransactionAbortedError(self._operation, reason) from error


class ForbidCommit:
    """Refuses commits between `start` and `stop`, because they would keep the writes of a run without its outcome.

    After a commit was refused, the transaction is rolled back and its connection closed.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        assert connection.sync_connection is not None
        self._connection = connection.sync_connection
        self._outer: object = None
        self._refused: ApplicationError | None = None

    def start(self) -> None:
        """Start to refuse commits."""
        if not hasattr(Connection, _COMMIT_METHOD):
            event.listen(self._connection, "commit", self._refuse)
            return
        replaced = vars(self._connection)
        self._outer, replaced[_COMMIT_METHOD] = replaced.get(_COMMIT_METHOD), self._refuse

    def stop(self, error: BaseException | None) -> None:
        """Allow commits again.  `error` is the exception that is being raised, if any.

        Raises:
            ApplicationError: The run tried to commit, and `error` is not already the error that says so.
        """
        if not hasattr(Connection, _COMMIT_METHOD):
            event.remove(self._connection, "commit", self._refuse)
        elif self._outer is None:
            del vars(self._connection)[_COMMIT_METHOD]
        else:
            vars(self._connection)[_COMMIT_METHOD] = self._outer
        refused = self._refused
        if refused is not None and error is not refused and (error is None or isinstance(error, Exception)):
            raise refused from error

    def _refuse(self, *_: object) -> None:
        self._connection.invalidate()
        self._refused = self._refused or ApplicationError(_COMMITTED)
        raise self._refused


async def release_mark(connection: AsyncConnection, operation: str) -> None:
    """Release the savepoint that marks the start of the transaction.

    Raises:
        ApplicationError: The savepoint does not exist, because the transaction is another one.
    """
    try:
        await connection.execute(text(f"RELEASE {SET_MARK}"))
    except DBAPIError as error:
        raise _while_ending(error, operation, connection) from error


def _while_ending(
    error: DBAPIError, operation: str, connection: AsyncConnection
) -> ApplicationError | StoreError | TransactionAbortedError:
    """Translate an error of the statement that releases a savepoint."""
    if is_savepoint_missing(error):
        return ApplicationError(_ENDED)
    return translate_in_transaction(operation, error, connection.dialect.name)


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
