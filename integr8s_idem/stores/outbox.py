"""The Protocol of an outbox: events that were written in a transaction and wait to be published."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from integr8s_idem.events import Message


@dataclass(frozen=True, slots=True)
class Waiting:
    """One message of the outbox."""

    id: int
    message: Message


@dataclass(frozen=True, slots=True)
class Claim:
    """Some buckets of the outbox that are ours for a while."""

    token: bytes
    buckets: tuple[int, ...]


class Outbox(Protocol):
    """The outbox as relays use it: the messages of one Kafka key are in one bucket, which is one relay's at a time.

    Time is the database's clock.  Raises (all methods): StoreError as for every verb of a store.
    """

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Entered around each run of a handler whose transaction is to hold its outcome, before its key is reserved.

        Where a database lets one write at a time, its handlers wait here rather than with a lease that runs out.
        """
        ...

    async def arrived(self, at_most: float) -> None:
        """Return when a transaction of this process has left something, or after `at_most` seconds."""
        ...

    async def claim(self, length: timedelta) -> Claim | None:
        """All buckets that hold something and are nobody's, for `length`; `None` if there are none."""
        ...

    async def read(self, claim: Claim, *, besides: Sequence[int] = ()) -> list[Waiting]:
        """The first messages of the buckets, in the order in which they are to be published.

        Args:
            besides: Rows to leave out, since they cannot be published now.
        """
        ...

    async def done(self, claim: Claim, ids: Sequence[int], length: timedelta) -> bool:
        """Forget messages that the broker has, and keep the buckets for `length` more.  `False`: they are not ours."""
        ...

    async def check(self) -> None:
        """Whether all is there that it needs.

        Raises:
            StoreConfigurationError: It is not, and what is left in it would stay there.
        """
        ...

    async def count(self) -> int:
        """How many messages wait."""
        ...

    async def tried(self) -> None:
        """Do all that handlers and relays do with it, and undo it: what they may not do shows as an error."""
        ...
