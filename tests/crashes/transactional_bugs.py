"""Mistakes that a transactional mode could have, to be made in a worker's process: the judge must find each.

But for `deaf`, which is half a mistake: the other half of the defense must do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from integr8s_idem.engine import leases
from integr8s_idem.events import Message
from integr8s_idem.records import Completion
from integr8s_idem.stores.outbox import Claim, Waiting
from integr8s_idem.stores.sql import SqlIdempotencyRepository, SqlOutbox, SqlTransaction
from integr8s_idem.stores.sql.engine import writing
from integr8s_idem.stores.sql.outbox import put


def _completes_outside() -> None:
    """The outcome is written in a transaction of its own, before the handler's commits."""

    async def complete(self: SqlTransaction, completion: Completion) -> bool:
        [self._may_commit] = await SqlIdempotencyRepository(self._records.engine).complete([completion])
        return self._may_commit

    setattr(SqlTransaction, "complete", complete)  # noqa: B010  # as no type checker would let us


def _sends_outside() -> None:
    """The events are left in the outbox in a transaction of their own."""

    async def send(self: SqlTransaction, messages: Sequence[Message]) -> None:
        async with writing(self._records.engine) as connection:
            await put(connection, messages)
        self._sent = True

    setattr(SqlTransaction, "send", send)  # noqa: B010


def _forgets_first() -> None:
    """The relay deletes what it has read, and publishes it then."""
    read = SqlOutbox.read

    async def read_and_delete(
        self: SqlOutbox, claim: Claim, *, after: int = 0, besides: Sequence[str] = ()
    ) -> list[Waiting]:
        found = await read(self, claim, after=after, besides=besides)
        await self.done(claim, [one.id for one in found], timedelta(seconds=5))
        return found

    setattr(SqlOutbox, "read", read_and_delete)  # noqa: B010


def _deaf() -> None:
    """No handler is cancelled when its lease ends: only the database is left to refuse it."""
    setattr(leases, "fence_margin", lambda lease: -3600.0)  # noqa: B010


def _commits_all_the_same() -> None:
    """A handler that was overtaken does not care."""
    _deaf()
    complete = SqlTransaction.complete

    async def complete_in_any_case(self: SqlTransaction, completion: Completion) -> bool:
        self._may_commit = await complete(self, completion) or True
        return True

    setattr(SqlTransaction, "complete", complete_in_any_case)  # noqa: B010


BUGS: Final[dict[str, Callable[[], None]]] = {
    "completes_outside": _completes_outside,
    "sends_outside": _sends_outside,
    "forgets_first": _forgets_first,
    "commits_all_the_same": _commits_all_the_same,
    "deaf": _deaf,
}
