"""Run scripts on the fake cluster, for the tests of the runner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.events import CreatePodCommand
from services.k8s_worker.kubernetes_runner import KubernetesRunner, kubernetes_runner
from services.k8s_worker.pod_status import has_begun
from services.k8s_worker.runner import Run
from services.settings import KubernetesSection, PlatformSection
from tests.support.conditions import eventually
from tests.support.kubernetes.server import KubernetesStandIn

NAME = "exec-0123456789abcdef01234567"


def settings_of(cluster: KubernetesStandIn, **kubernetes: object) -> PlatformSection:
    section = KubernetesSection.model_validate(
        {"kubeconfig": str(cluster.kubeconfig), "api_patience_seconds": 20, **kubernetes}
    )
    return PlatformSection(runner="kubernetes", kubernetes=section, output_limit_bytes=1_000)


@asynccontextmanager
async def runner_on(cluster: KubernetesStandIn, **kubernetes: object) -> AsyncIterator[KubernetesRunner]:
    """Open a runner with additional settings in `[platform.kubernetes]`."""
    async with kubernetes_runner(settings_of(cluster, **kubernetes)) as runner:
        yield runner


def command(script: str, **fields: object) -> CreatePodCommand:
    return CreatePodCommand.model_validate(
        {"execution_id": "e1", "saga_id": "s1", "script": script, "timeout_seconds": 30, **fields}
    )


async def run(runner: KubernetesRunner, script: str, *, stop: asyncio.Event | None = None, **fields: object) -> Run:
    return await runner.run(NAME, command(script, **fields), stop or asyncio.Event())


class Gate:
    """A script that writes its start and end to a journal, and waits in between until `open` is called."""

    def __init__(self, folder: Path, cluster: KubernetesStandIn) -> None:
        self._journal, self._open = folder / "journal", folder / "open"
        self._cluster = cluster

    @property
    def script(self) -> str:
        return (
            f"import os, time\n"
            f"def note(word): open({str(self._journal)!r}, 'a').write(word + '\\n')\n"
            f"print('begun', flush=True); note('begin')\n"
            f"while not os.path.exists({str(self._open)!r}): time.sleep(0.02)\n"
            f"note('end'); print('ended')\n"
        )

    @property
    def journal(self) -> list[str]:
        return self._journal.read_text().split() if self._journal.exists() else []

    async def begun(self) -> None:
        """Wait until the script has begun, and the status of its pod says so, which is later."""
        await eventually(lambda: "begin" in self.journal and has_begun(self._cluster.objects.pods.values()))

    def open(self) -> None:
        self._open.touch()
