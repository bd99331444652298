"""The live table of `integr8s-idem run`: one row for each service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeAlias

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from integr8s_idem.worker import ServiceReport

REFRESH_SECONDS: Final = 0.25
_COLOURS: Final = {"running": "green", "paused": "yellow", "draining": "yellow", "failed": "red", "stopped": "dim"}


Snapshot: TypeAlias = Callable[[], Sequence[ServiceReport]]


def report_table(reports: Sequence[ServiceReport]) -> Table:
    """The table of one moment."""
    table = Table(caption="Ctrl-C drains, a second one stops at once", caption_justify="left")
    table.add_column("service")
    table.add_column("state")
    for heading in ("partitions", "in flight", "handled", "duplicates", "retries", "dead letters", "lag"):
        table.add_column(heading, justify="right")
    for report in reports:
        tally = report.tally
        numbers = (
            report.partitions,
            report.in_flight,
            tally.handled,
            tally.duplicates,
            tally.retries,
            tally.dead_letters,
            report.lag,
        )
        state = f"{report.state}: {report.reason}" if report.reason else report.state
        shown = Text(state, style=_COLOURS.get(report.state, ""))
        table.add_row(Text(report.name), shown, *(f"{number:,}" for number in numbers))
    return table


class LiveTable:
    """Redrawn about four times a second."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @asynccontextmanager
    async def shown(self, snapshot: Snapshot) -> AsyncIterator[None]:
        """On the screen while inside; what it said last stays there."""
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            drawing = asyncio.create_task(_draw(live, snapshot), name="integr8s-idem table")
            try:
                yield
            finally:
                drawing.cancel()
                with suppress(asyncio.CancelledError):
                    await drawing
                live.update(report_table(snapshot()), refresh=True)


async def _draw(live: Live, snapshot: Snapshot) -> None:
    while True:
        live.update(report_table(snapshot()), refresh=True)
        await asyncio.sleep(REFRESH_SECONDS)
