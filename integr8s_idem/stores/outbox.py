"""The protocol of an outbox: events that were written in a transaction and are waiting to be published."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from integr8s_idem.events import Message


@dataclass(frozen=True, slots=True)
class Waiting:
    """A message of the outbox."""

    id: int
    message: Message
    fault: str = ""
    """Why the message cannot be published: its row is damaged, and `message` contains its readable parts."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Temporary ownership of buckets of the outbox."""

    token: bytes
    buckets: tuple[int, ...]
    last: int
    """The id of the last message at the time of the claim, which covers messages up to it.

    A transaction may commit a lower id while the claim is being read.  A transaction that sees that message and writes
    the next one of its key gets a higher id, so reading up to this id never publishes them in the wrong order.
    """


@dataclass(frozen=True, slots=True)
class Backlog:
    """The messages that wait to be published."""

    count: int
    age: timedelta
    """How long the oldest has waited, by the clock of the database; zero if there is none.

    Messages that workers of an earlier version wrote do not count, because their age is unknown.
    """


class OutboxStore(Protocol):
    """The outbox as used by relays.  All messages of a Kafka key are in one bucket, owned by one relay at a time.

    Times are from the database's clock.  Raises (all methods): StoreError, like the methods of a store.
    """

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Enclose a run of a handler whose transaction contains its outcome, entered before its key is reserved.

        If the database allows a single writer, handlers wait here instead of waiting while their leases run.
        """
        ...

    def notice(self) -> None:
        """End the wait of `arrived`: a transaction of this process has committed messages, or the relay must stop."""
        ...

    async def arrived(self, at_most: float) -> None:
        """Wait until a transaction of this process has written a message, or for `at_most` seconds."""
        ...

    @property
    def has_hints(self) -> bool:
        """Whether `hear_hints` does something."""
        ...

    async def hear_hints(self) -> None:
        """End the wait of `arrived` also when another process has committed messages, until cancelled.

        Hints may be lost, so relays also look regularly.  Never raises an error of the database.
        """
        ...

    async def claim(self, length: timedelta) -> Claim | None:
        """Claim all buckets that have messages and no owner; return `None` if there are none.

        Args:
            length: Duration of the claim, from now by the database's clock; `done` can extend it.
        """
        ...

    async def read(self, claim: Claim, *, after: int = 0, besides: Sequence[str] = ()) -> list[Waiting]:
        """Return the next messages of the buckets up to `claim.last`, in the order of publication.

        Args:
            after: The id to continue after.
            besides: Topics to exclude.
        """
        ...

    async def done(self, claim: Claim, ids: Sequence[int], length: timedelta) -> bool:
        """Delete published messages; return `False` if the claim was lost.

        Args:
            length: New duration of the claim, from now; zero releases it.
        """
        ...

    async def check(self) -> None:
        """Check that the outbox is complete.

        Raises:
            StoreConfigurationError: It is not complete, so its messages would not be published.
        """
        ...

    async def count(self) -> int:
        """Return the number of messages that wait to be published."""
        ...

    async def backlog(self) -> Backlog:
        """Return the number and the age of the messages that wait to be published."""
        ...

    async def tried(self) -> None:
        """Perform and roll back all operations of handlers and relays, to detect missing permissions."""
        ...
