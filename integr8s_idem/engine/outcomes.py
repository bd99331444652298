"""Convert outcomes to errors for callers that expect a value."""

from __future__ import annotations

from typing import Any

from integr8s_idem.engine.work import Discarded, Executed, HandlerFailed, Outcome
from integr8s_idem.errors import (
    CorruptRecordError,
    InProgressError,
    KeyReusedError,
    PreviouslyFailedError,
    ScheduledError,
)
from integr8s_idem.records import Completed, Corrupt, Failed, InProgress, KeyReused, Pending, Scheduled


def error_of(label: str, outcome: Outcome[Any]) -> Exception | None:
    """Return the error for `outcome`, or `None` if the work is done.

    Args:
        label: The readable form of the key.
    """
    match outcome:
        case Executed() | Completed():
            return None
        case HandlerFailed() | Discarded():
            return outcome.error
        case Failed():
            return PreviouslyFailedError(label, outcome.attempt, outcome.error)
        case KeyReused():
            return KeyReusedError(label, outcome.stored, outcome.offered)
        case Corrupt():
            return CorruptRecordError(label, outcome.reason)
        case InProgress() | Scheduled():
            return pending_error(label, outcome)


def pending_error(label: str, found: Pending) -> InProgressError:
    """Return the error for work that is in progress elsewhere, or not due yet."""
    kind = ScheduledError if isinstance(found, Scheduled) else InProgressError
    return kind(label, found.attempt, found.retry_after, found.owner)
