"""What a pod's status means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.events import ResourceUsage
from services.k8s_worker.pod_status import ended_pod, has_begun, run_of, why_waiting
from services.k8s_worker.runner import RunEnd

REPORT = {
    "end": "exited",
    "exit_code": 0,
    "dropped": 0,
    "wall_seconds": 1.5,
    "cpu_seconds": 0.5,
    "peak_memory_kib": 9_000,
}
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}
TIMES = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:02Z"}


def pod(terminated: dict[str, Any] | None = None, phase: str = "Failed", **status: Any) -> dict[str, Any]:
    if terminated is not None:
        status["containerStatuses"] = [{"name": "script", "state": {"terminated": {**TIMES, **terminated}}}]
    return {"metadata": {"name": "p"}, "status": {"phase": phase, **status}}


def reported(**changes: object) -> str:
    return json.dumps({**REPORT, **changes})


@pytest.mark.parametrize(
    ("seen", "end", "exit_code"),
    [
        (pod({"exitCode": 0, "reason": "Completed", "message": reported()}), RunEnd.EXITED, 0),
        (pod({"exitCode": 3, "reason": "Error", "message": reported(exit_code=3)}), RunEnd.EXITED, 3),
        (pod({"exitCode": 139, "reason": "Error", "message": reported(exit_code=-11)}), RunEnd.EXITED, -11),
        (pod({"exitCode": 137, "message": reported(end="timed_out", exit_code=-9)}), RunEnd.TIMED_OUT, -9),
        (pod({"exitCode": 137, "message": reported(end="flooded", exit_code=-9)}), RunEnd.FLOODED, -9),
        (pod({"exitCode": 137, "reason": "OOMKilled"}), RunEnd.OUT_OF_MEMORY, -9),
        (pod({"exitCode": 137, "reason": "OOMKilled", "message": reported(exit_code=-9)}), RunEnd.OUT_OF_MEMORY, -9),
        (pod({"exitCode": 0, "reason": "OOMKilled", "message": reported()}), RunEnd.EXITED, 0),
        (pod({"exitCode": 1, "reason": "Error"}), RunEnd.EXITED, 1),
        (pod({"exitCode": 137, "reason": "Error"}), RunEnd.EXITED, -9),
        (pod({"exitCode": 137}, reason="DeadlineExceeded"), RunEnd.TIMED_OUT, -9),
        (pod({"exitCode": 137}, reason="Evicted"), RunEnd.EVICTED, -9),
        (pod(reason="Evicted"), RunEnd.EVICTED, -9),
        (pod({"exitCode": 137}, conditions=[DISRUPTED]), RunEnd.EVICTED, -9),
        (pod({"exitCode": 0, "message": reported()}, conditions=[DISRUPTED]), RunEnd.EXITED, 0),
        (pod({"exitCode": 137, "message": reported(end="terminated", exit_code=-9)}), RunEnd.LOST, -9),
        (pod({"exitCode": 128, "reason": "StartError", "message": "no python"}), RunEnd.NOT_STARTED, 128),
        (pod(reason="UnexpectedAdmissionError"), RunEnd.NOT_STARTED, -9),
    ],
    ids=[
        "done", "failed", "signal", "timed out", "flooded", "out of memory", "out of memory, the program lives",
        "a child was out of memory", "no report", "killed", "deadline", "evicted", "evicted before it began", "drained",
        "drained at its end", "deleted", "no interpreter", "not admitted",
    ],
)  # fmt: skip
def test_how_it_ended(seen: dict[str, Any], end: RunEnd, exit_code: int) -> None:
    run = run_of(seen, b"", 10)

    assert (run.end, run.exit_code) == (end, exit_code)


def test_a_deleted_pod_without_a_report_is_lost() -> None:
    seen = pod({"exitCode": 137, "reason": "Error"})
    seen["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:03Z"

    assert run_of(seen, b"", 10).end is RunEnd.LOST


def test_usage_comes_from_the_report_or_the_cluster() -> None:
    with_report = run_of(pod({"exitCode": 0, "message": reported()}), b"", 10)
    without = run_of(pod({"exitCode": 0}), b"", 10)
    never_begun = run_of(pod({"exitCode": 128, "startedAt": None}), b"", 10)

    assert with_report.usage == ResourceUsage(wall_seconds=1.5, cpu_seconds=0.5, peak_memory_kib=9_000)
    assert without.usage == ResourceUsage(wall_seconds=2.0)
    assert never_begun.usage == ResourceUsage()


@pytest.mark.parametrize(
    "message",
    ["", "nonsense", "[]", reported(end="won"), reported(exit_code="0; rm"), reported(cpu_seconds=-1), reported()[:40]],
)
def test_a_report_that_makes_no_sense_is_none(message: str) -> None:
    run = run_of(pod({"exitCode": 1, "reason": "Error", "message": message}), b"", 10)

    assert (run.end, run.exit_code, run.usage.cpu_seconds) == (RunEnd.EXITED, 1, 0)


@pytest.mark.parametrize(
    ("log", "dropped", "stdout"),
    [
        (b"0123456789", 0, "0123456789"),
        (b"0123456789", 5, "0123456789\n[cut off here: 5 more bytes]"),
        (b"0123456789+", 0, "0123456789\n[cut off here]"),
        (b"a\x00b\xff", 0, "a\ufffdb\ufffd"),
    ],
    ids=["all", "counted", "past the program", "no text"],
)
def test_output(log: bytes, dropped: int, stdout: str) -> None:
    assert run_of(pod({"exitCode": 0, "message": reported(dropped=dropped)}), log, 10).stdout == stdout


def test_reasons_of_the_cluster_are_reported_without_the_programs_report() -> None:
    evicted = run_of(pod({"exitCode": 137}, reason="Evicted", message="out of disk", conditions=[DISRUPTED]), b"", 10)
    deleted = run_of(pod({"exitCode": 137, "reason": "Error", "message": reported(end="terminated")}), b"", 10)

    assert evicted.stderr == "Evicted: out of disk; EvictionByEvictionAPI: drained"
    assert deleted.stderr == "Error"
    assert run_of(pod({"exitCode": 3, "message": reported(exit_code=3)}), b"", 10).stderr == ""


def test_of_two_pods_the_one_that_succeeded_counts() -> None:
    first, second = pod({"exitCode": 0}, "Succeeded"), pod({"exitCode": 1})
    first["metadata"]["creationTimestamp"], second["metadata"]["creationTimestamp"] = "2026-01-01", "2026-01-02"
    third = pod({"exitCode": 1})

    assert ended_pod([first, second]) is first
    assert ended_pod([second, third]) is second
    assert ended_pod([pod(phase="Running"), pod(phase="Unknown")]) is None


def test_why_a_pod_waits() -> None:
    pulling = [{"name": "script", "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}}}]
    creating = [{"name": "script", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    unscheduled = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}]

    assert why_waiting([pod(phase="Pending", containerStatuses=pulling)]) == "ErrImagePull: not found"
    assert why_waiting([pod(phase="Pending", conditions=unscheduled)]) == "Unschedulable: no node"
    assert "unknown reason" in why_waiting([pod(phase="Pending", containerStatuses=creating)])
    assert "not created a pod" in why_waiting([])
    assert not has_begun([pod(phase="Pending", containerStatuses=pulling)])
    assert has_begun([pod({"exitCode": 0})])
