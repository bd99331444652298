"""The Kubernetes runner on a stand-in for the API server, tests/support/kubernetes, instead of a cluster."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest
from kubernetes_asyncio.config import incluster_config

from integr8s_idem.errors import PermanentError
from services.events import MAX_SCRIPT_CHARACTERS
from services.k8s_worker import connection
from services.k8s_worker.cluster import ClusterError
from services.k8s_worker.kubernetes_runner import KubernetesRunner
from services.k8s_worker.runner import RunEnd, UnsupportedLanguageError
from tests.support.conditions import eventually
from tests.support.kubernetes.running import NAME, Gate, command, run, runner_on
from tests.support.kubernetes.server import TOKEN, KubernetesStandIn
from tests.support.tls import Authority


async def cancelled(running: asyncio.Task[object]) -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_script_runs_as_a_job(runner: KubernetesRunner, cluster: KubernetesStandIn) -> None:
    ended = await run(runner, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")

    assert (ended.end, ended.exit_code, ended.stdout, ended.stderr) == (RunEnd.EXITED, 3, "out\nerr\n", "")
    assert 0 < ended.usage.cpu_seconds < 5
    assert 0 < ended.usage.wall_seconds < 30
    assert ended.usage.peak_memory_kib > 1_000
    assert cluster.made == [NAME]


async def test_a_signal_is_reported_like_that_of_a_child_process(runner: KubernetesRunner) -> None:
    ended = await run(runner, "import os; os.kill(os.getpid(), 11)")

    assert (ended.end, ended.exit_code) == (RunEnd.EXITED, -signal.SIGSEGV)


async def test_a_script_has_only_its_file_and_no_environment(runner: KubernetesRunner) -> None:
    ended = await run(runner, "import os, sys; print(dict(os.environ), sys.argv, os.listdir(), sys.stdin.read())")

    assert ended.stdout.replace("'LC_CTYPE': 'C.UTF-8'", "") == "{} ['main.py'] ['main.py'] \n"


async def test_the_cluster_expands_no_variables_in_a_script(runner: KubernetesRunner) -> None:
    ended = await run(runner, "print('$(EXECUTION_0) $$ $(HOME)')")

    assert ended.stdout == "$(EXECUTION_0) $$ $(HOME)\n"


async def test_the_largest_script_fits_even_if_it_hardly_compresses(runner: KubernetesRunner) -> None:
    end = "'; print(len(x))"
    characters = random.Random(1).choices(range(0x10000, 0x10FFFF), k=MAX_SCRIPT_CHARACTERS - len(end) - 5)
    script = "x = '" + "".join(map(chr, characters)) + end

    assert len(script) == MAX_SCRIPT_CHARACTERS
    assert (await run(runner, script)).stdout == f"{len(characters)}\n"


async def test_a_script_is_ended_at_its_time_limit_and_its_output_kept(runner: KubernetesRunner) -> None:
    ended = await run(runner, "import time; print('begun'); time.sleep(600)", timeout_seconds=1)

    assert (ended.end, ended.exit_code, ended.stdout) == (RunEnd.TIMED_OUT, -signal.SIGKILL, "begun\n")
    assert 1 <= ended.usage.wall_seconds < 20


async def test_truncated_output_is_marked(runner: KubernetesRunner, cluster: KubernetesStandIn) -> None:
    ended = await run(runner, "print('x' * 100_000, end='')")

    assert ended.stdout == "x" * 1_000 + "\n[cut off here: 99000 more bytes]"
    assert len(cluster.kubelet.log_of(cluster.pod()["metadata"]["name"])) == 1_000


async def test_a_script_that_floods_its_output_is_ended(cluster: KubernetesStandIn) -> None:
    async with runner_on(cluster) as runner:
        ended = await run(runner, "while True: print('x' * 10_000)", timeout_seconds=60)

    assert ended.end is RunEnd.FLOODED
    assert len(ended.stdout) < 1_100


async def test_a_rerun_after_a_cancelled_run_continues_with_its_job(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    first = asyncio.create_task(run(runner, gate.script))
    await gate.begun()
    await cancelled(first)
    async with runner_on(cluster) as another:
        second = asyncio.create_task(run(another, gate.script))
        await eventually(lambda: cluster.requests.count(("watch", "pods")) == 2)
        gate.open()
        ended = await second

    assert (ended.end, ended.exit_code, ended.stdout) == (RunEnd.EXITED, 0, "begun\nended\n")
    assert gate.journal == ["begin", "end"]
    assert cluster.made == [NAME]
    assert cluster.deletions == []


async def test_a_rerun_after_the_end_of_the_script_returns_its_output(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    first = asyncio.create_task(run(runner, gate.script))
    await gate.begun()
    await cancelled(first)
    gate.open()
    await eventually(lambda: cluster.pod()["status"]["phase"] == "Succeeded")

    assert (await run(runner, gate.script)).stdout == "begun\nended\n"
    assert gate.journal == ["begin", "end"]


async def test_two_workers_with_one_job_return_the_same_result(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    """The first worker has stalled beyond its lease and has not noticed yet."""
    async with runner_on(cluster) as another:
        both = [asyncio.create_task(run(each, gate.script)) for each in (runner, another)]
        await gate.begun()
        gate.open()
        first, second = await asyncio.gather(*both)

    assert first == second
    assert gate.journal == ["begin", "end"]


@pytest.mark.parametrize(
    "change",
    [
        {"labels": {}},
        {"annotations": {}},
        {"annotations": {"integr8s-idem/fingerprint": "0123"}},
    ],
    ids=["no label", "no fingerprint", "another fingerprint"],
)
async def test_a_job_of_another_command_is_never_adopted(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate, change: dict[str, dict[str, str]]
) -> None:
    first = asyncio.create_task(run(runner, gate.script))
    await gate.begun()
    await cancelled(first)
    cluster.objects.jobs[NAME]["metadata"] |= change

    with pytest.raises(PermanentError, match=f"Job {NAME} already exists for another command"):
        await run(runner, gate.script)

    assert cluster.deletions == []


async def test_a_job_of_another_program_is_not_discarded(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    gate.open()
    await run(runner, gate.script)
    cluster.objects.jobs[NAME]["metadata"]["labels"] = {}

    await runner.discard(NAME)

    assert NAME in cluster.objects.jobs


async def test_a_stopped_run_ends_the_script_and_returns_its_output(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(run(runner, gate.script, stop=stop))
    await gate.begun()
    stop.set()
    ended = await running

    assert (ended.end, ended.stdout) == (RunEnd.STOPPED, "begun\n")
    assert cluster.deletions == [(NAME, "Foreground")]
    assert not cluster.objects.jobs
    assert not cluster.objects.pods
    gate.open()
    assert gate.journal == ["begin"]


async def test_stopping_an_ended_run_returns_its_result(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    gate.open()
    stop = asyncio.Event()
    stop.set()
    await run(runner, gate.script)

    assert (await run(runner, gate.script, stop=stop)).end is RunEnd.EXITED


async def test_discarding_a_job_deletes_its_pod(
    runner: KubernetesRunner, cluster: KubernetesStandIn, gate: Gate
) -> None:
    gate.open()
    await run(runner, gate.script)

    await runner.discard(NAME)
    await runner.discard(NAME)

    assert cluster.deletions == [(NAME, "Background")]
    await eventually(lambda: not cluster.objects.pods)


async def test_the_cluster_removes_a_finished_job_that_is_not_discarded(cluster: KubernetesStandIn) -> None:
    async with runner_on(cluster, ttl_seconds=1) as runner:
        await run(runner, "print()")

    await eventually(lambda: not cluster.objects.jobs and not cluster.objects.pods)


async def test_a_version_without_an_image_is_refused(runner: KubernetesRunner, cluster: KubernetesStandIn) -> None:
    with pytest.raises(UnsupportedLanguageError, match=r"unsupported language python:2\.7; supported: python$"):
        await run(runner, "print 1", language_version="2.7")

    assert cluster.requests == []


async def test_in_a_cluster_the_service_account_of_the_pod_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters give every pod two variables, a token and a certificate."""
    authority, token = Authority(tmp_path), tmp_path / "token"
    token.write_text(TOKEN)
    async with KubernetesStandIn(tmp_path, authority.server_context()) as cluster:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(cluster.port))
        monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority.ca_file))
        async with runner_on(cluster, kubeconfig=None) as runner:
            assert (await run(runner, "print(1)")).stdout == "1\n"


async def test_nothing_is_sent_to_a_cluster_with_an_untrusted_certificate(tmp_path: Path) -> None:
    async with KubernetesStandIn(tmp_path, Authority(tmp_path).server_context()) as cluster:
        cluster.kubeconfig.write_text(cluster.kubeconfig.read_text().replace("http://", "https://"))
        async with runner_on(cluster, api_patience_seconds=0.1) as runner:
            with pytest.raises(ClusterError, match="CERTIFICATE_VERIFY_FAILED"):
                await run(runner, "print(1)")

    assert cluster.requests == []


async def test_a_replaced_token_is_read_again(cluster: KubernetesStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REFRESH_SECONDS", 0.0)
    async with runner_on(cluster) as runner:
        cluster.token = "another-token"
        cluster.write_kubeconfig("another-token")

        assert (await run(runner, "print(1)")).stdout == "1\n"


async def test_the_runner_waits_for_a_temporarily_unreadable_token(
    cluster: KubernetesStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REFRESH_SECONDS", 0.0)
    async with runner_on(cluster) as runner:
        cluster.kubeconfig.write_text("{{{")
        running = asyncio.create_task(run(runner, "print(1)"))
        await asyncio.sleep(0.1)
        cluster.write_kubeconfig()

        assert (await running).stdout == "1\n"


async def test_commands_with_equal_content_use_the_same_job(
    runner: KubernetesRunner, cluster: KubernetesStandIn
) -> None:
    """Commands are guarded by their content: a copy has another event ID and timestamp."""
    await run(runner, "print(1)")

    assert command("print(1)").event_id != command("print(1)").event_id
    assert (await run(runner, "print(1)")).stdout == "1\n"
    assert cluster.kubelet.started == [cluster.pod()["metadata"]["name"]]
