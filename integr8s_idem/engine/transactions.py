"""Outcomes that are written inside a transaction of the application's, to commit with it or not at all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from integr8s_idem.engine.store_client import StoreClient
from integr8s_idem.engine.work import Attempt, Executed, Transaction, Work
from integr8s_idem.errors import StoreError
from integr8s_idem.events import Message
from integr8s_idem.records import Reserved, Verdict
from integr8s_idem.stores import JoinedRepository

T = TypeVar("T")


class OutcomeWriter:
    """Writes the outcome of one run beside what the run has written, before both commit."""

    def __init__(self, store_client: StoreClient, work: Work) -> None:
        self._client = store_client
        self._work = work
        self.reserved: Reserved | None = None
        """`None` for a run without a reservation, of which nothing is remembered."""
        self.written = False
        self.refused = False
        """The reservation was no longer ours: the transaction must not commit."""
        self.store_error: StoreError | None = None
        """The store could not take it; that is no failure of the run."""

    async def write(self, value: object, messages: Sequence[Message], transaction: Transaction) -> None:
        """Write that the run has returned `value`, and what it wants to have sent.

        Raises:
            LeaseLostError: The reservation is no longer ours: roll back.
            StoreError: As for every verb: roll back.
        """
        try:
            if messages:
                await transaction.send(messages)
            if self.reserved is not None:
                await self._complete(value, self.reserved, transaction)
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
    """Reserve, run and complete in one transaction of the caller's; nothing of it stays if `function` raises.

    Nobody else sees the reservation before it is settled, so no lease is kept and no attempt is counted: others
    who ask for the key wait for the transaction's end, or are told that it is in progress.

    Raises:
        TransactionAbortedError: The database gave the transaction up.
        StoreError: As for every verb.
        Exception: Whatever `function` raises, unchanged.
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
