"""Connect to the cluster with the service account of the worker's pod, or with a kubeconfig file."""

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
"""Age at which a token of a kubeconfig file is refreshed."""

_WHERE: Final = "platform.kubernetes.kubeconfig"
_UNUSABLE: Final = (config.ConfigException, yaml.YAMLError, OSError, ValueError)
"""Exceptions of the client for a missing, malformed or inconsistent file."""


@asynccontextmanager
async def connected(settings: KubernetesSection) -> AsyncIterator[client.ApiClient]:
    """Open a client of the cluster, without sending a request.

    Raises:
        SettingsError: The settings or the kubeconfig file do not name a cluster.
    """
    configuration = await _configuration(settings)
    async with client.ApiClient(configuration) as api:
        yield api


async def _configuration(settings: KubernetesSection) -> client.Configuration:
    configuration = client.Configuration()
    try:
        if settings.kubeconfig is None:
            config.load_incluster_config(configuration)  # refreshes its token every minute
        else:
            await _load(settings, configuration)
            configuration.refresh_api_key_hook = _Refresh(settings)
    except _UNUSABLE as error:
        message = (
            f"is not set, and this process does not run in a pod of a cluster: {error}"
            if settings.kubeconfig is None
            else f'= "{settings.kubeconfig}" does not name a usable cluster: {error}'
        )
        raise SettingsError("settings", [SettingsMistake(_WHERE, message)]) from error
    return configuration


class _Refresh:
    """Called before every request: refreshes the token of the configuration once it is old.

    Raises:
        OSError: The file cannot be read.
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
        persist_config=False,  # the file belongs to the user
    )
