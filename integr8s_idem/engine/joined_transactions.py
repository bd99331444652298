"""The transaction of the caller in which `IdempotencyManager.in_transaction` makes a manager reserve and complete."""

from __future__ import annotations

from contextvars import ContextVar
from types import TracebackType
from typing import Any

from integr8s_idem.engine.work import Work
from integr8s_idem.errors import ApplicationError
from integr8s_idem.stores import JoinedRepository, JoiningRepository

JOINED: ContextVar[tuple[object, JoinedRepository] | None] = ContextVar(
    "transaction joined by the current context", default=None
)
"""The manager that has joined it, and the records in it."""


class InTransaction:
    """Makes a manager reserve and complete in a transaction of the caller, within a block."""

    __slots__ = ("_held", "_joining", "_manager", "_token")

    def __init__(self, manager: object, joining: JoiningRepository, held: Any) -> None:
        self._manager = manager
        self._joining = joining
        self._held = held

    async def __aenter__(self) -> None:
        self._token = JOINED.set((self._manager, self._joining.joined(self._held)))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        JOINED.reset(self._token)


def never_unknown(work: Work) -> ApplicationError:
    """Make the error for work with a reconcile function in a transaction of the caller."""
    return ApplicationError(
        f"{work.key.label} has a reconcile function, but it runs in your transaction, which contains its record: "
        "if that is rolled back, nobody can know of an earlier attempt. Remove reconcile=…, or call it outside of "
        "in_transaction()"
    )
