"""Write the outcome and the outgoing events of a handler in its transaction, before the commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import SessionTransaction

from integr8s_idem.errors import ApplicationError, StoreUnavailableError, TransactionAbortedError
from integr8s_idem.events import Message
from integr8s_idem.records import Completion
from integr8s_idem.stores.sql.dialects import dialect_of
from integr8s_idem.stores.sql.errors import abort_reason, guarded_in_transaction, translate
from integr8s_idem.stores.sql.outbox import SqlOutbox
from integr8s_idem.stores.sql.outbox_rows import put
from integr8s_idem.stores.sql.repository import JoinedSqlRepository, SqlIdempotencyRepository
from integr8s_idem.stores.sql.savepoints import SET_MARK, release_mark
from integr8s_idem.stores.sql.transaction_state import refuse_unbegun, refuse_unbegun_statements


class SqlTransaction:
    """A transaction that the application opened for one handler; contains its outcome and its outgoing events.

    A commit before the outcome is written, or after the handler has failed, is refused, because it would keep the
    handler's writes without an outcome.  An outcome after a rollback is refused, because it would be kept without the
    handler's writes.  A missing commit is reported as an error.
    """

    def __init__(
        self, repository: SqlIdempotencyRepository, outbox: SqlOutbox, held: AsyncSession | AsyncConnection
    ) -> None:
        """Use the current or next transaction of `held`, the session or connection that the handler writes with."""
        self._records = JoinedSqlRepository(repository, held)
        self._held = held
        self._needs_mark = dialect_of(repository.engine.dialect.name).continues_after_abort
        self._outbox = outbox
        self._may_commit = self._committed = self._sent = self._was_rolled_back = False

    async def watch(self) -> None:
        """Start to guard the current transaction, or the ones that begin later.

        Raises:
            ApplicationError: The connection is not open.
        """
        held = self._held
        if isinstance(held, AsyncConnection):
            if held.sync_connection is None:
                raise ApplicationError("the connection of the REQUEST scope is not open: open it in its provider")
            event.listen(held.sync_connection, "begin", self._mark)
            refuse_unbegun_statements(held.sync_connection)
            self._watch(held.sync_connection)
            if held.in_transaction():
                await held.run_sync(self._mark)
        elif held.in_transaction():
            # A query of the provider has begun it.
            await (await held.connection()).run_sync(lambda connection: self._begun(held, None, connection))
        if not isinstance(held, AsyncConnection):
            event.listen(held.sync_session, "after_begin", self._begun)

    async def complete(self, completion: Completion) -> bool:
        """Write the outcome in the transaction.  Return `False` if the reservation has been lost.

        Raises:
            ApplicationError: The transaction is not the one in which the handler started.
        """
        self._refuse_rollback()
        [written] = await self._records.complete([completion])
        if written:
            await self._let_commit()
        return written

    async def remember_nothing(self) -> None:
        """Allow the commit without an outcome, because the run had no reservation.

        Raises:
            ApplicationError: The transaction is not the one in which the handler started.
        """
        self._refuse_rollback()
        await self._let_commit()

    async def _let_commit(self) -> None:
        if self._needs_mark:
            await release_mark(await self._records.connection(), "complete")
        self._may_commit = True

    async def send(self, messages: Sequence[Message]) -> None:
        """Write `messages` to the outbox; a relay publishes them after the commit."""
        async with guarded_in_transaction("send", self._records.engine.dialect.name):
            await put(await self._records.connection(), messages)
        self._sent = True

    def ended(self) -> None:
        """Check the commit.  Call this once the scope has ended without an error.

        Raises:
            ApplicationError: The transaction has not committed, so its writes are lost.
        """
        if self._may_commit and not self._committed:
            raise ApplicationError(
                "the REQUEST scope has ended without committing its transaction: the handler's writes and its outcome "
                "are lost. Commit in the provider of the session, after its yield"
            )
        if self._sent:
            self._outbox.notice()

    def given_up(self, label: str, error: BaseException) -> TransactionAbortedError | None:
        """Return the error to raise instead of `error` if the database aborted the transaction."""
        for part in _parts(error):
            if reason := abort_reason(part):
                return TransactionAbortedError(label, reason)
        return None

    def unanswered_commit(self, error: BaseException) -> str:
        """Return why the database did not answer the commit that ended with `error`; empty if that is not the cause."""
        if self._committed:
            for part in _parts(error):
                if isinstance(part, DBAPIError):
                    failure = translate("commit", part, self._records.engine.dialect.name)
                    return failure.reason if isinstance(failure, StoreUnavailableError) else ""
        return ""

    def _begun(self, session: object, transaction: SessionTransaction | None, connection: Connection) -> None:
        if transaction is not None and transaction.nested:
            return  # a savepoint of the handler; a second mark would replace the first and end with this savepoint
        refuse_unbegun(connection)
        self._watch(connection)
        self._mark(connection)

    def _mark(self, connection: Connection) -> None:
        if self._needs_mark:
            connection.exec_driver_sql(SET_MARK)

    def _watch(self, connection: Connection) -> None:
        if not event.contains(connection, "commit", self._committing):
            event.listen(connection, "commit", self._committing)
            event.listen(connection, "rollback", self._rolling_back)

    def _committing(self, connection: Connection) -> None:
        if not self._may_commit:
            # Otherwise SQLAlchemy would return the connection to the pool with its transaction still open.
            connection.invalidate()
            raise ApplicationError(
                "something tried to commit the transaction of a handler before its outcome was written. Leave the "
                "commit to the provider of the session, and commit there only if its yield returns None"
            )
        self._committed = True

    def _rolling_back(self, connection: Connection) -> None:
        # Not refused here: the scope of a failed handler rolls back as well.
        self._was_rolled_back = True

    def _refuse_rollback(self) -> None:
        if self._was_rolled_back:
            raise ApplicationError(
                "something rolled back the transaction of a handler before its outcome was written, and with it the "
                "handler's writes. To undo a part of them, use a savepoint: `async with session.begin_nested()`. To "
                "undo everything, raise an error"
            )


def _parts(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, its causes, and the members of exception groups, which scopes raise when they end with errors."""
    yield error
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _parts(member)
    if error.__cause__ is not None:
        yield from _parts(error.__cause__)
