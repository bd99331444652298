"""A handler's transaction, as it gets an outcome and outgoing events before it commits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import SessionTransaction

from integr8s_idem.errors import ApplicationError, TransactionAbortedError
from integr8s_idem.events import Message
from integr8s_idem.records import Completion
from integr8s_idem.stores.sql.dialects import dialect_of
from integr8s_idem.stores.sql.errors import gave_up, joining
from integr8s_idem.stores.sql.outbox import SqlOutbox, put
from integr8s_idem.stores.sql.repository import JoinedSqlRepository, SqlIdempotencyRepository
from integr8s_idem.stores.sql.savepoints import MARK, still_there
from integr8s_idem.stores.sql.transaction_state import refuse_unbegun, refuse_unbegun_statements


class SqlTransaction:
    """A transaction that the application opened for one handler: gets its outcome and its outgoing events.

    It watches over the commit.  One that comes before the outcome is written, or after the handler has failed,
    would let its writes stand without an outcome: it is refused.  One that never comes is told.
    """

    def __init__(
        self, repository: SqlIdempotencyRepository, waiting: SqlOutbox, held: AsyncSession | AsyncConnection
    ) -> None:
        """`held`: what the handler writes by; the transaction is the one that it is in, or will begin."""
        self._records = JoinedSqlRepository(repository, held)
        self._held = held
        self._marks = dialect_of(repository.engine.dialect.name).goes_on
        self._waiting = waiting
        self._may_commit = self._committed = self._sent = False

    async def watch(self) -> None:
        """Watch over the transaction from here on: the one that is under way, or those that will begin.

        Raises:
            ApplicationError: The connection is not open.
        """
        held = self._held
        if isinstance(held, AsyncConnection):
            if held.sync_connection is None:
                raise ApplicationError("the connection of the REQUEST scope is not open: enter it in its provider")
            event.listen(held.sync_connection, "begin", self._mark)
            refuse_unbegun_statements(held.sync_connection)
            self._watch(held.sync_connection)
            if held.in_transaction():
                await held.run_sync(self._mark)
        elif held.in_transaction():
            # What the provider has asked the database has begun it.
            await (await held.connection()).run_sync(lambda connection: self._begun(held, None, connection))
        if not isinstance(held, AsyncConnection):
            event.listen(held.sync_session, "after_begin", self._begun)

    async def complete(self, completion: Completion) -> bool:
        """Remember the outcome, if the transaction commits.  `False`: the reservation is no longer ours.

        Raises:
            ApplicationError: The transaction is not the one that the handler began in.
        """
        [written] = await self._records.complete([completion])
        if written:
            await self._let_commit()
        return written

    async def remember_nothing(self) -> None:
        """Let it commit without an outcome: the run had no reservation.

        Raises:
            ApplicationError: The transaction is not the one that the handler began in.
        """
        await self._let_commit()

    async def _let_commit(self) -> None:
        if self._marks:
            await still_there(await self._records.connection(), "complete")
        self._may_commit = True

    async def send(self, messages: Sequence[Message]) -> None:
        """Have `messages` published by a relay, if the transaction commits."""
        async with joining("send", self._records.engine.dialect.name):
            await put(await self._records.connection(), messages)
        self._sent = True

    def ended(self) -> None:
        """To be called once the scope has ended without an error.

        Raises:
            ApplicationError: It has not committed: nothing was kept.
        """
        if self._may_commit and not self._committed:
            raise ApplicationError(
                "the REQUEST scope has ended without committing its transaction: what the handler wrote is lost, "
                "and so is its outcome. Commit in the provider of the session, behind its yield"
            )
        if self._sent:
            self._waiting.notice()

    def given_up(self, label: str, error: BaseException) -> TransactionAbortedError | None:
        """What to raise instead of `error`, if the database has given the transaction up."""
        for one in _parts(error):
            if said := gave_up(one):
                return TransactionAbortedError(label, said)
        return None

    def _begun(self, session: object, transaction: SessionTransaction | None, connection: Connection) -> None:
        if transaction is not None and transaction.nested:
            return  # a savepoint of the handler's: a second mark would take the place of the first, and go with it
        refuse_unbegun(connection)
        self._watch(connection)
        self._mark(connection)

    def _mark(self, connection: Connection) -> None:
        if self._marks:
            connection.exec_driver_sql(MARK)

    def _watch(self, connection: Connection) -> None:
        if not event.contains(connection, "commit", self._committing):
            event.listen(connection, "commit", self._committing)

    def _committing(self, connection: Connection) -> None:
        if not self._may_commit:
            # SQLAlchemy would give the connection to the next one with the transaction still open.
            connection.invalidate()
            raise ApplicationError(
                "the transaction of a handler was to be committed before its outcome was written. Leave the commit "
                "to the provider of the session, and let that commit only if its yield returns None"
            )
        self._committed = True


def _parts(error: BaseException) -> Iterator[BaseException]:
    """`error`, and what it was made of: a scope that ends with errors tells of them as a group."""
    yield error
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _parts(one)
    if error.__cause__ is not None:
        yield from _parts(error.__cause__)
