"""What goes wrong in a cluster, and between us and it, as a stand-in for the API server has it."""

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
from services.k8s_worker.runner import Run, RunEnd
from tests.support.conditions import eventually
from tests.support.kubernetes.checks import documented_rights
from tests.support.kubernetes.running import NAME, Gate, run, runner_on
from tests.support.kubernetes.server import KubernetesStandIn

IMAGE = "docker.io/library/python:3.13-slim"


async def begun(runner: KubernetesRunner, gate: Gate) -> asyncio.Task[Run]:
    running = asyncio.create_task(run(runner, gate.script))
    await gate.begun()
    return running


async def test_a_script_that_wants_too_much_memory(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    running = await begun(runner, gate)
    await cluster.kubelet.end(cluster.pod()["metadata"]["name"], 0, "OOMKilled")
    ended = await running

    assert (ended.end, ended.exit_code, ended.stdout) == (RunEnd.OUT_OF_MEMORY, -9, "begun\n")
    assert "OOMKilled" in ended.stderr


async def test_an_evicted_script_is_not_run_again(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    running = await begun(runner, gate)
    await cluster.controller.evict(cluster.pod(), "The node was low on resource: memory.")
    ended = await running

    assert (ended.end, ended.stdout) == (RunEnd.EVICTED, "begun\n")
    assert "Evicted: The node was low on resource: memory." in ended.stderr
    assert gate.journal == ["begin"]


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (IMAGE, {"reason": "ImagePullBackOff", "message": "Back-off pulling image: not found"}),
        (IMAGE, {"reason": "CreateContainerConfigError", "message": "no such secret"}),
        ("", {"reason": "Unschedulable", "message": "0/3 nodes are available: 3 Insufficient cpu."}),
    ],
    ids=lambda part: part["reason"] if isinstance(part, dict) else "",
)
async def test_a_pod_that_does_not_begin_fails_with_the_clusters_reason(
    cluster: KubernetesStandIn, where: str, told: dict[str, Any]
) -> None:
    cluster.kubelet.trouble[where] = told
    async with runner_on(cluster, start_seconds=1) as runner:
        ended = await run(runner, "print()")

    assert (ended.end, ended.stderr) == (RunEnd.NOT_STARTED, f"{told['reason']}: {told['message']}")
    assert cluster.deletions == [(NAME, "Foreground")]
    assert not cluster.objects.jobs


async def test_an_image_with_an_impossible_name_is_not_waited_for(
    runner: KubernetesRunner, cluster: KubernetesStandIn
) -> None:
    cluster.kubelet.trouble[IMAGE] = {"reason": "InvalidImageName", "message": "couldn't parse image name"}

    ended = await run(runner, "print()")

    assert (ended.end, ended.stderr) == (RunEnd.NOT_STARTED, "InvalidImageName: couldn't parse image name")


async def test_a_job_without_a_pod_is_not_waited_for_for_ever(cluster: KubernetesStandIn) -> None:
    cluster.controller.makes_pods = False
    async with runner_on(cluster, start_seconds=1) as runner:
        ended = await run(runner, "print()")

    assert (ended.end, ended.stderr) == (RunEnd.NOT_STARTED, "the cluster has not created a pod")


async def test_a_pod_that_was_deleted_with_its_output_is_lost(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    running = await begun(runner, gate)
    cluster.refuse("get", "pods/log", 503, times=3)
    await cluster.controller.delete_pod(cluster.pod())
    ended = await running

    assert (ended.end, ended.stderr) == (RunEnd.LOST, "its pod was deleted before its output was read")


async def test_a_job_whose_pod_is_gone_is_lost(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    gate.open()
    await run(runner, gate.script)
    await cluster.controller.delete_pod(cluster.pod())

    ended = await run(runner, gate.script)

    assert (ended.end, ended.stdout) == (RunEnd.LOST, "")
    assert gate.journal == ["begin", "end"]


async def test_a_job_that_somebody_deletes_is_lost(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    running = await begun(runner, gate)
    cluster.controller.delete(cluster.objects.jobs[NAME], "Background")
    ended = await running

    assert ended.end is RunEnd.LOST
    assert cluster.made == [NAME]


async def test_a_job_that_is_deleted_before_it_had_a_pod_is_lost(cluster: KubernetesStandIn) -> None:
    cluster.controller.makes_pods = False
    async with runner_on(cluster, start_seconds=1) as runner:
        running = asyncio.create_task(run(runner, "print()"))
        await eventually(lambda: cluster.requests.count(("watch", "pods")) == 1)
        cluster.controller.delete(cluster.objects.jobs[NAME], "Background")
        ended = await running

    assert (ended.end, ended.stderr) == (RunEnd.LOST, "its Job was deleted")


async def test_a_job_that_the_cluster_ends_at_its_deadline_has_timed_out(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    running = await begun(runner, gate)
    job = cluster.objects.jobs[NAME]
    job["status"]["conditions"] = [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]
    await cluster.controller.delete_pod(cluster.pod())

    assert (await running).end is RunEnd.TIMED_OUT


async def test_a_job_that_was_ended_at_its_deadline_while_nobody_watched_has_timed_out(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    gate.open()
    await run(runner, gate.script)
    await cluster.controller.delete_pod(cluster.pod())
    told = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "was active too long"}
    cluster.objects.jobs[NAME]["status"]["conditions"] = [told]

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
async def test_an_overloaded_api_is_asked_again(
    runner: KubernetesRunner, cluster: KubernetesStandIn, verb: str, resource: str, code: int
) -> None:
    cluster.refuse(verb, resource, code, times=2)

    assert (await run(runner, "print(1)")).stdout == "1\n"
    assert cluster.requests.count((verb, resource)) >= (1 if verb == "watch" else 3)  # a short run is seen without one
    assert len(cluster.kubelet.started) == 1


async def test_the_api_says_how_long_to_stay_away(
    runner: KubernetesRunner, cluster: KubernetesStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.refuse("create", "jobs", 429, retry_after=1)

    await run(runner, "print(1)")

    assert "could not create a Job: 429 Refused: refused by the test; trying again in 1.0 s" in caplog.text
    assert cluster.requests.count(("create", "jobs")) == 2


async def test_an_answer_that_is_lost_makes_no_second_job(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    cluster.drop("create", "jobs", afterwards=True)
    gate.open()

    assert (await run(runner, gate.script)).end is RunEnd.EXITED
    assert cluster.requests.count(("create", "jobs")) == 2
    assert gate.journal == ["begin", "end"]


@pytest.mark.parametrize("resource", ["jobs", "pods", "pods/log"], ids=lambda part: part.replace("/", " "))
async def test_dropped_connections_are_made_again(
    runner: KubernetesRunner, cluster: KubernetesStandIn, resource: str
) -> None:
    for verb in ("create", "get", "list", "watch"):
        cluster.drop(verb, resource)

    assert (await run(runner, "print(1)")).stdout == "1\n"


async def test_a_watch_that_breaks_misses_nothing(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    running = await begun(runner, gate)
    await eventually(cluster.break_watches)
    gate.open()

    assert (await running).stdout == "begun\nended\n"


async def test_an_outdated_watch_lists_again(runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate) -> None:
    running = await begun(runner, gate)
    listed = cluster.requests.count(("list", "pods"))
    cluster.objects.forget_history()
    await eventually(cluster.break_watches)
    gate.open()

    assert (await running).stdout == "begun\nended\n"
    assert cluster.requests.count(("list", "pods")) > listed


async def test_watches_that_break_at_once_are_no_busy_loop(
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


async def test_while_a_job_runs_an_api_that_is_away_costs_no_attempt(
    cluster: KubernetesStandIn, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_watch, "FIRST_PAUSE", 0.05)
    async with runner_on(cluster, api_patience_seconds=0.1) as runner:
        running = await begun(runner, gate)
        cluster.refuse("get", "jobs", 503, times=3)
        await eventually(cluster.break_watches)
        gate.open()

        assert (await running).stdout == "begun\nended\n"


@pytest.mark.parametrize(
    ("verb", "resource"), [("create", "jobs"), ("get", "pods/log")], ids=lambda part: part.replace("/", " ")
)
async def test_an_api_that_stays_away_is_no_outcome(
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


async def test_an_api_that_says_nothing_is_given_up(
    cluster: KubernetesStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "REQUEST_SECONDS", 0.2)
    cluster.keep_waiting("create", "jobs", times=20)
    async with runner_on(cluster, api_patience_seconds=0.5) as runner:
        with pytest.raises(ClusterError, match="could not create a Job: TimeoutError"):
            await run(runner, "print()")


@pytest.mark.parametrize("code", [400, 413, 422])
async def test_a_job_that_the_cluster_will_never_take_is_not_tried_again(
    runner: KubernetesRunner, cluster: KubernetesStandIn, code: int
) -> None:
    cluster.refuse("create", "jobs", code)

    with pytest.raises(PermanentError, match=f"refuses to create a Job: {code} Refused"):
        await run(runner, "print()")

    assert cluster.requests == [("create", "jobs")]


async def test_the_stand_in_refuses_what_the_published_schema_does_not_know(
    runner: KubernetesRunner, cluster: KubernetesStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_slip(*arguments: Any) -> dict[str, Any]:
        job = job_of(*arguments)
        job["spec"]["backofLimit"] = job["spec"].pop("backoffLimit")
        return job

    monkeypatch.setattr(kubernetes_runner, "job_of", with_a_slip)

    with pytest.raises(PermanentError, match=r"422 Invalid: .*'backofLimit' was unexpected"):
        await run(runner, "print()")


@pytest.mark.parametrize(("verb", "resource"), sorted(documented_rights()), ids=lambda part: part.replace("/", " "))
async def test_each_documented_right_is_needed_and_its_lack_is_told(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate, verb: str, resource: str
) -> None:
    cluster.rights.remove((verb, resource))
    gate.open()

    async def run_and_discard() -> None:
        await run(runner, gate.script)
        await runner.discard(NAME)

    with pytest.raises(ClusterError, match=f'cannot {verb} resource "{resource}"'):
        await run_and_discard()


async def test_no_other_right_is_needed(runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate) -> None:
    gate.open()
    await run(runner, gate.script)
    await run(runner, gate.script)
    await runner.discard(NAME)

    assert set(cluster.requests) == documented_rights()


async def test_a_namespace_that_is_not_ours_is_told(cluster: KubernetesStandIn) -> None:
    async with runner_on(cluster, namespace="elsewhere") as runner:
        with pytest.raises(ClusterError, match='in the namespace "elsewhere"'):
            await run(runner, "print()")
