"""Interpret the status of Jobs and pods, and derive the `Run`.  Pure.

A Job has one pod at a time.  If the cluster has created two nevertheless, which its documentation does not exclude, the
one that succeeded counts, or else the last.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError

from services.events import ResourceUsage
from services.k8s_worker.job_spec import CONTAINER
from services.k8s_worker.output import readable
from services.k8s_worker.runner import Run, RunEnd

Object = Mapping[str, Any]
"""A Job or a pod, as returned by the API."""

_HOPELESS: Final = frozenset({"InvalidImageName", "ErrImageNeverPull"})
"""Reasons for waiting that do not resolve by themselves."""
_NEVER_RAN: Final = frozenset({"StartError", "ContainerCannotRun"})
_ENDS: Final = {"exited": RunEnd.EXITED, "timed_out": RunEnd.TIMED_OUT, "flooded": RunEnd.FLOODED}
_SIGNALLED: Final = 128


class Report(BaseModel):
    """The report of pod_program.py.  Untrusted, since the script can write it as well."""

    end: Literal["exited", "timed_out", "flooded", "terminated"]
    exit_code: Annotated[int, Field(ge=-64, le=255)]
    dropped: Annotated[int, Field(ge=0)]
    wall_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    cpu_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    peak_memory_kib: Annotated[int, Field(ge=0, le=2**53)]

    @property
    def usage(self) -> ResourceUsage:
        return ResourceUsage.model_validate(self, from_attributes=True)


def ended_pod(pods: Iterable[Object]) -> Object | None:
    """Return the pod with the result, or `None`."""
    ended = [pod for pod in pods if phase(pod) in {"Succeeded", "Failed"}]
    return max(ended, key=_weight) if ended else None


def has_begun(pods: Iterable[Object]) -> bool:
    """Return whether a script is running or has run."""
    return any({"running", "terminated"} & set(_container(pod).get("state", {})) for pod in pods)


def is_hopeless(pods: Iterable[Object]) -> bool:
    """Return whether a pod waits for something that cannot happen."""
    return any(_waiting(pod).get("reason") in _HOPELESS for pod in pods)


def why_waiting(pods: Sequence[Object]) -> str:
    """Return the cluster's reason why pods have not started."""
    for pod in pods:
        status = _waiting(pod) or _unscheduled(pod)
        if status:
            return message_of(status)
    return "its pod waits for an unknown reason" if pods else "the cluster has not created a pod"


def job_end(job: Object) -> Object | None:
    """Return the condition with which the Job ended; `None` while it is active."""
    return _condition(job, "Complete") or _condition(job, "Failed")


def is_past_its_deadline(job: Object) -> bool:
    """Return whether the cluster ended the Job at its deadline."""
    status = _condition(job, "Failed") or _condition(job, "FailureTarget") or {}
    return bool(status.get("reason") == "DeadlineExceeded")


def has_output(pod: Object) -> bool:
    """Return whether a container was started, and may have written output."""
    return bool(_terminated(pod))


def run_of(pod: Object, log: bytes, keep: int) -> Run:
    """Return the result of a pod.

    Args:
        log: The beginning of the pod's output.
        keep: Number of bytes to keep.
    """
    terminated, report = _terminated(pod), _report(pod)
    end, exit_code = _end(pod, terminated, report)
    return Run(
        end,
        exit_code,
        stdout_of(log, keep, report.dropped if report else 0),
        "" if end is RunEnd.EXITED or (report and end is _ENDS.get(report.end)) else _why(pod, terminated),
        report.usage if report else ResourceUsage(wall_seconds=_wall_seconds(terminated)),
    )


def stdout_of(log: bytes, keep: int, dropped: int = 0) -> str:
    """Return output as text.  Clusters merge stdout and stderr into one stream, which is returned as stdout."""
    return readable(log[:keep], None if len(log) > keep else dropped)


def phase(pod: Object) -> str:
    return str(_status(pod).get("phase", ""))


def _end(pod: Object, terminated: Object, report: Report | None) -> tuple[RunEnd, int]:
    exit_code = report.exit_code if report else _exit_code(terminated)
    if terminated.get("reason") == "OOMKilled" and exit_code != 0:
        return RunEnd.OUT_OF_MEMORY, exit_code
    if report and report.end in _ENDS:
        return _ENDS[report.end], exit_code
    if _status(pod).get("reason") == "DeadlineExceeded":
        return RunEnd.TIMED_OUT, exit_code
    if _status(pod).get("reason") == "Evicted" or _condition(pod, "DisruptionTarget"):
        return RunEnd.EVICTED, exit_code
    if not terminated or terminated.get("reason") in _NEVER_RAN:
        return RunEnd.NOT_STARTED, exit_code
    if report or pod["metadata"].get("deletionTimestamp"):
        return RunEnd.LOST, exit_code  # the pod was deleted
    return RunEnd.EXITED, exit_code


def _exit_code(terminated: Object) -> int:
    code = int(terminated.get("exitCode", _SIGNALLED + signal.SIGKILL))
    return _SIGNALLED - code if code > _SIGNALLED else code


def _report(pod: Object) -> Report | None:
    try:
        return Report.model_validate_json(_terminated(pod).get("message") or "")
    except ValidationError:
        return None


def _why(pod: Object, terminated: Object) -> str:
    status = (_status(pod), _condition(pod, "DisruptionTarget"), terminated)
    return "; ".join(dict.fromkeys(message_of(each) for each in status if each and each.get("reason")))


def message_of(status: Object) -> str:
    """Return the reason and message of a status."""
    reason, message = status.get("reason", ""), status.get("message", "")
    # The report of pod_program.py is not a message for users.
    return f"{reason}: {message}" if message and not message.startswith('{"end"') else str(reason)


def _wall_seconds(terminated: Object) -> float:
    try:
        begun, ended = (datetime.fromisoformat(terminated[name]) for name in ("startedAt", "finishedAt"))
    except (KeyError, TypeError, ValueError):
        return 0.0  # it never started, or the times are unknown
    return max(0.0, (ended - begun).total_seconds())


def _weight(pod: Object) -> tuple[bool, str]:
    return phase(pod) == "Succeeded", str(pod["metadata"].get("creationTimestamp", ""))


def _status(thing: Object) -> Object:
    return thing.get("status") or {}


def _container(pod: Object) -> Object:
    statuses = _status(pod).get("containerStatuses") or []
    return next((status for status in statuses if status.get("name") == CONTAINER), {})


def _terminated(pod: Object) -> Object:
    return _container(pod).get("state", {}).get("terminated") or {}


def _waiting(pod: Object) -> Object:
    waiting: Object = _container(pod).get("state", {}).get("waiting") or {}
    # Reasons that occur in the normal start of every pod.
    return {} if waiting.get("reason") in {"ContainerCreating", "PodInitializing"} else waiting


def _unscheduled(pod: Object) -> Object:
    return next(
        (
            condition
            for condition in _status(pod).get("conditions") or []
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False"
        ),
        {},
    )


def _condition(thing: Object, kind: str) -> Object | None:
    return next(
        (
            condition
            for condition in _status(thing).get("conditions") or []
            if condition.get("type") == kind and condition.get("status") == "True"
        ),
        None,
    )
