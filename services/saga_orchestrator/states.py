"""The saga's states and moves.  Pure.

    created ─► scheduled ─► commanded ─► completed, failed, timed_out      the execution has ended by itself
                   │            │
                   └────────────┴──────► cancelling ─► cancelled           somebody cancelled it
                   └────────────┴──────► expiring ───► expired             it took too long

A saga moves only to the right.  What remains to be published follows from its state alone:
`scheduled` owes a create command, `cancelling` and `expiring` owe a delete command.  So a worker may die
at any point: whoever looks at the saga next, redelivery or sweep, sees what is owed.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class SagaState(str, Enum):
    """In the order of time."""

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
    """What a saga can owe to the k8s worker."""

    CREATE = "create"
    DELETE = "delete"


_STARTED: Final = (SagaState.SCHEDULED, SagaState.COMMANDED)
_COMPENSATING: Final = (SagaState.CANCELLING, SagaState.EXPIRING)
_UNFINISHED: Final = (SagaState.CREATED, *_STARTED, *_COMPENSATING)

_SOURCES: Final[dict[SagaState, tuple[SagaState, ...]]] = {
    SagaState.SCHEDULED: (SagaState.CREATED,),
    # Cancelled before it was scheduled: nothing was started, nothing is to be deleted.
    SagaState.CANCELLED: (SagaState.CREATED,),
    SagaState.COMPLETED: _UNFINISHED,
    SagaState.FAILED: _UNFINISHED,
    SagaState.TIMED_OUT: _UNFINISHED,
}
"""From where an event can lead to a state.  The other states are reached by publishing, or by time."""

AFTER_PUBLISHING: Final = {
    SagaState.SCHEDULED: SagaState.COMMANDED,
    SagaState.CANCELLING: SagaState.CANCELLED,
    SagaState.EXPIRING: SagaState.EXPIRED,
}
"""Where a saga goes once the command that it owes is published."""


def moved(state: SagaState, target: SagaState) -> SagaState:
    """The state after an event that leads to `target`: that, or the old one if it is no way forward."""
    if target is SagaState.CANCELLED and state in _STARTED:
        return SagaState.CANCELLING
    return target if state in _SOURCES.get(target, ()) else state


def owed(state: SagaState, *, has_request: bool) -> Command | None:
    """The command that a saga in `state` still has to publish."""
    if state is SagaState.SCHEDULED:
        # The topics are read independently: the coordinator's answer may be here before the request.
        return Command.CREATE if has_request else None
    return Command.DELETE if state in _COMPENSATING else None
