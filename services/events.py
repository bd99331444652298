"""The events of the platform.  Each is about one execution, whose id is also its Kafka key."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from integr8s_idem import BaseEvent, EventMetadata

MAX_SCRIPT_CHARACTERS = 150_000
MAX_OUTPUT_CHARACTERS = 400_000
MAX_METADATA_CHARACTERS = 200


def _without_nul(text: str) -> str:
    """Refuse NUL, which PostgreSQL cannot store: the event is dead-lettered instead of retried."""
    if "\x00" in text:
        raise ValueError("contains a NUL character")
    return text


Text = Annotated[str, AfterValidator(_without_nul)]
Id = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:@-]{1,200}$")]
Reason = Annotated[Text, StringConstraints(max_length=2_000)]
Output = Annotated[Text, StringConstraints(max_length=MAX_OUTPUT_CHARACTERS)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class ExecutionEvent(BaseEvent):
    """Base class of events about one execution."""

    execution_id: Id

    @field_validator("metadata")
    @classmethod
    def _metadata_fits_a_column(cls, metadata: EventMetadata) -> EventMetadata:
        for text in (metadata.correlation_id, metadata.user_id or ""):
            if len(_without_nul(text)) > MAX_METADATA_CHARACTERS:
                raise ValueError(f"correlation_id and user_id have at most {MAX_METADATA_CHARACTERS} characters")
        return metadata

    @model_validator(mode="before")
    @classmethod
    def _is_about_its_execution(cls, data: Any) -> Any:
        # The Kafka key: events of one execution have the same partition number in every topic, so they stay in order.
        if isinstance(data, dict) and data.get("aggregate_id") is None and "execution_id" in data:
            return data | {"aggregate_id": data["execution_id"]}
        return data

    @model_validator(mode="after")
    def _names_its_execution_once(self) -> ExecutionEvent:
        if self.aggregate_id != self.execution_id:
            raise ValueError("aggregate_id and execution_id differ")
        return self


class ScriptRequest(BaseModel):
    """The script to run, and its limits."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    script: Annotated[Text, StringConstraints(min_length=1, max_length=MAX_SCRIPT_CHARACTERS)]
    language: Annotated[Text, StringConstraints(min_length=1, max_length=40)] = "python"
    language_version: Annotated[Text, StringConstraints(max_length=40)] = ""
    """Version of the language; empty for the runner's default."""
    timeout_seconds: Seconds = 30.0
    """Maximum wall-clock time of the run."""
    cpu_limit: Annotated[float, Field(gt=0, le=1_024)] = 1.0
    """Cores.  A child process may use `cpu_limit * timeout_seconds` seconds of CPU."""
    memory_limit_mb: Annotated[int, Field(ge=16, le=1_048_576)] | None = None
    """MiB of memory; the platform's default if not given."""
    priority: Annotated[int, Field(ge=0, le=10)] = 5
    """Executions with higher priority are admitted first."""


class ResourceUsage(BaseModel):
    """Resource usage of a run."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    wall_seconds: Annotated[float, Field(ge=0)] = 0.0
    cpu_seconds: Annotated[float, Field(ge=0)] = 0.0
    peak_memory_kib: Annotated[int, Field(ge=0)] = 0


class ExecutionRequested(ExecutionEvent, ScriptRequest):
    """A user has requested one run of a script."""

    event_type: Literal["execution_requested"] = "execution_requested"


class ExecutionScheduled(ExecutionEvent):
    """The execution has got a slot."""

    event_type: Literal["execution_scheduled"] = "execution_scheduled"
    reason: Reason = ""


class ExecutionRejected(ExecutionEvent):
    """The execution was rejected."""

    event_type: Literal["execution_rejected"] = "execution_rejected"
    reason: Reason


class CreatePodCommand(ExecutionEvent, ScriptRequest):
    """Run this script.  A saga runs one script, so the k8s worker can be idempotent by saga."""

    event_type: Literal["create_pod_command"] = "create_pod_command"
    saga_id: Id


class DeletePodCommand(ExecutionEvent):
    """Stop the pod of this execution, or prevent its start."""

    event_type: Literal["delete_pod_command"] = "delete_pod_command"
    saga_id: Id
    reason: Reason


class PodCreated(ExecutionEvent):
    """The pod was created, and the script is about to run."""

    event_type: Literal["pod_created"] = "pod_created"
    pod_name: Id


class ExecutionCompleted(ExecutionEvent):
    """The script ended with exit code 0."""

    event_type: Literal["execution_completed"] = "execution_completed"
    exit_code: int = 0
    stdout: Output = ""
    stderr: Output = ""
    resource_usage: ResourceUsage = Field(default_factory=ResourceUsage)


class ExecutionFailed(ExecutionEvent):
    """The script failed, or could not be run."""

    event_type: Literal["execution_failed"] = "execution_failed"
    exit_code: int
    """Exit code, as in a shell; negative for the number of the signal that ended the script."""
    error_type: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,40}$")]
    """script_error, cpu_limit, memory_limit, output_limit, signal, evicted, not_started, supervisor_lost,
    unsupported_language, deleted"""
    stdout: Output = ""
    stderr: Output = ""
    resource_usage: ResourceUsage = Field(default_factory=ResourceUsage)


class ExecutionTimeout(ExecutionEvent):
    """The script exceeded its time limit."""

    event_type: Literal["execution_timeout"] = "execution_timeout"
    timeout_seconds: Seconds
    stdout: Output = ""
    stderr: Output = ""
    resource_usage: ResourceUsage = Field(default_factory=ResourceUsage)


class ExecutionCancelled(ExecutionEvent):
    """The execution was cancelled."""

    event_type: Literal["execution_cancelled"] = "execution_cancelled"
    reason: Reason = ""
    cancelled_by: Annotated[Text, StringConstraints(max_length=200)]


class ResultStored(ExecutionEvent):
    """The result was stored."""

    event_type: Literal["result_stored"] = "result_stored"
    status: Literal["completed", "failed", "timeout"]


Outcome = ExecutionCompleted | ExecutionFailed | ExecutionTimeout
"""The possible outcomes of a run."""
