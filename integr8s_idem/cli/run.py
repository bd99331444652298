"""`integr8s-idem run`: settings, logging, the loop, and whatever the worker's runner does in it."""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, cast

from rich.console import Console

from integr8s_idem.cli.application import Application
from integr8s_idem.cli.logging import log_as_json, log_as_text
from integr8s_idem.cli.table import LiveTable, Snapshot
from integr8s_idem.config import Settings, load_settings, settings_warnings
from integr8s_idem.config.loading import settings_source
from integr8s_idem.errors import IdempotencyError

_log: Final = logging.getLogger(__name__)

_NO_CREDENTIALS: Final[Mapping[str, Mapping[str, Any]]] = {
    "kafka": {
        "security_protocol": "PLAINTEXT",
        "sasl_username": None,
        "sasl_password": None,
        "ssl_ca_file": None,
    },
    "store": {
        "kind": "redis",
        "url": "redis://localhost:6379/0",
        "username": None,
        "password": None,
        "tls_ca_file": None,
        "tls_cert_file": None,
        "tls_key_file": None,
    },
}
"""What the settings say about real servers means nothing to embedded ones."""


class Runner(Protocol):
    """The worker's `run_platform`.

    It handles SIGTERM and SIGINT itself: the first drains, a second one stops at once.
    """

    def __call__(
        self,
        platform: Any,
        settings: Settings,
        *,
        services: Sequence[str] | None,
        on_started: Callable[[Snapshot], None] | None,
    ) -> Coroutine[Any, Any, int]:
        """Run until told to stop; how many services failed.

        `on_started` is called once, from the loop, as soon as there is something to ask.
        """
        ...


class Servers(Protocol):
    """Embedded servers that run."""

    def settings(self) -> Mapping[str, Any]:
        """What leads to them: `{"kafka": {...}, "store": {...}}`."""
        ...


StartServers: TypeAlias = Callable[[], AbstractAsyncContextManager[Servers]]


@dataclass(frozen=True)
class Run:
    """What was asked for on the command line."""

    application: Application
    services: Sequence[str]
    settings_file: Path | None = None
    embedded: bool = False
    as_json: bool = False

    def settings(self, overrides: Mapping[str, Any] | None = None) -> Settings:
        """The application's settings.  Raises `SettingsError`."""
        return load_settings(self.settings_file, self.application.settings_type, overrides=overrides)


def run(
    asked: Run, runner: Runner | None = None, servers: Callable[[], AbstractAsyncContextManager[Servers]] | None = None
) -> int:
    """Run the services until a signal; the exit status.

    Raises:
        SettingsError: Before anything is started.
    """
    overrides = _NO_CREDENTIALS if asked.embedded else None
    settings = asked.settings(overrides)
    console = Console()
    table = None if asked.as_json or not console.file.isatty() else LiveTable(console)
    if table is None:
        log_as_json(sys.stdout, settings.telemetry.log_level)
    else:
        log_as_text(console, settings.telemetry.log_level)
    _warn(asked, settings)
    return _in_loop(_run(asked, settings, runner or _runner(), servers or _embedded, table))


async def _run(
    asked: Run,
    settings: Settings,
    runner: Runner,
    servers: StartServers,
    table: LiveTable | None,
) -> int:
    async with AsyncExitStack() as stack:
        if asked.embedded:
            with _terminated_by_cancelling():
                started = await stack.enter_async_context(servers())
            settings = asked.settings(merged(_NO_CREDENTIALS, started.settings()))
        if table is not None:
            await stack.enter_async_context(table.shown())
        watch = table.watch if table else None
        try:
            failed = await runner(asked.application, settings, services=asked.services, on_started=watch)
        except IdempotencyError:
            raise  # says itself what is wrong and what to do
        except Exception:  # noqa: BLE001 -- logged with its traceback, and the exit status says so
            _log.exception("the services ended by an error that nobody expected")
            return 1
        return 1 if failed else 0


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, table by table; `above` wins."""
    both = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], Mapping) and isinstance(above[name], Mapping):
            both[name] = merged(below[name], above[name])
    return both


def _in_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` on uvloop where it is available."""
    with asyncio.Runner(loop_factory=_loop_factory()) as loop:
        try:
            return loop.run(main)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


@contextmanager
def _terminated_by_cancelling() -> Iterator[None]:
    """SIGTERM cancels, so that servers that are just being started are stopped and not left behind."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _warn(asked: Run, settings: Settings) -> None:
    source = settings_source(asked.settings_file)
    for warning in settings_warnings(settings, asked.application.services):
        _log.warning("%s: %s %s", source, warning.path, warning.message)


def _runner() -> Runner:
    return cast(Runner, importlib.import_module("integr8s_idem.worker").run_platform)


def _embedded() -> AbstractAsyncContextManager[Servers]:
    from integr8s_idem.embedded import embedded  # not everybody has the extra it needs

    return embedded()
