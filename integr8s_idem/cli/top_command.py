"""`integr8s-idem top`: workers, watched from outside."""

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
from integr8s_idem.cli.common import FAILURE, AppOption, Embedded, Json, SettingsFile, answered, tell_of_embedded
from integr8s_idem.cli.embedded_servers import command_settings
from integr8s_idem.cli.live_table import LiveTable
from integr8s_idem.cli.output import safe_console, say
from integr8s_idem.cli.top_table import fleet_table
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.fleet import Fleet, FleetLook
from integr8s_idem.operations.worker_addresses import Address, address_in, address_of

LEAST_SECONDS: Final = 0.1
MOST_SECONDS: Final = 3_600.0
_PLAIN_WIDTH: Final = 200
"""Columns for a pipe or a file, where nobody says how many there are: all of the table."""


@dataclass(frozen=True)
class Watch:
    """What was asked for on the command line."""

    addresses: Sequence[Address]
    interval: float
    once: bool
    as_json: bool


def top_command(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ADDRESS]...",
            help="host:port or URL of a worker's metrics; a name of several machines is a row for each. "
            "Without one: that of the settings, on this machine.",
        ),
    ] = None,
    settings: SettingsFile = None,
    application: AppOption = None,
    embedded: Embedded = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="From one look to the next.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, so that there are rates, print it and leave; as in a pipe.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Watch running workers, in a live table.

    Throughput, duplicates blocked, in flight, takeovers, retries, dead letters, errors, lag.  Ctrl-C leaves the last
    table.  It reads their /metrics and /readyz.  A worker that does not answer is shown as down, and comes back by
    itself.  Without a terminal it prints once; with --json there is one object a look, in a line.  The exit status of
    a table that is printed once is 1 if no worker answered.
    """

    def watch() -> int:
        if not LEAST_SECONDS <= interval <= MOST_SECONDS:
            raise ApplicationError(
                f"--interval is from {LEAST_SECONDS:g} to {MOST_SECONDS:g} seconds, not {interval:g}"
            )
        if addresses:
            chosen = [address_of(text) for text in addresses]
        else:
            read = command_settings(settings, optional_application(application), embedded=embedded)
            chosen = [address_in(read)]
        status = asyncio.run(_watch(Watch(chosen, interval, once, as_json)))
        if status == FAILURE and not embedded:
            tell_of_embedded()
        return status

    raise typer.Exit(answered(watch))


async def _watch(watch: Watch) -> int:
    """Until it is done or stopped; the exit status."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    # Not by KeyboardInterrupt: the table is to be drawn to its end, and the cursor to come back, at SIGTERM as well.
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    watching, stopping = loop.create_task(_watched(watch)), loop.create_task(stopped.wait())
    try:
        await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return watching.result() if watching.done() else 0
    finally:
        for task in (watching, stopping):
            task.cancel()
        await asyncio.wait({watching, stopping})


async def _watched(watch: Watch) -> int:
    fleet, console = Fleet(watch.addresses), _console()
    if watch.once or not (watch.as_json or console.is_terminal):
        await fleet.look()
        await asyncio.sleep(watch.interval)
        look = await fleet.look()
        _print(look, watch, console)
        return 0 if look.answering else FAILURE
    if watch.as_json:
        return await _look_for_ever(fleet, watch, lambda look: _print(look, watch, console))
    return await _live(fleet, watch, console)


async def _live(fleet: Fleet, watch: Watch, console: Console) -> int:
    hint = f"every {watch.interval:g} s; Ctrl-C leaves"
    seen = await fleet.look()

    def see(look: FleetLook) -> None:
        nonlocal seen
        seen = look

    async with LiveTable(console).shown(lambda width: fleet_table(seen, width), hint):
        await asyncio.sleep(watch.interval)
        return await _look_for_ever(fleet, watch, see)


async def _look_for_ever(fleet: Fleet, watch: Watch, see: Callable[[FleetLook], None]) -> int:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + watch.interval
        see(await fleet.look())
        await asyncio.sleep(max(0.0, due - loop.time()))


def _print(look: FleetLook, watch: Watch, console: Console) -> None:
    if watch.as_json:
        say(json.dumps({"at": _now(), "interval_seconds": watch.interval, **look.told()}))
    else:
        console.print(fleet_table(look, console.width))


def _console() -> Console:
    console = safe_console()
    has_width = console.is_terminal or "COLUMNS" in os.environ
    return console if has_width else safe_console(width=_PLAIN_WIDTH)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
