"""Dead letters for outcomes of handlers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from integr8s_idem.engine.outcomes import error_of
from integr8s_idem.engine.work import HandlerFailed, Outcome
from integr8s_idem.errors import OutcomeUnknownError
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import HandlerExecution
from integr8s_idem.records import Corrupt, Failed, KeyReused
from integr8s_idem.worker.dead_letters import DeadLetter


def no_handler(handler: str, event: BaseEvent, generation: int) -> DeadLetter:
    """Return the dead letter of a message for a handler that its event does not have."""
    error = f"it is a replay or retry for handler {handler!r}, but {event.event_type} has no handler with that name"
    return DeadLetter(
        "no_handler", error, handler, generation=generation, event_type=event.event_type, event_id=event.event_id
    )


_REASONS: Final[Mapping[type[Outcome[Any]], str]] = {
    HandlerFailed: "handler_failed",
    Failed: "previously_failed",
    KeyReused: "key_reused",
    Corrupt: "corrupt_record",
}
"""Why an outcome is dead-lettered."""


def dead_letter_of(execution: HandlerExecution, outcome: Outcome[Any]) -> DeadLetter:
    """Return the dead letter for the outcome of `execution`."""
    error = error_of(execution.label, outcome)
    assert error is not None, f"{outcome} is not a reason for a dead letter"
    attempts = outcome.attempt if isinstance(outcome, HandlerFailed | Failed) else 0
    is_unknown = isinstance(outcome, HandlerFailed) and isinstance(error, OutcomeUnknownError)
    return DeadLetter(
        "outcome_unknown" if is_unknown else _REASONS[type(outcome)],
        error,
        execution.handler.name,
        execution.label,
        execution.record_key,
        attempts,
        execution.generation,
        execution.event.event_type,
        execution.event.event_id,
    )
