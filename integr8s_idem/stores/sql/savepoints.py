"""Savepoints in a transaction of the application's: they undo a part of it, and show whether it still is the same one.

PostgreSQL refuses everything in a transaction that it has given up.  MySQL and MariaDB roll it back, and take the next
statement as the first of a new one: who goes on would commit a part of what was written.  A table that is made commits
what was written before.  Both take the savepoints away, and by that it shows.
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
"""Set where the transaction begins."""

_ENDED: Final = (
    "the transaction had ended before its outcome was written: the database gave it up and the code went on, or a "
    "statement such as CREATE TABLE committed it. Let errors of the database end the work, and make tables elsewhere"
)

_COMMITTED: Final = (
    "the transaction was to be committed by the work itself, before its outcome was written. Leave the commit to the "
    "code around manager.in_transaction, or let the work have a session of its own"
)


class Undo(Protocol):
    """Takes back what has happened in a transaction since it was made."""

    async def undo(self) -> None:
        """Raises DBAPIError: The database refuses."""
        ...

    async def end(self) -> None:
        """It will not be needed.

        Raises:
            DBAPIError: The transaction has ended meanwhile.
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


class _Whole:
    """Of a transaction in which nothing was said before: to undo that, all of it is rolled back, and it begins anew.

    asyncpg's connections are told of a BEGIN by the first statement, and so once more by the first behind a ROLLBACK.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._transaction = connection.get_transaction()

    async def undo(self) -> None:
        ours, connection = self._transaction, self._connection
        if ours is not None and ours.is_active and connection.get_transaction() is ours:
            await roll_back(connection)

    async def end(self) -> None:
        """Nothing was set that would have to go."""


async def _make_undo(connection: AsyncConnection) -> Undo:
    return _Whole(connection) if has_not_begun(connection) else _Savepoint(await connection.begin_nested())


@asynccontextmanager
async def undo_on_error(connection: AsyncConnection, operation: str) -> AsyncIterator[Undo]:
    """What happens in the block is undone by an exception, and the transaction goes on.

    Raises:
        TransactionAbortedError: The database gave the transaction up.
        ApplicationError: The transaction was ended within the block, and the block went on.
        Exception: Whatever else the block raises, unchanged.
    """
    async with guarded_in_transaction(operation, connection.dialect.name):
        behind = await _make_undo(connection)
    try:
        yield behind
    except BaseException as error:
        await undo(behind, operation, error, connection.dialect.name)
        if said := abort_reason(error):
            raise TransactionAbortedError(operation, said) from error
        raise
    async with guarded_in_transaction(operation, connection.dialect.name), _reporting_ended_transaction():
        await behind.end()


@asynccontextmanager
async def forbid_commit(connection: AsyncConnection) -> AsyncIterator[None]:
    """Within the block nobody commits the transaction: what is written in it would stand without an outcome.

    Raises:
        ApplicationError: Somebody tried to.  The transaction is rolled back, with the connection that it was on.
        Exception: Whatever else the block raises, unchanged.
    """
    told: list[ApplicationError] = []

    def refuse(one: Connection) -> None:
        one.invalidate()
        told.append(ApplicationError(_COMMITTED))
        raise told[0]

    watched = connection.sync_connection
    assert watched is not None
    try:
        with before_commit(watched, refuse):
            yield
    except Exception as error:
        if told and error is not told[0]:
            raise told[0] from error
        raise
    if told:
        raise told[0]


async def release_mark(connection: AsyncConnection, operation: str) -> None:
    """Take the mark away.

    Raises:
        ApplicationError: It is not there: the transaction is not the one that it was set in.
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


async def undo(behind: Undo, operation: str, error: BaseException, kind: str) -> None:
    """Undo it because of `error`.

    Raises:
        TransactionAbortedError: All of the transaction is gone.
        StoreError: It could not be undone.
    """
    try:
        await behind.undo()
    except DBAPIError as failed:
        if not isinstance(error, Exception) or isinstance(error, TransactionAbortedError):
            return  # that is what has to be told
        if said := _why_all_is_gone(error, failed):
            raise TransactionAbortedError(operation, said) from error
        raise translate(operation, failed, kind) from error


def _why_all_is_gone(error: Exception, failed: DBAPIError) -> str:
    """Nothing if it may be there: only the way to it is lost."""
    if is_savepoint_missing(failed) and isinstance(error, StoreUnavailableError):
        return error.reason  # innodb_rollback_on_timeout
    return abort_reason(error) or abort_reason(failed)
