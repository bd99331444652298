"""Failures in a Kubernetes cluster and of the connection to it, on a stand-in for the API server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from integr8s_idem.errors import PermanentError
from services.k8s_worker import cluster as requests
from services.k8s_worker import kubernetes_runner, pod_watch
from services.k8s_worker.cluster import ClusterError
from services.k8s_worker.job_spec import job_of
from services.k8s_worker.kubernetes_runner import KubernetesRunner
from services.k8s_worker.runner import NoCapacityError, Run, RunEnd
from tests.support.conditions import eventually
from tests.support.kubernetes.checks import documented_rights
from tests.support.kubernetes.running import NAME, Gate, run, runner_on
from tests.support.kubernetes.server import KubernetesStandIn

IMAGE = "docker.io/library/python:3.13-slim"


async def started(runner: KubernetesRunner, gate: Gate) -> asyncio.Task[Run]:
    running = asyncio.create_task(run(runner, gate.script))
    await gate.begun()
    return running


async def test_a_script_that_exceeds_its_memory_is_reported(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    running = await started(runner, gate)
    await cluster.kubelet.end(cluster.pod()["metadata"]["name"], 0, "OOMKilled")
    ended = await running

    assert (ended.end, ended.exit_code, ended.stdout) == (RunEnd.OUT_OF_MEMORY, -9, "begun\n")
    assert "OOMKilled" in ended.stderr


async def test_an_evicted_script_is_not_run_again(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    running = await started(runner, gate)
    await cluster.controller.evict(cluster.pod(), "The node was low on resource: memory.")
    ended = await running

    assert (ended.end, ended.stdout) == (RunEnd.EVICTED, "begun\n")
    assert "Evicted: The node was low on resource: memory." in ended.stderr
    assert gate.journal == ["begin"]


@pytest.mark.parametrize(
    ("where", "trouble"),
    [
        (IMAGE, {"reason": "ImagePullBackOff", "message": "Back-off pulling image: not found"}),
        (IMAGE, {"reason": "CreateContainerConfigError", "message": "no such secret"}),
        ("", {"reason": "Unschedulable", "message": "0/3 nodes are available: 3 Insufficient cpu."}),
    ],
    ids=lambda part: part["reason"] if isinstance(part, dict) else "",
)
async def test_a_pod_that_does_not_start_fails_with_the_reason_of_the_cluster(
    cluster: KubernetesStandIn, where: str, trouble: dict[str, Any]
) -> None:
    cluster.kubelet.trouble[where] = trouble
    async with runner_on(cluster, start_seconds=1) as runner:
        ended = await run(runner, "print()")

    assert (ended.end, ended.stderr) == (RunEnd.NOT_STARTED, f"{trouble['reason']}: {trouble['message']}")
    assert cluster.deletions == [(NAME, "Foreground")]
    assert not cluster.objects.jobs


async def test_an_invalid_image_name_fails_without_waiting(
    runner: KubernetesRunner, cluster: KubernetesStandIn
) -> None:
    cluster.kubelet.trouble[IMAGE] = {"reason": "InvalidImageName", "message": "couldn't parse image name"}

    ended = await run(runner, "print()")

    assert (ended.end, ended.stderr) == (RunEnd.NOT_STARTED, "InvalidImageName: couldn't parse image name")


async def test_waiting_for_a_pod_has_a_limit(cluster: KubernetesStandIn) -> None:
    cluster.controller.makes_pods = False
    async with runner_on(cluster, start_seconds=1) as runner:
        ended = await run(runner, "print()")

    assert (ended.end, ended.stderr) == (RunEnd.NOT_STARTED, "the cluster has not created a pod")


async def test_a_pod_deleted_before_its_output_was_read_is_lost(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    running = await started(runner, gate)
    cluster.refuse("get", "pods/log", 503, times=3)
    await cluster.controller.delete_pod(cluster.pod())
    ended = await running

    assert (ended.end, ended.stderr) == (RunEnd.LOST, "its pod was deleted before its output was read")


async def test_a_job_without_its_pod_is_lost(runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate) -> None:
    gate.open()
    await run(runner, gate.script)
    await cluster.controller.delete_pod(cluster.pod())

    ended = await run(runner, gate.script)

    assert (ended.end, ended.stdout) == (RunEnd.LOST, "")
    assert gate.journal == ["begin", "end"]


async def test_a_deleted_job_is_lost(runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate) -> None:
    running = await started(runner, gate)
    cluster.controller.delete(cluster.objects.jobs[NAME], "Background")
    ended = await running

    assert ended.end is RunEnd.LOST
    assert cluster.made == [NAME]


async def test_a_job_deleted_before_it_had_a_pod_is_lost(cluster: KubernetesStandIn) -> None:
    cluster.controller.makes_pods = False
    async with runner_on(cluster, start_seconds=1) as runner:
        running = asyncio.create_task(run(runner, "print()"))
        await eventually(lambda: cluster.requests.count(("watch", "pods")) == 1)
        cluster.controller.delete(cluster.objects.jobs[NAME], "Background")
        ended = await running

    assert (ended.end, ended.stderr) == (RunEnd.LOST, "its Job was deleted")


async def test_a_job_ended_by_the_cluster_at_its_deadline_has_timed_out(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    running = await started(runner, gate)
    job = cluster.objects.jobs[NAME]
    job["status"]["conditions"] = [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]
    await cluster.controller.delete_pod(cluster.pod())

    assert (await running).end is RunEnd.TIMED_OUT


async def test_a_job_that_timed_out_without_a_watch_has_timed_out(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    gate.open()
    await run(runner, gate.script)
    await cluster.controller.delete_pod(cluster.pod())
    failed = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "was active too long"}
    cluster.objects.jobs[NAME]["status"]["conditions"] = [failed]

    ended = await run(runner, gate.script)

    assert (ended.end, ended.stderr) == (RunEnd.TIMED_OUT, "DeadlineExceeded: was active too long")


@pytest.mark.parametrize(
    ("verb", "resource", "code"),
    [
        ("create", "jobs", 429),
        ("create", "jobs", 500),
        ("get", "jobs", 503),
        ("list", "pods", 504),
        ("watch", "pods", 429),
        ("watch", "pods", 503),
        ("get", "pods/log", 500),
    ],
    ids=lambda part: str(part).replace("/", " "),
)
async def test_requests_to_an_overloaded_api_are_retried(
    runner: KubernetesRunner, cluster: KubernetesStandIn, verb: str, resource: str, code: int
) -> None:
    cluster.refuse(verb, resource, code, times=2)

    assert (await run(runner, "print(1)")).stdout == "1\n"
    assert cluster.requests.count((verb, resource)) >= (1 if verb == "watch" else 3)  # a short run needs no watch
    assert len(cluster.kubelet.started) == 1


async def test_retry_after_of_the_api_is_respected(
    runner: KubernetesRunner, cluster: KubernetesStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.refuse("create", "jobs", 429, retry_after=1)

    await run(runner, "print(1)")

    assert "could not create a Job: 429 Refused: refused by the test; trying again in 1.0 s" in caplog.text
    assert cluster.requests.count(("create", "jobs")) == 2


async def test_a_lost_response_creates_no_second_job(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    cluster.drop("create", "jobs", afterwards=True)
    gate.open()

    assert (await run(runner, gate.script)).end is RunEnd.EXITED
    assert cluster.requests.count(("create", "jobs")) == 2
    assert gate.journal == ["begin", "end"]


@pytest.mark.parametrize("resource", ["jobs", "pods", "pods/log"], ids=lambda part: part.replace("/", " "))
async def test_requests_on_dropped_connections_are_retried(
    runner: KubernetesRunner, cluster: KubernetesStandIn, resource: str
) -> None:
    for verb in ("create", "get", "list", "watch"):
        cluster.drop(verb, resource)

    assert (await run(runner, "print(1)")).stdout == "1\n"


async def test_a_broken_watch_misses_no_event(runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate) -> None:
    running = await started(runner, gate)
    await eventually(cluster.break_watches)
    gate.open()

    assert (await running).stdout == "begun\nended\n"


async def test_an_outdated_watch_lists_again(runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate) -> None:
    running = await started(runner, gate)
    listed = cluster.requests.count(("list", "pods"))
    cluster.objects.forget_history()
    await eventually(cluster.break_watches)
    gate.open()

    assert (await running).stdout == "begun\nended\n"
    assert cluster.requests.count(("list", "pods")) > listed


async def test_watches_that_break_immediately_are_retried_with_backoff(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_watch, "FIRST_PAUSE", 0.1)
    cluster.drop("watch", "pods", times=1_000)
    begun_at = time.monotonic()
    running = asyncio.create_task(run(runner, gate.script))
    await eventually(lambda: cluster.requests.count(("list", "pods")) == 4)
    took = time.monotonic() - begun_at
    gate.open()

    assert took > 0.2 + 0.4 + 0.8
    assert (await running).end is RunEnd.EXITED


async def test_an_api_outage_during_a_job_costs_no_attempt(
    cluster: KubernetesStandIn, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_watch, "FIRST_PAUSE", 0.05)
    async with runner_on(cluster, api_patience_seconds=0.1) as runner:
        running = await started(runner, gate)
        cluster.refuse("get", "jobs", 503, times=3)
        await eventually(cluster.break_watches)
        gate.open()

        assert (await running).stdout == "begun\nended\n"


@pytest.mark.parametrize(
    ("verb", "resource"), [("create", "jobs"), ("get", "pods/log")], ids=lambda part: part.replace("/", " ")
)
async def test_a_long_api_outage_is_not_stored_as_an_outcome(
    cluster: KubernetesStandIn, gate: Gate, verb: str, resource: str
) -> None:
    gate.open()
    cluster.refuse(verb, resource, 503, times=5)
    async with runner_on(cluster, api_patience_seconds=0.2) as runner:
        with pytest.raises(ClusterError, match="503"):
            await run(runner, gate.script)
        cluster.faults.clear()

        assert (await run(runner, gate.script)).stdout == "begun\nended\n"
    assert gate.journal == ["begin", "end"]


async def test_an_api_that_never_responds_is_an_error(
    cluster: KubernetesStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "REQUEST_SECONDS", 0.2)
    cluster.keep_waiting("create", "jobs", times=20)
    async with runner_on(cluster, api_patience_seconds=0.5) as runner:
        with pytest.raises(ClusterError, match="could not create a Job: TimeoutError"):
            await run(runner, "print()")


@pytest.mark.parametrize("code", [400, 413, 422])
async def test_a_job_refused_by_the_cluster_is_not_retried(
    runner: KubernetesRunner, cluster: KubernetesStandIn, code: int
) -> None:
    cluster.refuse("create", "jobs", code)

    with pytest.raises(PermanentError, match=f"refuses to create a Job: {code} Refused"):
        await run(runner, "print()")

    assert cluster.requests == [("create", "jobs")]


async def test_a_job_beyond_the_quota_waits_for_capacity(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    cluster.most_jobs = 0
    gate.open()

    with pytest.raises(NoCapacityError, match=r"exceeded quota: scripts, requested: count/jobs\.batch=1"):
        await run(runner, gate.script)
    cluster.most_jobs = 1

    assert (await run(runner, gate.script)).stdout == "begun\nended\n"
    assert gate.journal == ["begin", "end"]


async def test_a_cluster_that_accepts_no_requests_has_no_capacity(cluster: KubernetesStandIn) -> None:
    cluster.refuse("create", "jobs", 429, times=5)
    async with runner_on(cluster, api_patience_seconds=0.2) as runner:
        with pytest.raises(NoCapacityError, match="could not create a Job: 429"):
            await run(runner, "print()")


@pytest.mark.parametrize("code", [401, 403, 503])
async def test_other_refusals_are_no_lack_of_capacity(cluster: KubernetesStandIn, code: int) -> None:
    cluster.refuse("create", "jobs", code, times=5)
    async with runner_on(cluster, api_patience_seconds=0.2) as runner:
        with pytest.raises(ClusterError, match=str(code)):
            await run(runner, "print()")


async def test_the_stand_in_refuses_unknown_fields(
    runner: KubernetesRunner, cluster: KubernetesStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_typo(*arguments: Any) -> dict[str, Any]:
        job = job_of(*arguments)
        job["spec"]["backofLimit"] = job["spec"].pop("backoffLimit")
        return job

    monkeypatch.setattr(kubernetes_runner, "job_of", with_a_typo)

    with pytest.raises(PermanentError, match=r"422 Invalid: .*'backofLimit' was unexpected"):
        await run(runner, "print()")


@pytest.mark.parametrize(("verb", "resource"), sorted(documented_rights()), ids=lambda part: part.replace("/", " "))
async def test_each_documented_permission_is_needed_and_reported_if_missing(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate, verb: str, resource: str
) -> None:
    cluster.rights.remove((verb, resource))
    gate.open()

    async def run_and_discard() -> None:
        await run(runner, gate.script)
        await runner.discard(NAME)

    with pytest.raises(ClusterError, match=f'cannot {verb} resource "{resource}"'):
        await run_and_discard()


async def test_no_other_permission_is_needed(runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate) -> None:
    running = asyncio.create_task(run(runner, gate.script))
    await eventually(lambda: ("watch", "pods") in cluster.requests)
    gate.open()
    await running
    await run(runner, gate.script)
    await runner.discard(NAME)

    assert set(cluster.requests) == documented_rights()


async def test_a_namespace_without_permissions_is_reported(cluster: KubernetesStandIn) -> None:
    async with runner_on(cluster, namespace="elsewhere") as runner:
        with pytest.raises(ClusterError, match='in the namespace "elsewhere"'):
            await run(runner, "print()")
