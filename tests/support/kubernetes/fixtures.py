"""Fixture: `cluster`, the stand-in for a Kubernetes cluster, of a test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.kubernetes.server import KubernetesStandIn


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[KubernetesStandIn]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    async with KubernetesStandIn(folder) as cluster:
        yield cluster
