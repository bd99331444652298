"""What `run --embedded` puts in place of the servers that the settings name, and how other commands find them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from integr8s_idem.config import RedisStoreSettings, Settings, SqliteStoreSettings, load_settings
from integr8s_idem.embedded.whereabouts import settings_of_running, told_where
from integr8s_idem.worker import Platform

_log: Final = logging.getLogger(__name__)


def command_settings(file: Path | None, platform: Platform | None = None, *, embedded: bool = False) -> Settings:
    """The settings of a command with the options `SettingsFile` and `Embedded`.

    Args:
        file: As for `load_settings`.
        platform: Whose settings and services they are, if it is known.
        embedded: Lead to the servers of the worker that runs them in this folder.

    Raises:
        SettingsError: As `load_settings`.
        ApplicationError: `embedded`, and not exactly one worker runs such servers from this folder.
    """
    kind, services = (platform.settings_type, list(platform.services)) if platform else (Settings, [])
    load = settings_of_running if embedded else load_settings
    return load(file, kind, services=services)


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
def found_by_others(servers: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Other commands reach the embedded servers from this folder by `--embedded` while inside.

    In a folder that nobody may write to they need the addresses that `tell_where` has told.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(told_where(servers))
        except OSError as error:
            _log.warning("other commands do not find the embedded servers by --embedded: %s", error)
        else:
            _log.info("other commands reach them from this folder by --embedded")
        yield
