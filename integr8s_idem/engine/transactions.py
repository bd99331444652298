"""Outcomes that are written and committed in a transaction of the application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from integr8s_idem.engine.leases import HeldLease
from integr8s_idem.engine.store_client import StoreClient
from integr8s_idem.engine.work import Attempt, Executed, Transaction, Work
from integr8s_idem.errors import StoreError, StoreUnavailableError
from integr8s_idem.events import Message
from integr8s_idem.records import Reserved, Verdict
from integr8s_idem.stores import JoinedRepository

T = TypeVar("T")


class UnknownCommitError(StoreUnavailableError):
    """The database did not answer the COMMIT of a handler's transaction, which has committed, or has not.

    The record of the work shows which, since it is part of the transaction.
    """

    _is_internal = True

    def __init__(self, label: str, reason: str) -> None:
        super().__init__(f"the commit of {label}", reason)
        self.args = (label, reason)


class OutcomeWriter:
    """Writes the outcome of one run in the same transaction as the run's own writes."""

    def __init__(self, store_client: StoreClient, work: Work, lease: HeldLease | None) -> None:
        """`lease`: `None` for a run without a reservation, whose outcome is not recorded."""
        self._client = store_client
        self._work = work
        self._lease = lease
        self.written = False
        self.refused = False
        """Whether the reservation was no longer held by this process, so that the transaction must not commit."""
        self.store_error: StoreError | None = None
        """The error of the store, if it could not write the outcome; not a failure of the run."""

    async def write(self, value: object, messages: Sequence[Message], transaction: Transaction) -> None:
        """Write the result of the run and its outgoing messages.

        Raises:
            LeaseLostError: The reservation is no longer held by this process: roll back.
            StoreError: The store did not answer: roll back.
        """
        try:
            if messages:
                await transaction.send(messages)
            if self._lease is not None:
                await self._complete(value, self._lease.reservation, transaction)
            else:
                await transaction.remember_nothing()
        except StoreError as error:
            self.store_error = error
            raise
        self.written = True

    async def _complete(self, value: object, reserved: Reserved, transaction: Transaction) -> None:
        work = self._work
        if not await transaction.complete(self._client.outcome_of(work, reserved, value)):
            self.refused = True
            raise self._client.lost(work, reserved, "another worker")


async def run_joined(
    store_client: StoreClient, records: JoinedRepository, work: Work, function: Callable[[Attempt], Awaitable[T]]
) -> Executed[T] | Verdict:
    """Reserve, run and complete in a transaction of the caller; everything is rolled back if `function` raises.

    The reservation is not visible to others before it is settled, so no lease is kept and no attempt is counted.
    Concurrent requests for the key wait for the end of the transaction, or get `InProgress`.

    Raises:
        TransactionAbortedError: The database aborted the transaction.
        StoreError: The store did not answer.
        Exception: Any error of `function`, unchanged.
    """
    async with records.savepoint():
        [verdict] = await records.reserve([store_client.request(work)])
        if not isinstance(verdict, Reserved):
            return verdict
        generation = work.key.generation
        attempt = Attempt(verdict.key, verdict.attempt, verdict.fence, float("inf"), work.key.label, generation)
        value = await function(attempt)
        if not (await records.complete([store_client.outcome_of(work, verdict, value)]))[0]:
            raise store_client.lost(work, verdict)
    return Executed(value, verdict.attempt)
