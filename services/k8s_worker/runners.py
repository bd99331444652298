"""Create the configured runner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from integr8s_idem.errors import ApplicationError, SettingsError, SettingsMistake
from services.k8s_worker.privileges import hidden_process, prepare_for_scripts
from services.k8s_worker.runner import Runner
from services.k8s_worker.subprocess_runner import SubprocessRunner
from services.settings import PlatformSection

_CHOOSE: Final = (
    'is not set, and the k8s worker needs it to run scripts: set "kubernetes" (Jobs in a cluster), or "subprocess" '
    "(child processes of the worker, without a sandbox: only for scripts that you trust)"
)


@asynccontextmanager
async def chosen_runner(settings: PlatformSection) -> AsyncIterator[Runner]:
    """Open the configured runner, and close it at the end of the block.

    Raises:
        SettingsError: The settings are not valid for this runner.
        ApplicationError: The runner requires a package that is not installed.
    """
    if settings.runner is None:
        raise SettingsError("settings", [SettingsMistake("platform.runner", _CHOOSE)])
    if settings.runner == "subprocess":
        await prepare_for_scripts(settings)
        with hidden_process():
            yield SubprocessRunner(settings)
        return
    try:
        # Imported here, since only the Kubernetes runner needs a client.
        from services.k8s_worker.kubernetes_runner import kubernetes_runner
    except ImportError as error:
        raise ApplicationError(
            'runner = "kubernetes" needs kubernetes_asyncio, which is not installed: pip install kubernetes-asyncio'
        ) from error
    async with kubernetes_runner(settings) as runner:
        yield runner
