"""Savepoints in a transaction of the application's: they undo a part of it, and show whether it still is the same one.

PostgreSQL refuses everything in a transaction that it has given up.  MySQL and MariaDB roll it back, and take the next
statement as the first of a new one: who goes on would commit a part of what was written.  A table that is made commits
what was written before.  Both take the savepoints away, and by that it shows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from sqlalchemy import event, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncTransaction

from integr8s_idem.errors import ApplicationError, StoreUnavailableError, TransactionAbortedError
from integr8s_idem.stores.sql.errors import gave_up, joining, savepoint_gone, translated

MARK: Final = "SAVEPOINT integr8s_idem"
"""Set where the transaction begins."""

_ENDED: Final = (
    "the transaction had ended before its outcome was written: the database gave it up and the code went on, or a "
    "statement such as CREATE TABLE committed it. Let errors of the database end the work, and make tables elsewhere"
)

_COMMITTED: Final = (
    "the transaction was to be committed by the work itself, before its outcome was written. Leave the commit to the "
    "code around manager.in_transaction, or let the work have a session of its own"
)


@asynccontextmanager
async def savepoint(connection: AsyncConnection, operation: str) -> AsyncIterator[None]:
    """What happens in the block is undone by an exception, and the transaction goes on.

    Raises:
        TransactionAbortedError: The database gave the transaction up.
        ApplicationError: The transaction was ended within the block, and the block went on.
        Exception: Whatever else the block raises, unchanged.
    """
    async with joining(operation, connection.dialect.name):
        nested = await connection.begin_nested()
    try:
        yield
    except BaseException as error:
        await _undo(nested, operation, error)
        if said := gave_up(error):
            raise TransactionAbortedError(operation, said) from error
        raise
    async with joining(operation, connection.dialect.name), _ended_is_told():
        await nested.commit()


@asynccontextmanager
async def uncommitted(connection: AsyncConnection) -> AsyncIterator[None]:
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
    event.listen(watched, "commit", refuse)
    try:
        yield
    except Exception as error:
        if told and error is not told[0]:
            raise told[0] from error
        raise
    finally:
        event.remove(watched, "commit", refuse)
    if told:
        raise told[0]


async def still_there(connection: AsyncConnection, operation: str) -> None:
    """Take the mark away.

    Raises:
        ApplicationError: It is not there: the transaction is not the one that it was set in.
    """
    async with joining(operation, connection.dialect.name), _ended_is_told():
        await connection.execute(text(f"RELEASE {MARK}"))


@asynccontextmanager
async def _ended_is_told() -> AsyncIterator[None]:
    try:
        yield
    except DBAPIError as error:
        if savepoint_gone(error):
            raise ApplicationError(_ENDED) from error
        raise


async def _undo(nested: AsyncTransaction, operation: str, error: BaseException) -> None:
    """Undo it because of `error`.

    Raises:
        TransactionAbortedError: All of the transaction is gone.
        StoreError: It could not be undone.
    """
    try:
        if nested.is_active:
            await nested.rollback()
    except DBAPIError as failed:
        if not isinstance(error, Exception) or isinstance(error, TransactionAbortedError):
            return  # that is what has to be told
        if said := _why_all_is_gone(error, failed):
            raise TransactionAbortedError(operation, said) from error
        raise translated(operation, failed, nested.connection.dialect.name) from error


def _why_all_is_gone(error: Exception, failed: DBAPIError) -> str:
    """Nothing if it may be there: only the way to it is lost."""
    if savepoint_gone(failed) and isinstance(error, StoreUnavailableError):
        return error.reason  # innodb_rollback_on_timeout
    return gave_up(error) or gave_up(failed)
