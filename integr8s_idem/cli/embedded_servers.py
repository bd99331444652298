"""Embedded servers of `run --embedded`, and how other commands find them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from integr8s_idem.config import RedisStoreSettings, Settings, SqliteStoreSettings, load_settings
from integr8s_idem.embedded.discovery import announced_servers, has_running_servers, load_embedded_settings
from integr8s_idem.runtime import Platform

AnnounceMetrics: TypeAlias = Callable[[str, int], None]

_log: Final = logging.getLogger(__name__)


def command_settings(file: Path | None, platform: Platform | None = None, *, embedded: bool = False) -> Settings:
    """Load the settings of a command with the options `SettingsFile` and `Embedded`.

    Args:
        file: See `load_settings`.
        platform: Provides the settings class and the services.  Without it, sections of applications are ignored.
        embedded: Whether to use the embedded servers of the worker that runs in this folder.

    Raises:
        SettingsError: See `load_settings`.
        ApplicationError: `embedded` is set and there is not exactly one such worker.
    """
    kind, services = (platform.settings_type, list(platform.services)) if platform else (Settings, [])
    load = load_embedded_settings if embedded else load_settings
    return load(file, kind, services=services, ignore_unknown_sections=platform is None)


def embedded_hint() -> str | None:
    """Return a suggestion to use `--embedded` if a worker runs embedded servers in this folder."""
    if not has_running_servers():
        return None
    return "A worker runs embedded servers in this folder: add --embedded to use them"


def log_addresses(settings: Settings, own: Settings) -> None:
    """Log the addresses of the embedded servers.

    Args:
        settings: Settings of the embedded servers.
        own: Settings of the user.
    """
    kafka, store = settings.kafka.bootstrap_servers, settings.store
    if isinstance(store, SqliteStoreSettings):
        _log.info("embedded Kafka (emulator) on %s, records in %s ([store] path)", kafka, store.path)
    else:
        assert isinstance(store, RedisStoreSettings)
        _log.info("embedded Kafka (emulator) on %s, embedded Redis on %s", kafka, store.url)
    if own.kafka.group_instance_id is not None:
        _log.warning(
            '--embedded ignores [kafka] group_instance_id ("%s"): the emulator has no static membership, so restarts '
            "rebalance, and two workers with one id are not detected",
            own.kafka.group_instance_id,
        )
    if not isinstance(own.store, RedisStoreSettings | SqliteStoreSettings):
        _log.warning(
            '--embedded ignores [store] (kind = "%s"): records are kept in the embedded Redis and lost when it stops',
            own.store.kind,
        )


@contextmanager
def announce_servers(servers: Mapping[str, Mapping[str, Any]]) -> Iterator[AnnounceMetrics]:
    """Let other commands in this folder find the embedded servers with `--embedded`, inside the block.

    In a read-only folder this only logs a warning.  Call the yielded function with the host and port of the metrics
    endpoint, once they are known.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(announced_servers(servers))
        except OSError as error:
            _log.warning("other commands cannot find the embedded servers with --embedded: %s", error)
            yield lambda host, port: None
            return
        _log.info("other commands in this folder can use these servers with --embedded")

        def announce_metrics(host: str, port: int) -> None:
            try:
                file.add({"telemetry": {"metrics_host": host, "metrics_port": port}})
            except OSError as error:
                _log.warning("top --embedded cannot find the metrics on port %d: %s", port, error)

        yield announce_metrics
