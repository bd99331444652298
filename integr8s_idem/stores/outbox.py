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
    fault: str = ""
    """Why it cannot be published: its row is damaged, and `message` holds what of it could be read."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Some buckets of the outbox that are ours for a while."""

    token: bytes
    buckets: tuple[int, ...]
    last: int
    """The last message that was there: the claim is for those up to it.

    A transaction may commit a lower id while they are read, but whoever saw it committed before writing the next
    message of its key got a higher one: read up to here, that never overtakes it.
    """


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
        """All buckets that hold something and are nobody's; `None` if there are none.

        Args:
            length: For how long they are ours, from now by the database's clock, unless `done` says how much more.
        """
        ...

    async def read(self, claim: Claim, *, after: int = 0, besides: Sequence[str] = ()) -> list[Waiting]:
        """The next messages of the buckets up to `claim.last`, in the order in which they are to be published.

        Args:
            after: The message to go on behind.
            besides: Topics to leave out.
        """
        ...

    async def done(self, claim: Claim, ids: Sequence[int], length: timedelta) -> bool:
        """Forget messages that the broker has.  `False`: the buckets are not ours any more.

        Args:
            length: For how long they stay ours, from now; zero gives them up.
        """
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
