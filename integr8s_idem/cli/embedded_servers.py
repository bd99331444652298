"""What `run --embedded` puts in place of the servers that the settings name, and how other commands find them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

from integr8s_idem.config import RedisStoreSettings, Settings, SqliteStoreSettings, load_settings
from integr8s_idem.embedded.discovery import embedded_servers_run, settings_of_running, told_where
from integr8s_idem.runtime import Platform

TellMetrics: TypeAlias = Callable[[str, int], None]

_log: Final = logging.getLogger(__name__)


def command_settings(file: Path | None, platform: Platform | None = None, *, embedded: bool = False) -> Settings:
    """The settings of a command with the options `SettingsFile` and `Embedded`.

    Args:
        file: As for `load_settings`.
        platform: Whose settings and services they are.  Sections of applications are ignored if it is not known.
        embedded: Lead to the servers of the worker that runs them in this folder.

    Raises:
        SettingsError: As `load_settings`.
        ApplicationError: `embedded`, and not exactly one worker runs such servers from this folder.
    """
    kind, services = (platform.settings_type, list(platform.services)) if platform else (Settings, [])
    load = settings_of_running if embedded else load_settings
    return load(file, kind, services=services, ignore_unknown_sections=platform is None)


def hint_of_embedded() -> str | None:
    """What to add to a command that got no answer, if a worker runs embedded servers in this folder."""
    if not embedded_servers_run():
        return None
    return "A worker runs embedded servers in this folder: add --embedded to ask those"


def tell_where(settings: Settings, own: Settings) -> None:
    """So that people can publish to the embedded servers, and look into them.  `own`: what people set."""
    kafka, store = settings.kafka.bootstrap_servers, settings.store
    if isinstance(store, SqliteStoreSettings):
        _log.info("embedded Kafka (emulator) on %s, records in %s as [store] says", kafka, store.path)
        return
    assert isinstance(store, RedisStoreSettings)
    _log.info("embedded Kafka (emulator) on %s, embedded Redis on %s", kafka, store.url)
    if not isinstance(own.store, RedisStoreSettings):
        _log.warning(
            '--embedded does not use [store] (kind = "%s"): records are in the embedded Redis and end with it',
            own.store.kind,
        )


@contextmanager
def found_by_others(servers: Mapping[str, Mapping[str, Any]]) -> Iterator[TellMetrics]:
    """Other commands reach the embedded servers from this folder by `--embedded` while inside.

    In a folder that nobody may write to they need the addresses that `tell_where` has told.  Call what it yields with
    the host and the port of the metrics, once they are known.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(told_where(servers))
        except OSError as error:
            _log.warning("other commands do not find the embedded servers by --embedded: %s", error)
            yield lambda host, port: None
            return
        _log.info("other commands reach them from this folder by --embedded")

        def tell_metrics(host: str, port: int) -> None:
            try:
                file.add({"telemetry": {"metrics_host": host, "metrics_port": port}})
            except OSError as error:
                _log.warning("top --embedded does not find the metrics on port %d: %s", port, error)

        yield tell_metrics
