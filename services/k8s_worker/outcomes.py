"""Convert runs to outcome events, and outcomes to and from JSON.  Pure."""

from __future__ import annotations

import signal
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter

from integr8s_idem import EventMetadata
from services.events import (
    CreatePodCommand,
    ExecutionCompleted,
    ExecutionFailed,
    ExecutionTimeout,
    Outcome,
    ResourceUsage,
)
from services.k8s_worker.runner import Run, RunEnd

_OUTCOMES: Final[TypeAdapter[Outcome]] = TypeAdapter(Annotated[Outcome, Field(discriminator="event_type")])

_FAILURES: Final = {
    RunEnd.STOPPED: "deleted",
    RunEnd.FLOODED: "output_limit",
    RunEnd.OUT_OF_MEMORY: "memory_limit",
    RunEnd.EVICTED: "evicted",
    RunEnd.NOT_STARTED: "not_started",
    RunEnd.LOST: "supervisor_lost",
}


def outcome_of(run: Run, command: CreatePodCommand, event_id: str) -> Outcome:
    """Return the event with the outcome of `command`."""
    fields: dict[str, Any] = {
        "event_id": event_id,
        "execution_id": command.execution_id,
        "metadata": _metadata(command.metadata.correlation_id, command.metadata.user_id),
        "stdout": run.stdout,
        "stderr": run.stderr,
        "resource_usage": run.usage,
    }
    if run.end is RunEnd.TIMED_OUT:
        return ExecutionTimeout(**fields, timeout_seconds=command.timeout_seconds)
    if run.end is RunEnd.EXITED and run.exit_code == 0:
        return ExecutionCompleted(**fields)
    return ExecutionFailed(**fields, exit_code=run.exit_code, error_type=_error_type(run))


def failure(
    execution_id: str, event_id: str, error_type: str, why: str, correlation_id: str, user_id: str | None
) -> ExecutionFailed:
    """Return the event for a script that was not run, or whose outcome is unknown."""
    return ExecutionFailed(
        event_id=event_id,
        execution_id=execution_id,
        metadata=_metadata(correlation_id, user_id),
        exit_code=-signal.SIGKILL,
        error_type=error_type,
        stderr=why,
        resource_usage=ResourceUsage(),
    )


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    return outcome.model_dump(mode="json")


def outcome_from_json(stored: dict[str, Any]) -> Outcome:
    return _OUTCOMES.validate_python(stored)


def _metadata(correlation_id: str, user_id: str | None) -> EventMetadata:
    return EventMetadata(service_name="k8s-worker", correlation_id=correlation_id, user_id=user_id)


def _error_type(run: Run) -> str:
    if run.end in _FAILURES:
        return _FAILURES[run.end]
    if run.exit_code == -signal.SIGXCPU:
        return "cpu_limit"
    if run.exit_code < 0:
        return "signal"
    # Python reports a failed allocation in the last line of its output.
    if run.stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return "memory_limit"
    return "script_error"
