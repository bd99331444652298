"""Handlers whose writes, outgoing events and outcome commit together, in the transaction of their Dishka scope."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dishka import AsyncContainer

from integr8s_idem.engine.transactions import UnknownCommitError
from integr8s_idem.errors import ApplicationError
from integr8s_idem.handlers.handler_calls import HandlerCall
from integr8s_idem.integrations.request_scope import scope_of_a_call
from integr8s_idem.stores import IdempotencyRepository

if TYPE_CHECKING:
    from integr8s_idem.stores.sql import SqlOutbox, SqlTransaction


@dataclass(frozen=True, slots=True)
class TransactionScope:
    """The scope of one handler call with its transaction."""

    request: AsyncContainer
    transaction: SqlTransaction
    call: HandlerCall

    async def write_outcome(self, result: object) -> None:
        """Write the outcome in the handler's transaction."""
        assert self.call.before_commit is not None
        await self.call.before_commit(result, self.transaction)


@dataclass(frozen=True, slots=True)
class TransactionResources:
    """Resources shared by the transactional handlers of a container; `None` if its handlers are not transactional."""

    repository: Any = None
    outbox: SqlOutbox | None = None


class Transactions:
    """Makes a transaction for each handler call from the session or connection in its REQUEST scope."""

    def __init__(self, session_type: type) -> None:
        """
        Args:
            session_type: `AsyncSession` or `AsyncConnection`, the type that handlers get from the container.
        """
        from integr8s_idem.stores.sql import SqlTransaction

        self.key = SqlTransaction

        async def make(session: Any, resources: TransactionResources) -> Any:
            assert resources.outbox is not None
            transaction = SqlTransaction(resources.repository, resources.outbox, session)
            await transaction.watch()
            return transaction

        make.__annotations__ = {"session": session_type, "resources": TransactionResources, "return": SqlTransaction}
        make.__qualname__ = (
            f"IdempotentDispatcherProvider(transaction={session_type.__name__})"  # shown in Dishka's errors
        )
        self.make = make

    def open(self, repository: IdempotencyRepository) -> TransactionResources:
        """Open the outbox in the database of the records.

        Raises:
            ApplicationError: The records are not in a SQL database.
        """
        from integr8s_idem.stores.sql import SqlIdempotencyRepository, SqlOutbox

        if not isinstance(repository, SqlIdempotencyRepository):
            raise ApplicationError(
                f"transactional handlers need a SQL store, not {type(repository).__name__}: set [store] kind to the "
                "application's database, or remove transaction=… (pass a sqlite_file to a WorkerHarness)"
            )
        return TransactionResources(repository, SqlOutbox(repository.engine))

    @asynccontextmanager
    async def scope(
        self, opening: AbstractAsyncContextManager[AsyncContainer], call: HandlerCall
    ) -> AsyncIterator[TransactionScope]:
        """Open the REQUEST scope of one call; it commits at the end of the block.

        Raises:
            TransactionAbortedError: The database aborted the transaction.
            UnknownCommitError: The database did not answer the commit.
            ApplicationError: The transaction was not committed.
        """
        failed: BaseException | None = None
        transaction: SqlTransaction | None = None
        try:
            async with scope_of_a_call(opening) as request:
                transaction = await request.get(self.key)
                try:
                    yield TransactionScope(request, transaction, call)
                except BaseException as error:
                    failed = error
                    raise
        except Exception as error:
            if transaction is not None and (aborted := transaction.given_up(call.attempt.label, failed or error)):
                raise aborted from error
            if transaction is not None and failed is None and (reason := transaction.unanswered_commit(error)):
                raise UnknownCommitError(call.attempt.label, reason) from error
            raise
        transaction.ended()
