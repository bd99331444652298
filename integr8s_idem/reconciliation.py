"""Answers of a reconcile function, which finds out whether an earlier attempt has had its effect.

    async def find_charge(event: OrderPlaced, payments: FromDishka[Payments]) -> Answer:
        charge = await payments.find(order_id=event.order_id)
        if charge is None:
            return NotDone()
        return Unknown(retry_after=60) if charge.status == "pending" else Done(charge.receipt)

    @router.on(OrderPlaced, reconcile=find_charge)
    async def charge(event: OrderPlaced, payments: FromDishka[Payments]) -> str: ...

An attempt that was killed, timed out or lost its connection may have had its effect or not.  The reconcile function is
asked before each run that may follow such an attempt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.errors import ApplicationError

__all__ = ["Answer", "Done", "NotDone", "Unknown"]


@dataclass(frozen=True, slots=True)
class Done:
    """An earlier attempt has had its effect: the work is completed, without another run."""

    result: Any = None
    """The result that the run would have returned, of the type in its return annotation.  Duplicates get it as well."""


@dataclass(frozen=True, slots=True)
class NotDone:
    """No attempt has had the effect: the work runs now, as part of the same attempt."""


@dataclass(frozen=True, slots=True, init=False)
class Unknown:
    """It cannot be known yet: the key is released, and the question is asked again later."""

    retry_after: timedelta
    """Minimum time until it is asked again."""
    reason: str
    """Why it is unknown, for logs and dead letters; may be empty."""

    def __init__(self, retry_after: Duration, reason: str = "") -> None:
        """
        Args:
            retry_after: Minimum time until it is asked again, as a `timedelta` or in seconds.
            reason: Why it is unknown, for logs and dead letters.

        Raises:
            ApplicationError: `retry_after` is negative or not a duration, or `reason` is not a string.
        """
        length: timedelta | None = duration(retry_after, "retry_after")
        if length is None:
            raise ApplicationError("Unknown needs a delay, as in Unknown(retry_after=60)")
        given: object = reason
        if not isinstance(given, str):
            raise ApplicationError(f"the reason of Unknown is {given!r}, but must be a string")
        object.__setattr__(self, "retry_after", length)
        object.__setattr__(self, "reason", reason)


Answer: TypeAlias = Done | NotDone | Unknown
"""The answer of a reconcile function."""

ReconcileFunction: TypeAlias = Callable[..., Awaitable[Answer]]
"""A reconcile function of a handler or of an async function."""
