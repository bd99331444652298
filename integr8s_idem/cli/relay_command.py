"""`integr8s-idem relay`: publish the events of an outbox."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Final

import typer

from integr8s_idem.cli.application_loader import optional_application
from integr8s_idem.cli.common import FAILURE, AppOption, Embedded, SettingsFile, exit_status_of
from integr8s_idem.cli.embedded_servers import command_settings
from integr8s_idem.cli.log_format import QuietHandler
from integr8s_idem.cli.output import write_error, write_report
from integr8s_idem.cli.progress import Advance, progress
from integr8s_idem.cli.run_command import LogFormat, in_loop, start_logging
from integr8s_idem.config import Settings
from integr8s_idem.runtime.outbox_relay import NAME, RelayProcess, make_relay, opened_outbox, stopped_by_signals
from integr8s_idem.stores.outbox import Backlog
from integr8s_idem.telemetry.setup import check_exporter, configure_telemetry, observer_for
from integr8s_idem.worker import EventPublisher
from integr8s_idem.worker.relay import Relay

_PROGRESS_SECONDS: Final = 0.2


def relay_command(
    settings: SettingsFile = None,
    application: AppOption = None,
    embedded: Embedded = False,
    once: Annotated[
        bool, typer.Option("--once", help="Publish everything that waits, and exit; 1 if an event remains.")
    ] = False,
    log: Annotated[
        LogFormat | None,
        typer.Option(
            "--log", help="Format of log lines.  [default: console on a terminal, otherwise json]", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Output JSON: log lines, or with --once the result.")] = False,
) -> None:
    """Publish the events of the outbox in the database of [store].

    Runs until Ctrl-C or SIGTERM, with /metrics, /healthz and /readyz of [telemetry].  Workers with transactional
    handlers publish the outbox as well; any number of both can run concurrently.
    """

    def start() -> int:
        loaded = command_settings(settings, optional_application(application), embedded=embedded)
        check_exporter(loaded.telemetry)
        if once:
            return asyncio.run(_drain(loaded, as_json=as_json))
        start_logging(loaded, LogFormat.JSON if as_json else log)
        return in_loop(RelayProcess(loaded).run())

    raise typer.Exit(exit_status_of(start, embedded=embedded))


async def _drain(settings: Settings, *, as_json: bool) -> int:
    """Publish until the outbox is empty, and return the exit status."""
    _show_failures()
    async with configure_telemetry(settings.telemetry, service_name=NAME), opened_outbox(settings) as outbox:
        observer = observer_for(settings.telemetry, NAME, group=None, kafka=settings.kafka)
        publisher = EventPublisher(settings.kafka, observer)
        relay = make_relay(outbox, publisher, settings.kafka, observer)
        try:
            with (
                stopped_by_signals(relay, outbox),
                progress("publishing events", await outbox.count(), quiet=as_json) as advance,
            ):
                async with _advancing(relay, advance):
                    is_empty = await relay.drain()
        finally:
            await publisher.close()
        is_written = _report(relay, await outbox.backlog(), as_json=as_json)
    return 0 if is_empty and is_written else FAILURE


@asynccontextmanager
async def _advancing(relay: Relay, advance: Advance) -> AsyncIterator[None]:
    """Advance a progress bar within the block."""
    shown = 0

    def update() -> None:
        nonlocal shown
        advance(relay.published - shown)
        shown = relay.published

    async def keep_updating() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            update()

    updating = asyncio.create_task(keep_updating())
    try:
        yield
    finally:
        updating.cancel()
        await asyncio.wait({updating})
        update()


def _report(relay: Relay, left: Backlog, *, as_json: bool) -> bool:
    """Print the report and return whether standard output could be written."""
    text = f"{relay.published} events published"
    if left.count:
        text += f"\n{left.count} events wait, the oldest for {left.age.total_seconds():.0f} s"
    result = {"published": relay.published, "failures": relay.failures, "waiting": left.count}
    answer = json.dumps({**result, "age_seconds": left.age.total_seconds()})
    return write_report(answer if as_json else text, text)


class _Lines(QuietHandler):
    """Writes warnings and errors to standard error, so that standard output has only the result."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_error(record.getMessage())
        except Exception:  # noqa: BLE001 -- like the handlers of logging: a failure to log must not stop the process
            self.handleError(record)


def _show_failures() -> None:
    logging.getLogger().addHandler(logging.NullHandler())  # suppresses the lines of client libraries
    logging.getLogger("integr8s_idem.worker.relay").addHandler(_Lines(logging.WARNING))
