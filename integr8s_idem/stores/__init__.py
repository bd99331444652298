"""The protocols that stores implement.  Importing this module imports no driver."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from integr8s_idem.records import (
    Completion,
    Corrupt,
    Database,
    Failure,
    IdempotencyRecord,
    Reserved,
    ReserveRequest,
    StoreHealth,
    Verdict,
)

__all__ = [
    "NO_DELAY",
    "DatabaseStore",
    "IdempotencyRepository",
    "JoinedRepository",
    "JoiningRepository",
    "PurgeSupport",
    "RecordAdmin",
    "Surveyed",
]

NO_DELAY: Final = timedelta(0)
"""A delay that does not schedule work: the next attempt may begin now."""


@runtime_checkable
class IdempotencyRepository(Protocol):
    """A store of idempotency records.

    Every method performs one atomic step per key in the backend; no implementation reads a record
    and writes it in a second step.  Answers are in the order of the arguments.  If a key occurs
    twice in one call, the answers are those of two separate calls.  Times are from the store's own
    clock, read once per call.  Every write can safely be repeated if its answer was lost.

    `integr8s_idem.testing.contract` tests implementations of this protocol.

    Raises (all methods):
        StoreUnavailableError: No usable answer; the call may or may not have been executed.
        StoreConfigurationError: The store permanently refuses the call.
    """

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        """Request to do some work, and return a verdict for each request.

        If several callers request the same key at the same time, exactly one gets `Reserved`.  A
        record whose lease has ended is taken over: attempt + 1, a higher fence, the new token.
        A call repeated with the same token finds its own reservation, and renews its lease.
        """
        ...

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        """Extend leases to end `lease` from now, and return whether each was renewed.

        `False` means that the reservation was taken over, settled or released, or its record is gone.
        """
        ...

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        """Store outcomes, and return whether each was stored.

        `False` means that another owner took the key over, or the record is gone.  A reservation whose lease has
        ended can still be completed if it was not taken over.
        """
        ...

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        """Store that the work of each reservation failed permanently; the answers are as for `complete`."""
        ...

    async def release(
        self, reservations: Sequence[Reserved], *, delay: timedelta = NO_DELAY, retention: timedelta = NO_DELAY
    ) -> list[bool]:
        """End the lease of each reservation now, keeping its number of attempts; the answers are as for `complete`.

        With a delay, the work is scheduled instead: nobody holds the key, and `reserve` answers `Scheduled` until the
        delay has passed.  A call that is repeated, because its answer was lost, does not schedule the work anew.

        Args:
            reservations: What to release.
            delay: How long nobody may reserve the keys, by the store's clock; zero to end the leases only.
            retention: How long the records are kept after the delay, at least, so that attempts are counted.
        """
        ...

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        """Read the record of each key, or `None` if it has no record.

        Raises:
            CorruptRecordError: A record cannot be read.
        """
        ...

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete records regardless of their state, and return how many existed."""
        ...

    def scan(self, prefix: str) -> AsyncIterator[IdempotencyRecord]:
        """Yield every readable record whose key starts with `prefix`, in any order, without blocking the store."""
        ...

    async def count_active(self, prefix: str) -> int:
        """Return how many records whose key starts with `prefix` have a lease now, including scheduled work."""
        ...

    async def ping(self) -> StoreHealth:
        """Check that the store works, and report settings that may lose records.

        It fails if the other methods would fail, for example if the store is read-only or the user lacks a
        permission.  `StoreHealth.identity`, if set, changes when the store has lost its data.
        """
        ...


class JoinedRepository(IdempotencyRepository, Protocol):
    """A store that writes within a transaction of the application, which the application commits.

    Raises (all methods): TransactionAbortedError: The database rolled the transaction back; retry it.
    """

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """Roll back the block if it raises an exception, and continue the transaction.

        Raises:
            ApplicationError: The block tried to commit; the whole transaction is rolled back.
        """
        ...


@runtime_checkable
class JoiningRepository(IdempotencyRepository, Protocol):
    """A store in the database of the application."""

    def joined(self, held: Any) -> JoinedRepository:
        """Return a store that works within the transaction of `held`, a session or a connection."""
        ...


@runtime_checkable
class DatabaseStore(Protocol):
    """Optional protocol of stores in a database, whose calls are measured (`db_client_operation_duration_seconds`)."""

    @property
    def database(self) -> Database:
        """The database.  Details may become known with the first connection."""
        ...


@runtime_checkable
class PurgeSupport(Protocol):
    """Optional protocol of stores whose backend does not delete expired records.

    A worker calls `purge` about every `purge_every`, in the background, until a call deletes fewer than `most` records.
    """

    @property
    def purge_every(self) -> timedelta:
        """Interval between purges; zero disables them."""
        ...

    async def purge(self, most: int = 500) -> int:
        """Delete up to `most` records that have expired by the store's clock, and return how many were deleted.

        It raises the same errors as `IdempotencyRepository`.
        """
        ...


class Surveyed(NamedTuple):
    """A page of a survey."""

    found: Sequence[IdempotencyRecord | Corrupt]
    passed: int
    """About how many keys the store scanned for this page."""


@runtime_checkable
class RecordAdmin(Protocol):
    """Optional protocol for administration, used by `integr8s-idem keys`.

    Operators have no token, so records are identified by their state when they were read: one atomic step per key
    changes the record if status, fence and, while processing, the end of its lease are unchanged.  A record
    that was renewed, settled or taken over in the meantime is not changed.

    Raises (all methods): The same errors as `IdempotencyRepository`.
    """

    def survey(self, prefix: str, holding: Sequence[str] = ()) -> AsyncIterator[Surveyed]:
        """Yield pages of records in no particular order, including records that cannot be read.

        Args:
            prefix: Prefix of their keys.
            holding: Parts that occur after the prefix, in this order.  The store filters by them, and may return
                additional records if it ignores the order.
        """
        ...

    async def size(self) -> int | None:
        """Return about how many keys a survey scans; `None` if counting them would take long."""
        ...

    async def end_leases(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        """End the leases of records now, like `release`, and return whether each was ended.

        `False` means that the record has changed.
        """
        ...

    async def forget(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        """Delete records, and return whether each was deleted.  `False` means that the record has changed."""
        ...
