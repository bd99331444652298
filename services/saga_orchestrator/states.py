"""The saga's states and transitions.  Pure.

    created ─► scheduled ─► commanded ─► completed, failed, timed_out      the execution has ended
                   │            │
                   └────────────┴──────► cancelling ─► cancelled           it was cancelled
                   └────────────┴──────► expiring ───► expired             it timed out

A saga moves only to the right.  The pending command follows from its state alone: a create command in `scheduled`, a
delete command in `cancelling` and `expiring`.  A worker may therefore die at any point: the next redelivery or sweep
publishes the pending command.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class SagaState(str, Enum):
    """States in chronological order."""

    CREATED = "created"
    SCHEDULED = "scheduled"
    COMMANDED = "commanded"
    CANCELLING = "cancelling"
    EXPIRING = "expiring"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


class Command(str, Enum):
    """A command that a saga may have to publish."""

    CREATE = "create"
    DELETE = "delete"


_STARTED: Final = (SagaState.SCHEDULED, SagaState.COMMANDED)
_COMPENSATING: Final = (SagaState.CANCELLING, SagaState.EXPIRING)
_UNFINISHED: Final = (SagaState.CREATED, *_STARTED, *_COMPENSATING)

_SOURCES: Final[dict[SagaState, tuple[SagaState, ...]]] = {
    SagaState.SCHEDULED: (SagaState.CREATED,),
    # Cancelled before it was scheduled: there is nothing to delete.
    SagaState.CANCELLED: (SagaState.CREATED,),
    SagaState.COMPLETED: _UNFINISHED,
    SagaState.FAILED: _UNFINISHED,
    SagaState.TIMED_OUT: _UNFINISHED,
}
"""States from which an event can lead to a state.  Other states are reached by publishing, or by timeouts."""

AFTER_PUBLISHING: Final = {
    SagaState.SCHEDULED: SagaState.COMMANDED,
    SagaState.CANCELLING: SagaState.CANCELLED,
    SagaState.EXPIRING: SagaState.EXPIRED,
}
"""The next state after the pending command is published."""


def moved(state: SagaState, target: SagaState) -> SagaState:
    """Return the state after an event: `target`, or the old state if the transition is not allowed."""
    if target is SagaState.CANCELLED and state in _STARTED:
        return SagaState.CANCELLING
    return target if state in _SOURCES.get(target, ()) else state


def owed(state: SagaState, *, has_request: bool) -> Command | None:
    """Return the command that a saga in `state` still has to publish."""
    if state is SagaState.SCHEDULED:
        # Topics are consumed independently: the coordinator's answer may arrive before the request.
        return Command.CREATE if has_request else None
    return Command.DELETE if state in _COMPENSATING else None
