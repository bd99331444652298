"""Checks of what callers pass to a manager: keys, reservations and functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from integr8s_idem.config import OnFailure
from integr8s_idem.engine.work import Work
from integr8s_idem.errors import ApplicationError
from integr8s_idem.keys import Key
from integr8s_idem.records import Reserved


def refuse_single_key(method: str, keys: object) -> None:
    """Check that `keys` is not a single key, whose characters would be taken for keys.

    Raises:
        ApplicationError: It is.
    """
    if isinstance(keys, str | Key):
        raise ApplicationError(f"{method} takes several keys: write {method}([key]), or use reserve for one key")


def require_reserved(method: str, values: Iterable[object]) -> None:
    """Check the arguments of a method that takes single reservations.

    Raises:
        ApplicationError: A value is not a reservation.
    """
    for each in values:
        if not isinstance(each, Reserved):
            raise ApplicationError(
                f"{method} takes a Reserved verdict of reserve or acquire_batch, not {type(each).__name__}: "
                "check isinstance(verdict, Reserved) first"
            )


def reservations_of(method: str, single_method: str, given: Reserved | Iterable[Reserved]) -> list[Reserved]:
    """Return the reservations that `method` was given, in order.

    `single_method`: the method for a single reservation.

    Raises:
        ApplicationError: It is a single reservation, or contains something else.
    """
    if isinstance(given, Reserved):
        raise ApplicationError(
            f"{method} takes several reservations: write {method}([reserved]), or use {single_method} for one"
        )
    reservations = list(given)
    for each in reservations:
        if not isinstance(each, Reserved):
            raise ApplicationError(
                f"{method} takes the Reserved verdicts of acquire_batch, not {type(each).__name__}: "
                "write [verdict for verdict in verdicts.values() if isinstance(verdict, Reserved)]"
            )
    return reservations


def not_awaitable(work: Work, function: Callable[..., object], returned: object) -> ApplicationError:
    """Make the error for a `function` of `work` that is not async, and has `returned` something."""
    work.on_failure = OnFailure.RETRY  # a programming error is not an outcome: release the key
    return ApplicationError(
        f"{getattr(function, '__qualname__', repr(function))} is not an async function: it returned "
        f"{type(returned).__name__}, which cannot be awaited. Its side effects have happened, and the key is released. "
        "Write it as async def"
    )
