"""Bugs of transactional handlers, injected into a worker process: the checks must detect each of them.

The exception is `ignores_lost_leases`, which disables only one of two defenses: the database must still prevent harm.
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
from integr8s_idem.stores.sql.outbox_rows import put


def _completes_outside() -> None:
    """Write the outcome in a separate transaction, before the handler's transaction commits."""

    async def complete(self: SqlTransaction, completion: Completion) -> bool:
        [self._may_commit] = await SqlIdempotencyRepository(self._records.engine).complete([completion])
        return self._may_commit

    setattr(SqlTransaction, "complete", complete)  # noqa: B010  # a type checker would reject an assignment


def _sends_outside() -> None:
    """Write the events to the outbox in a separate transaction."""

    async def send(self: SqlTransaction, messages: Sequence[Message]) -> None:
        async with writing(self._records.engine) as connection:
            await put(connection, messages)
        self._sent = True

    setattr(SqlTransaction, "send", send)  # noqa: B010


def _forgets_first() -> None:
    """Delete events from the outbox before they are published."""
    read = SqlOutbox.read

    async def read_and_delete(
        self: SqlOutbox, claim: Claim, *, after: int = 0, besides: Sequence[str] = ()
    ) -> list[Waiting]:
        found = await read(self, claim, after=after, besides=besides)
        await self.done(claim, [event.id for event in found], timedelta(seconds=5))
        return found

    setattr(SqlOutbox, "read", read_and_delete)  # noqa: B010


def _ignores_lost_leases() -> None:
    """Do not cancel handlers when their lease ends: only the database can reject them."""
    setattr(leases, "fence_margin", lambda lease: -3600.0)  # noqa: B010


def _commits_anyway() -> None:
    """Let handlers commit after they were overtaken."""
    _ignores_lost_leases()
    complete = SqlTransaction.complete

    async def complete_anyway(self: SqlTransaction, completion: Completion) -> bool:
        self._may_commit = await complete(self, completion) or True
        return True

    setattr(SqlTransaction, "complete", complete_anyway)  # noqa: B010


BUGS: Final[dict[str, Callable[[], None]]] = {
    "completes_outside": _completes_outside,
    "sends_outside": _sends_outside,
    "forgets_first": _forgets_first,
    "commits_anyway": _commits_anyway,
    "ignores_lost_leases": _ignores_lost_leases,
}
