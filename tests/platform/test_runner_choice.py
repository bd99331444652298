"""The runner is chosen by settings, and invalid settings are refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from integr8s_idem.config import load_settings
from integr8s_idem.errors import ApplicationError, SettingsError
from integr8s_idem.runtime import make_container
from providers import containers
from providers.settings import PlatformSettings
from services.k8s_worker.kubernetes_runner import KubernetesRunner
from services.k8s_worker.runner import Runner
from services.k8s_worker.runners import chosen_runner
from services.k8s_worker.subprocess_runner import SubprocessRunner
from services.settings import PlatformSection
from tests.support.kubernetes.server import KubernetesStandIn

ROOT = Path(__file__).parents[2]

IMPORT_ALL = """
import asyncio, sys
from providers import platform
from services.k8s_worker.runners import chosen_runner
from services.settings import PlatformSection

async def main():
    async with chosen_runner(PlatformSection(runner="subprocess", scripts_as_root=True)):
        print([name for name in sys.modules if name.startswith("kubernetes_asyncio")])

asyncio.run(main())
"""


def load(folder: Path, text: str) -> PlatformSettings:
    file = folder / "settings.toml"
    file.write_text(text)
    settings = load_settings(file, PlatformSettings)
    assert isinstance(settings, PlatformSettings)
    return settings


async def runner_of(settings: PlatformSettings) -> type[object]:
    container = make_container(containers.k8s_worker, settings)
    try:
        return type(await container.get(Runner))
    finally:
        await container.close()


async def test_settings_choose_the_runner(cluster: KubernetesStandIn, tmp_path: Path) -> None:
    store = f'[store]\nkind = "memory"\n[platform]\ndatabase_url = "sqlite+aiosqlite:///{tmp_path}/p.db"\n'
    local = 'runner = "subprocess"\nscripts_as_root = true\n'
    kubernetes = f'runner = "kubernetes"\n[platform.kubernetes]\nkubeconfig = "{cluster.kubeconfig}"\n'

    assert await runner_of(load(tmp_path, store + local)) is SubprocessRunner
    assert await runner_of(load(tmp_path, store + kubernetes)) is KubernetesRunner
    assert cluster.requests == []


def test_the_kubernetes_client_is_imported_only_for_its_runner() -> None:
    message = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, check=True)

    assert message.stdout == "[]\n"


async def test_a_missing_client_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("kubernetes_asyncio", "services.k8s_worker.kub"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("cluster", "connection"):
        monkeypatch.delitem(sys.modules, f"services.k8s_worker.{name}")
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)

    with pytest.raises(ApplicationError, match="pip install kubernetes-asyncio"):
        async with chosen_runner(PlatformSection(runner="kubernetes")):
            pass


async def test_a_worker_outside_a_cluster_needs_a_kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    with pytest.raises(
        SettingsError, match=r"platform\.kubernetes\.kubeconfig +is not set, and this process does not run in a pod"
    ):
        async with chosen_runner(PlatformSection(runner="kubernetes")):
            pass


@pytest.mark.parametrize(
    ("text", "context", "expected"),
    [
        (None, None, ""),
        ("{{{", None, ""),
        ("a: [1", None, ""),
        ("apiVersion: v1\nkind: Config\n", None, ""),
        ("cluster", "another", "another"),
    ],
    ids=["missing", "not YAML", "truncated YAML", "empty", "unknown context"],
)
async def test_an_unusable_kubeconfig_is_reported(
    cluster: KubernetesStandIn, tmp_path: Path, text: str | None, context: str | None, expected: str
) -> None:
    file = cluster.kubeconfig if text == "cluster" else tmp_path / "config"
    if text not in (None, "cluster"):
        file.write_text(text or "")
    section = {"runner": "kubernetes", "kubernetes": {"kubeconfig": str(file), "context": context}}

    with pytest.raises(SettingsError) as refused:
        async with chosen_runner(PlatformSection.model_validate(section)):
            pass

    message = " ".join(str(refused.value).split())
    assert f'platform.kubernetes.kubeconfig = "{file}" does not name a usable cluster' in message
    assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('runner = "docker"', "runner"),
        ('[platform.kubernetes]\nnamespace = "No_Label"', "platform.kubernetes.namespace"),
        ('[platform.kubernetes.images]\ncobol = "cobol:85"', "platform.kubernetes.images"),
        ("[platform.kubernetes.images]", "platform.kubernetes.images"),
        ("[platform.kubernetes]\nuser_id = 0", "platform.kubernetes.user_id"),
        ('[platform.kubernetes]\nkubeconfg = "x"', "did you mean kubeconfig?"),
    ],
    ids=["runner", "namespace", "language", "no image", "root", "typo"],
)
def test_invalid_settings_are_reported(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, f"[platform]\n{text}\n")

    assert expected in str(refused.value)


def test_the_ttl_of_a_finished_job_must_exceed_the_time_of_a_takeover(tmp_path: Path) -> None:
    lease = "[idempotency]\nprocessing_timeout_seconds = 300\n[kafka]\nsession_timeout_seconds = 45\n"
    runner = '[platform]\nrunner = "kubernetes"\n'

    with pytest.raises(SettingsError) as refused:
        load(tmp_path, f"{lease}{runner}[platform.kubernetes]\nttl_seconds = 345\n")

    assert all(expected in str(refused.value) for expected in ("ttl_seconds = 345", "= 300", "= 45"))
    enough = load(tmp_path, f"{lease}{runner}[platform.kubernetes]\nttl_seconds = 346\n")
    unused = load(tmp_path, f"{lease}[platform.kubernetes]\nttl_seconds = 345\n")
    assert (enough.platform.kubernetes.ttl_seconds, unused.platform.kubernetes.ttl_seconds) == (346, 345)


def test_the_start_limit_of_a_pod_must_be_below_the_timeout_of_its_saga(tmp_path: Path) -> None:
    runner = '[platform]\nrunner = "kubernetes"\nsaga_timeout_seconds = 100\n'

    with pytest.raises(SettingsError) as refused:
        load(tmp_path, f"{runner}[platform.kubernetes]\nstart_seconds = 100\n")

    assert "start_seconds = 100 is not below saga_timeout_seconds = 100" in " ".join(str(refused.value).split())
    settings = load(tmp_path, f"{runner}[platform.kubernetes]\nstart_seconds = 99\n")
    assert settings.platform.kubernetes.start_seconds == 99
