"""Fixture `cluster`: a fake Kubernetes cluster for a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.k8s_worker.kubernetes_runner import KubernetesRunner
from tests.support.kubernetes.running import Gate, runner_on
from tests.support.kubernetes.server import KubernetesStandIn


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[KubernetesStandIn]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    async with KubernetesStandIn(folder) as cluster:
        yield cluster


@pytest.fixture
async def runner(cluster: KubernetesStandIn) -> AsyncIterator[KubernetesRunner]:
    async with runner_on(cluster) as runner:
        yield runner


@pytest.fixture
def gate(tmp_path: Path, cluster: KubernetesStandIn) -> Gate:
    return Gate(tmp_path, cluster)
