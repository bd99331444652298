"""How the worker reaches its cluster: by the service account of its own pod, or by a kubeconfig file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Final

import yaml
from kubernetes_asyncio import client, config

from integr8s_idem.errors import SettingsError, SettingsMistake
from services.settings import KubernetesSection

REFRESH_SECONDS: Final = 60.0
"""How old a token of a kubeconfig file may grow before it is read, or asked for, again."""

_WHERE: Final = "platform.kubernetes.kubeconfig"
_UNUSABLE: Final = (config.ConfigException, yaml.YAMLError, OSError, ValueError)
"""What the client raises about a file that is missing, is no YAML, or names what it does not hold."""


@asynccontextmanager
async def connected(settings: KubernetesSection) -> AsyncIterator[client.ApiClient]:
    """A client of the cluster.  Nothing is sent to it yet.

    Raises:
        SettingsError: The settings, or what they name, do not lead to a cluster.
    """
    configuration = await _configuration(settings)
    async with client.ApiClient(configuration) as api:
        yield api


async def _configuration(settings: KubernetesSection) -> client.Configuration:
    configuration = client.Configuration()
    try:
        if settings.kubeconfig is None:
            config.load_incluster_config(configuration)  # reads its token again every minute
        else:
            await _load(settings, configuration)
            configuration.refresh_api_key_hook = _Refresh(settings)
    except _UNUSABLE as error:
        told = (
            f"is not given, and this is no pod of a cluster: {error}"
            if settings.kubeconfig is None
            else f'= "{settings.kubeconfig}" does not lead to a cluster: {error}'
        )
        raise SettingsError("settings", [SettingsMistake(_WHERE, told)]) from error
    return configuration


class _Refresh:
    """Asked before every request: gives a configuration a new token once the one it has is old.

    Raises:
        OSError: There is none to be had now.
    """

    def __init__(self, settings: KubernetesSection) -> None:
        self._settings = settings
        self._until = monotonic() + REFRESH_SECONDS

    async def __call__(self, configuration: client.Configuration) -> None:
        if monotonic() < self._until:
            return
        self._until = monotonic() + REFRESH_SECONDS
        fresh = client.Configuration()
        try:
            await _load(self._settings, fresh)
        except _UNUSABLE as error:
            raise OSError(f"{self._settings.kubeconfig} cannot be read again: {error}") from error
        configuration.api_key = fresh.api_key


async def _load(settings: KubernetesSection, configuration: client.Configuration) -> None:
    await config.load_kube_config(
        config_file=settings.kubeconfig,
        context=settings.context,
        client_configuration=configuration,
        persist_config=False,  # the file is somebody else's
    )
