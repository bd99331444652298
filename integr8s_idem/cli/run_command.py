"""`integr8s-idem run`: load settings, set up logging and the event loop, and run the services."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, TypeAlias

from rich.console import Console

from integr8s_idem.cli.embedded_servers import AnnounceMetrics, announce_servers, log_addresses
from integr8s_idem.cli.garbage_collection import collect_rarely
from integr8s_idem.cli.live_table import LiveTable
from integr8s_idem.cli.log_format import WorkerProcessFilter, log_as_json, log_as_text
from integr8s_idem.cli.output import safe_console
from integr8s_idem.cli.run_table import report_table
from integr8s_idem.config import Settings, load_settings, settings_warnings
from integr8s_idem.config.loading import settings_source
from integr8s_idem.embedded.settings_overlay import NO_KAFKA_CREDENTIALS, embedded_settings, keeps_its_store
from integr8s_idem.errors import IdempotencyError, SettingsError
from integr8s_idem.handlers.failure_settings import check_failures
from integr8s_idem.runtime import Platform, Service, ServiceGroup
from integr8s_idem.runtime.endpoints import CLOSE_SECONDS as ENDPOINTS_SECONDS
from integr8s_idem.runtime.service import check_groups
from integr8s_idem.runtime.service_group import CLOSE_SECONDS as CONTAINER_SECONDS
from integr8s_idem.runtime.supervisor_link import SupervisorLink
from integr8s_idem.telemetry.setup import check_exporter
from integr8s_idem.worker import ServiceReport
from integr8s_idem.worker.consumer import LAST_GRACE

_log: Final = logging.getLogger(__name__)

_THREADS_SECONDS: Final = 1.0
"""How long to wait for the threads of handlers at the very end, after the handlers' own timeout."""

_RETENTION_WARNINGS: Final = frozenset({"idempotency.default_ttl_seconds"})
"""Warnings about topics that outlive the records, which assume default retention.  Embedded topics end with the
process, and the actual retention of other topics is checked at start."""


class LogFormat(str, Enum):
    """Format of log lines."""

    JSON = "json"
    CONSOLE = "console"


class Group(Protocol):
    """The services of this process.  The first SIGTERM or SIGINT drains them, a second one stops them at once."""

    def reports(self) -> Sequence[ServiceReport]:
        """Return the current state of each service."""
        ...

    @property
    def stuck(self) -> bool:
        """Whether a handler ignores its cancellation."""
        ...

    async def run(self) -> int:
        """Run until stopped, and return the exit status."""
        ...


class Servers(Protocol):
    """Running embedded servers."""

    def settings(self) -> Mapping[str, Any]:
        """Return their settings: `{"kafka": {...}, "store": {...}}`, without `store` if no store was started."""
        ...


MakeGroup: TypeAlias = Callable[[Sequence[Service], Settings, AnnounceMetrics], Group]
StartServers: TypeAlias = Callable[[], AbstractAsyncContextManager[Servers]]


@dataclass(frozen=True)
class Run:
    """The options of `run`."""

    platform: Platform
    services: Sequence[Service]
    settings_file: Path | None = None
    embedded: bool = False
    log: LogFormat | None = None
    """Format of log lines; by default, `console` on a terminal and `json` otherwise."""
    link: SupervisorLink | None = None
    """Connection to the supervisor, in one of its worker processes."""

    def settings(self, overrides: Mapping[str, Any] | None = None) -> Settings:
        """Load the platform's settings.

        Raises:
            SettingsError: See `load_settings`; also if tracing requires an extra that is not installed, or a rule for
            failures names an error that does not exist.
            ApplicationError: Two services of the platform share a consumer group, even if only one of them runs here.
        """
        settings = load_settings(
            self.settings_file, self.platform.settings_type, overrides=overrides, services=self.platform.services
        )
        check_groups(self.platform.services.values(), settings)
        check_exporter(settings.telemetry)
        if mistakes := check_failures(settings, [service.name for service in self.services]):
            raise SettingsError(settings_source(self.settings_file), mistakes)
        return settings


def run(options: Run, make_group: MakeGroup | None = None, servers: StartServers | None = None) -> int:
    """Run the services until a signal, and return the exit status.

    Raises:
        SettingsError: The settings are invalid.  Nothing has been started.
    """
    settings = options.settings(NO_KAFKA_CREDENTIALS if options.embedded else None)
    make_group = make_group or partial(ServiceGroup, link=options.link)
    console = start_logging(settings, options.log, link=options.link)
    # Worker processes share the terminal, on which only one table could be redrawn.
    is_redrawn = console is not None and console.file.isatty() and options.link is None
    table = LiveTable(console) if console is not None and is_redrawn else None
    if options.link is not None:
        options.link.grace_seconds = grace_seconds(settings, options.services)
    collect_rarely()
    return in_loop(_run(options, settings, make_group, servers or _embedded(settings), table))


def start_logging(settings: Settings, log: LogFormat | None, *, link: SupervisorLink | None = None) -> Console | None:
    """Log in the format `log`, by default text on a terminal and otherwise JSON lines.  Return the console of text."""
    telemetry, console = settings.telemetry, safe_console()
    is_text = console.file.isatty() if log is None else log is LogFormat.CONSOLE
    if is_text:
        log_as_text(console, telemetry.log_level, keys=telemetry.span_keys)
    else:
        log_as_json(sys.stdout, telemetry.log_level, keys=telemetry.span_keys)
    if link is not None:
        logging.getLogger().handlers[0].addFilter(WorkerProcessFilter(link.number))
    return console if is_text else None


def grace_seconds(settings: Settings, services: Sequence[Service]) -> float:
    """Return the most seconds that `services` take to drain, with all steps of a shutdown.

    See "Stopping" in docs/how-to/deploy-on-kubernetes.md.
    """
    handlers = max(settings.service(service.name).drain_timeout_seconds for service in services)
    brokers = 3 * settings.kafka.request_timeout_seconds  # commit, leave the group, publish the outbox
    return handlers + 3 * LAST_GRACE + brokers + CONTAINER_SECONDS + ENDPOINTS_SECONDS + _THREADS_SECONDS


async def _run(
    options: Run, settings: Settings, make_group: MakeGroup, servers: StartServers, table: LiveTable | None
) -> int:
    async with AsyncExitStack() as stack:
        announce_metrics: AnnounceMetrics = lambda host, port: None  # noqa: E731
        if options.embedded:
            stack.enter_context(_cancel_on_sigterm())
            started = await stack.enter_async_context(servers())
            own, settings = settings, options.settings(embedded_settings(settings, started.settings()))
            log_addresses(settings, own)
            announce_metrics = stack.enter_context(announce_servers(started.settings()))
        if options.link is None:  # otherwise the supervisor has logged the warnings
            warn(options, settings)
        group = make_group(options.services, settings, announce_metrics)
        if table is not None:
            hint = "Ctrl-C drains, a second one stops at once"
            await stack.enter_async_context(table.shown(lambda width: report_table(group.reports(), width), hint))
        try:
            status = await group.run()
        except IdempotencyError:
            raise  # reported without a traceback
        except Exception:  # noqa: BLE001 -- logged with its traceback, and the exit status says so
            _log.exception("the services ended with an unexpected error")
            return 1
    if group.stuck or not await _threads_end():
        _exit_with_running_handlers(status or 1)
    return status


async def _threads_end() -> bool:
    """Return whether the threads of handlers end.  Threads cannot be cancelled, and the loop would wait for them."""
    shutdown = asyncio.create_task(asyncio.get_running_loop().shutdown_default_executor())
    # Not `wait_for`: before Python 3.12, cancelling this call waits for the threads as well.
    done, _ = await asyncio.wait({shutdown}, timeout=_THREADS_SECONDS)
    return bool(done)


def _exit_with_running_handlers(status: int) -> NoReturn:
    """Exit despite handlers that ignore their cancellation; the event loop would wait for them forever."""
    _log.error("exiting with handlers that are still running")
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def in_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run `main`, on uvloop if it is installed."""
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
def _cancel_on_sigterm() -> Iterator[None]:
    """Cancel on SIGTERM until the services handle it, so that embedded servers are stopped during startup as well."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def warn(options: Run, settings: Settings) -> None:
    """Log warnings about valid but risky settings."""
    source = settings_source(options.settings_file)
    for warning in settings_warnings(settings, options.platform.services):
        is_checked = options.embedded or settings.kafka.retention_check != "off"
        if is_checked and warning.path in _RETENTION_WARNINGS:
            continue
        _log.warning("%s: %s %s", source, warning.path, warning.message)


def _embedded(own: Settings) -> StartServers:
    def start() -> AbstractAsyncContextManager[Servers]:
        from integr8s_idem.embedded import embedded  # requires an extra

        # Durable, since the worker would warn about a server that the user cannot configure.
        return embedded(redis=not keeps_its_store(own), durable=True)

    return start
