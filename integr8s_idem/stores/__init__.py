"""The Protocol that every store keeps.  Importing this imports no driver."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, runtime_checkable

from integr8s_idem.records import (
    Completion,
    Corrupt,
    Failure,
    IdempotencyRecord,
    Reserved,
    ReserveRequest,
    StoreHealth,
    Verdict,
)

__all__ = ["IdempotencyRepository", "JoinedRepository", "JoiningRepository", "PurgeSupport", "RecordAdmin", "Surveyed"]


@runtime_checkable
class IdempotencyRepository(Protocol):
    """Remembers which work was done.

    Every method is one atomic step per key in the backend; no implementation reads, thinks
    and writes.  Answers come in the order of the questions; a key that stands twice in one
    call is answered as two callers would be.  Time is the store's own clock, read once per
    call.  Every write can be repeated after a lost answer without harm.

    `integr8s_idem.testing.contract` holds every implementation to this.

    Raises (all methods):
        StoreUnavailableError: No usable answer; the call may or may not have been executed.
        StoreConfigurationError: The store refuses us, and waiting does not help.
    """

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        """Ask to do some work; a verdict for each request, in their order.

        Of any number of callers that ask for one key at one moment, one gets `Reserved`.  A
        record whose lease has ended is taken over: attempt + 1, a higher fence, the new token.
        A call repeated with the same token finds its own reservation, with a fresh lease.
        """
        ...

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        """Let the leases end `lease` from now; an answer for each, in their order.

        `False`: no longer ours (token, status or record).
        """
        ...

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        """Remember outcomes; an answer for each, in their order.

        `False`: the token is no longer ours, or the record is gone.

        A lease that has ended is no hindrance as long as nobody took the key over.
        """
        ...

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        """Remember that work was given up; answers as those of `complete`, one for each."""
        ...

    async def release(self, reservations: Sequence[Reserved]) -> list[bool]:
        """Let the leases end now; the attempts stay counted.  Answers as those of `complete`, one for each."""
        ...

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        """Read records: one for each key, in their order; `None` where there is none.

        Raises:
            CorruptRecordError: One of them cannot be read.
        """
        ...

    async def delete(self, keys: Sequence[str]) -> int:
        """Forget records, whatever their state; the number of those that were there."""
        ...

    def scan(self, prefix: str) -> AsyncIterator[IdempotencyRecord]:
        """Every readable record whose key starts with `prefix`, in no order, without blocking the store."""
        ...

    async def count_active(self, prefix: str) -> int:
        """How many records under `prefix` hold a lease now."""
        ...

    async def ping(self) -> StoreHealth:
        """Ask for a sign of life, and for what the store's settings would lose.

        Fails as the other methods would: a store that takes no writes, or refuses us a command that they
        need, does not pass.  Where `StoreHealth.identity` is given, it changes when the store has lost
        what it held.
        """
        ...


class JoinedRepository(IdempotencyRepository, Protocol):
    """The same records, written in a transaction of the application's.  It commits; the store never does.

    Raises (all methods): TransactionAbortedError: The database gave the transaction up; begin it anew.
    """

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """What happens in the block is undone by an exception, and the transaction goes on.

        Raises:
            ApplicationError: The block tried to commit: all of the transaction is rolled back.
        """
        ...


@runtime_checkable
class JoiningRepository(IdempotencyRepository, Protocol):
    """A store in the application's own database."""

    def joined(self, held: Any) -> JoinedRepository:
        """The records as seen and written by the transaction that `held` (a session, a connection) is in."""
        ...


@runtime_checkable
class PurgeSupport(Protocol):
    """What a store can do besides, where its backend does not take expired records away by itself.

    A worker calls `purge` about every `purge_every`, in the background, until fewer records go than it asked for.
    """

    @property
    def purge_every(self) -> timedelta:
        """How often; zero for never."""
        ...

    async def purge(self, most: int = 500) -> int:
        """Take away up to `most` records that have expired by the store's clock; how many went.

        Raises as `IdempotencyRepository` does.
        """
        ...


class Surveyed(NamedTuple):
    """A page of a survey."""

    found: Sequence[IdempotencyRecord | Corrupt]
    passed: int
    """About how many keys the store went by for it."""


@runtime_checkable
class RecordAdmin(Protocol):
    """What a store can do besides, for the people who look after it: `integr8s-idem keys` asks for it.

    They hold no token.  What they change is named by what they saw instead: one atomic step per key does it if the
    record is still that one, by its status and fence and, while it is processing, by the end of its lease.  A record
    that was renewed, settled or taken over meanwhile stays as it is.

    Raises (all methods): As `IdempotencyRepository`.
    """

    def survey(self, prefix: str, holding: Sequence[str] = ()) -> AsyncIterator[Surveyed]:
        """As `scan`, in no order, page by page, and with the records that cannot be read.

        Args:
            prefix: What their keys start with.
            holding: Parts that their keys hold behind that, in this order; the store looks for these by itself, and may
                find more where it does not mind the order.
        """
        ...

    async def size(self) -> int | None:
        """About how many keys there are to go by; `None` if that would take long to tell."""
        ...

    async def end_leases(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        """Let leases of records that were seen end now, as `release` does; an answer for each, in their order.

        `False`: it is no longer that record.
        """
        ...

    async def forget(self, seen: Sequence[IdempotencyRecord]) -> list[bool]:
        """Forget records that were seen; an answer for each, in their order.  `False`: it is no longer that record."""
        ...
