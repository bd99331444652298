"""The Kubernetes runner before a stand-in for the API server (tests/support/kubernetes): no test here sees a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.events import CreatePodCommand
from services.k8s_worker.kubernetes_runner import KubernetesRunner, kubernetes_runner
from services.k8s_worker.runner import Run, RunEnd
from services.settings import KubernetesSection, PlatformSection
from tests.support.kubernetes.server import KubernetesStandIn

NAME = "exec-0123456789abcdef01234567"


def settings_of(cluster: KubernetesStandIn, **kubernetes: object) -> PlatformSection:
    section = KubernetesSection.model_validate(
        {"kubeconfig": str(cluster.kubeconfig), "api_patience_seconds": 5, **kubernetes}
    )
    return PlatformSection(runner="kubernetes", kubernetes=section)


@pytest.fixture
async def runner(cluster: KubernetesStandIn) -> AsyncIterator[KubernetesRunner]:
    async with kubernetes_runner(settings_of(cluster)) as runner:
        yield runner


def command(script: str, **fields: object) -> CreatePodCommand:
    return CreatePodCommand.model_validate(
        {"execution_id": "e1", "saga_id": "s1", "script": script, "timeout_seconds": 30, **fields}
    )


async def run(runner: KubernetesRunner, script: str, *, stop: asyncio.Event | None = None, **fields: object) -> Run:
    return await runner.run(NAME, command(script, **fields), stop or asyncio.Event())


async def test_a_script_runs_as_a_job(runner: KubernetesRunner, cluster: KubernetesStandIn) -> None:
    ended = await run(runner, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")

    assert (ended.end, ended.exit_code, ended.stdout, ended.stderr) == (RunEnd.EXITED, 3, "out\nerr\n", "")
    assert 0 < ended.usage.cpu_seconds < 5
    assert 0 < ended.usage.wall_seconds < 30
    assert ended.usage.peak_memory_kib > 1_000
    assert cluster.made == [NAME]
