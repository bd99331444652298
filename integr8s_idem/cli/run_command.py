"""`integr8s-idem run`: settings, logging, the loop, and a group of services in it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, TypeAlias

from integr8s_idem.cli.embedded_servers import TellMetrics, found_by_others, tell_where
from integr8s_idem.cli.garbage_collection import collect_seldom
from integr8s_idem.cli.live_table import LiveTable
from integr8s_idem.cli.log_format import log_as_json, log_as_text
from integr8s_idem.cli.output import safe_console
from integr8s_idem.cli.run_table import report_table
from integr8s_idem.config import Settings, load_settings, settings_warnings
from integr8s_idem.config.loading import settings_source
from integr8s_idem.embedded.settings_overlay import NO_KAFKA_CREDENTIALS, embedded_settings, keeps_its_store
from integr8s_idem.errors import IdempotencyError
from integr8s_idem.runtime import Platform, Service, ServiceGroup
from integr8s_idem.runtime.service import check_groups
from integr8s_idem.telemetry.setup import check_exporter
from integr8s_idem.worker import ServiceReport

_log: Final = logging.getLogger(__name__)

_THREADS_SECONDS: Final = 1.0
"""How long threads may go on once all else has ended: what is left to the very last, after the grace of handlers."""

_NOTHING_TO_KEEP: Final = frozenset({"idempotency.default_ttl_seconds"})
"""Warnings about topics that outlive the records, by the brokers' defaults: embedded topics end with the process, and
real ones are asked what they are set to."""


class Group(Protocol):
    """The services of this process.  It handles SIGTERM and SIGINT: the first drains, a second stops at once."""

    def reports(self) -> Sequence[ServiceReport]:
        """How each is doing."""
        ...

    @property
    def stuck(self) -> bool:
        """Whether some handler ignores that it was cancelled."""
        ...

    async def run(self) -> int:
        """Run until stopped; the exit status."""
        ...


class Servers(Protocol):
    """Embedded servers that run."""

    def settings(self) -> Mapping[str, Any]:
        """What leads to them: `{"kafka": {...}, "store": {...}}`, without a store if none was started."""
        ...


MakeGroup: TypeAlias = Callable[[Sequence[Service], Settings, TellMetrics], Group]
StartServers: TypeAlias = Callable[[], AbstractAsyncContextManager[Servers]]


@dataclass(frozen=True)
class Run:
    """What was asked for on the command line."""

    platform: Platform
    services: Sequence[Service]
    settings_file: Path | None = None
    embedded: bool = False
    as_json: bool = False

    def settings(self, overrides: Mapping[str, Any] | None = None) -> Settings:
        """The platform's settings.

        Raises:
            SettingsError: As `load_settings`, or spans need an extra that is not installed.
            ApplicationError: Two services of the platform share a consumer group, whichever of them run here.
        """
        settings = load_settings(
            self.settings_file, self.platform.settings_type, overrides=overrides, services=self.platform.services
        )
        check_groups(self.platform.services.values(), settings)
        check_exporter(settings.telemetry)
        return settings


def run(asked: Run, make_group: MakeGroup = ServiceGroup, servers: StartServers | None = None) -> int:
    """Run the services until a signal; the exit status.

    Raises:
        SettingsError: Before anything is started.
    """
    settings = asked.settings(NO_KAFKA_CREDENTIALS if asked.embedded else None)
    console = safe_console()
    table = None if asked.as_json or not console.file.isatty() else LiveTable(console)
    if table is None:
        log_as_json(sys.stdout, settings.telemetry.log_level)
    else:
        log_as_text(console, settings.telemetry.log_level)
    collect_seldom()
    return _in_loop(_run(asked, settings, make_group, servers or _embedded(settings), table))


async def _run(
    asked: Run, settings: Settings, make_group: MakeGroup, servers: StartServers, table: LiveTable | None
) -> int:
    async with AsyncExitStack() as stack:
        tell_metrics: TellMetrics = lambda host, port: None  # noqa: E731
        if asked.embedded:
            stack.enter_context(_terminated_by_cancelling())
            started = await stack.enter_async_context(servers())
            own, settings = settings, asked.settings(embedded_settings(settings, started.settings()))
            tell_where(settings, own)
            tell_metrics = stack.enter_context(found_by_others(started.settings()))
        _warn(asked, settings)
        group = make_group(asked.services, settings, tell_metrics)
        if table is not None:
            hint = "Ctrl-C drains, a second one stops at once"
            await stack.enter_async_context(table.shown(lambda width: report_table(group.reports(), width), hint))
        try:
            status = await group.run()
        except IdempotencyError:
            raise  # says itself what is wrong and what to do
        except Exception:  # noqa: BLE001 -- logged with its traceback, and the exit status says so
            _log.exception("the services ended by an error that nobody expected")
            return 1
    if group.stuck or not await _threads_end():
        _leave_handlers_behind(status)
    return status


async def _threads_end() -> bool:
    """Whether the threads of handlers come to their end: none can be cancelled, and the loop would wait for all."""
    ending = asyncio.create_task(asyncio.get_running_loop().shutdown_default_executor())
    # Not by `wait_for`: until Python 3.12 a cancellation of this call waits for the threads, too.
    done, _ = await asyncio.wait({ending}, timeout=_THREADS_SECONDS)
    return bool(done)


def _leave_handlers_behind(status: int) -> NoReturn:
    """End the process under handlers that ignore their cancellation: the event loop would wait for them for ever."""
    _log.error("ending without the handlers that do not end")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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
    """Until the services take the signal over, SIGTERM cancels: servers being started are not left behind."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _warn(asked: Run, settings: Settings) -> None:
    source = settings_source(asked.settings_file)
    for warning in settings_warnings(settings, asked.platform.services):
        is_asked = asked.embedded or settings.kafka.retention_check != "off"
        if is_asked and warning.path in _NOTHING_TO_KEEP:
            continue
        _log.warning("%s: %s %s", source, warning.path, warning.message)


def _embedded(own: Settings) -> StartServers:
    def start() -> AbstractAsyncContextManager[Servers]:
        from integr8s_idem.embedded import embedded  # not everybody has the extra it needs

        # Durable, else the worker would warn of a server that nobody can set otherwise.
        return embedded(redis=not keeps_its_store(own), durable=True)

    return start
