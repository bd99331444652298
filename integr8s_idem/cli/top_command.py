"""`integr8s-idem top`: watch running workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Final

import typer
from rich.console import Console

from integr8s_idem.cli.application_loader import optional_application
from integr8s_idem.cli.common import (
    FAILURE,
    AppOption,
    Embedded,
    Json,
    SettingsFile,
    exit_status_of,
    print_embedded_hint,
)
from integr8s_idem.cli.embedded_servers import command_settings
from integr8s_idem.cli.live_table import LiveTable
from integr8s_idem.cli.output import closable_output, echo, output_errors, safe_console
from integr8s_idem.cli.top_table import fleet_table
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.fleet import Fleet, FleetSnapshot
from integr8s_idem.operations.worker_addresses import Address, address_in, address_of

MIN_SECONDS: Final = 0.1
MAX_SECONDS: Final = 3_600.0
_PLAIN_WIDTH: Final = 200
"""Width of the table in a pipe or a file: enough for all columns."""


@dataclass(frozen=True)
class Watch:
    """The options of `top`."""

    addresses: Sequence[Address]
    interval: float
    once: bool
    as_json: bool


def top_command(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ADDRESS]...",
            help="host:port or URL of a worker's metrics; a host name with several addresses is one row for each. "
            "[default: the address in the settings, on this machine]",
        ),
    ] = None,
    settings: SettingsFile = None,
    application: AppOption = None,
    embedded: Embedded = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Interval between updates.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the table once, after one interval, and exit; the default in a pipe.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Watch running workers in a live table.

    Shows throughput, blocked duplicates, events in flight, takeovers, retries, dead letters, errors and lag, read from
    /metrics and /readyz.  A worker that does not answer is shown as down until it answers again.  Ctrl-C exits and
    leaves the last table on the screen.  Without a terminal, the table is printed once; with --json, each update is
    one object on a line.  With a single table, the exit status is 1 if no worker answered.
    """

    def watch() -> int:
        if not MIN_SECONDS <= interval <= MAX_SECONDS:
            raise ApplicationError(
                f"--interval must be from {MIN_SECONDS:g} to {MAX_SECONDS:g} seconds, not {interval:g}"
            )
        if addresses:
            chosen = [address_of(text) for text in addresses]
        else:
            loaded = command_settings(settings, optional_application(application), embedded=embedded)
            chosen = [address_in(loaded)]
        status = asyncio.run(_watch(Watch(chosen, interval, once, as_json)))
        if status == FAILURE and not embedded:
            print_embedded_hint()
        return status

    raise typer.Exit(exit_status_of(watch))


async def _watch(watch: Watch) -> int:
    """Watch until done or stopped, and return the exit status."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    # Not KeyboardInterrupt: the last table must be drawn and the cursor restored, also after SIGTERM.
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    watching, stopping = loop.create_task(_show(watch)), loop.create_task(stopped.wait())
    try:
        await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return watching.result() if watching.done() else 0
    finally:
        for task in (watching, stopping):
            task.cancel()
        await asyncio.wait({watching, stopping})


async def _show(watch: Watch) -> int:
    fleet, console = Fleet(watch.addresses), _console()
    if watch.once or not (watch.as_json or console.is_terminal):
        await fleet.poll()
        await asyncio.sleep(watch.interval)
        snapshot = await fleet.poll()
        with closable_output():
            _print(snapshot, watch, console)
        return 0 if snapshot.answering else FAILURE
    if watch.as_json:
        return await _poll_forever(fleet, watch, lambda snapshot: _print(snapshot, watch, console))
    return await _live(fleet, watch, console)


async def _live(fleet: Fleet, watch: Watch, console: Console) -> int:
    hint = f"every {watch.interval:g} s; Ctrl-C to exit"
    latest = await fleet.poll()

    def update(snapshot: FleetSnapshot) -> None:
        nonlocal latest
        latest = snapshot

    async with LiveTable(console).shown(lambda width: fleet_table(latest, width), hint):
        await asyncio.sleep(watch.interval)
        return await _poll_forever(fleet, watch, update)


async def _poll_forever(fleet: Fleet, watch: Watch, update: Callable[[FleetSnapshot], None]) -> int:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + watch.interval
        update(await fleet.poll())
        await asyncio.sleep(max(0.0, due - loop.time()))


def _print(snapshot: FleetSnapshot, watch: Watch, console: Console) -> None:
    if watch.as_json:
        echo(json.dumps({"at": _now(), "interval_seconds": watch.interval, **snapshot.as_json()}))
    else:
        with output_errors():
            console.print(fleet_table(snapshot, console.width))


def _console() -> Console:
    console = safe_console()
    has_width = console.is_terminal or "COLUMNS" in os.environ
    return console if has_width else safe_console(width=_PLAIN_WIDTH)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
