"""The live table of `integr8s-idem run`: one row for each service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

REFRESH_SECONDS: Final = 0.25
_COLOURS: Final = {"running": "green", "paused": "yellow", "draining": "yellow", "failed": "red", "stopped": "dim"}


class ServiceReport(Protocol):
    """How one service is doing, at one moment."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str:
        """`starting`, `running`, `paused`, `draining`, `stopped` or `failed`."""
        ...

    @property
    def partitions(self) -> int:
        """Assigned to this process."""
        ...

    @property
    def in_flight(self) -> int:
        """Deliveries taken and not settled."""
        ...

    @property
    def handled(self) -> int: ...
    @property
    def duplicates(self) -> int: ...
    @property
    def retries(self) -> int: ...
    @property
    def dead_letters(self) -> int: ...
    @property
    def lag(self) -> int | None:
        """Events in the assigned partitions that are not settled; `None` while unknown."""
        ...


Snapshot = Callable[[], Sequence[ServiceReport]]


def report_table(reports: Sequence[ServiceReport]) -> Table:
    """The table of one moment."""
    table = Table(caption="Ctrl-C drains, a second one stops at once", caption_justify="left")
    table.add_column("service")
    table.add_column("state")
    for heading in ("partitions", "in flight", "handled", "duplicates", "retries", "dead letters", "lag"):
        table.add_column(heading, justify="right")
    for report in reports:
        numbers = (
            report.partitions,
            report.in_flight,
            report.handled,
            report.duplicates,
            report.retries,
            report.dead_letters,
            report.lag,
        )
        state = f"[{_COLOURS.get(report.state, 'default')}]{report.state}[/]"
        table.add_row(report.name, state, *("-" if number is None else f"{number:,}" for number in numbers))
    return table


class LiveTable:
    """Redrawn about four times a second, from the moment there is something to ask."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._snapshot: Snapshot | None = None

    def watch(self, snapshot: Snapshot) -> None:
        """Show what `snapshot` says from now on."""
        self._snapshot = snapshot

    @asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """On the screen while inside; what it said last stays there."""
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            drawing = asyncio.create_task(self._draw(live), name="integr8s-idem table")
            try:
                yield
            finally:
                drawing.cancel()
                with suppress(asyncio.CancelledError):
                    await drawing
                self._redraw(live)

    async def _draw(self, live: Live) -> None:
        while True:
            self._redraw(live)
            await asyncio.sleep(REFRESH_SECONDS)

    def _redraw(self, live: Live) -> None:
        if self._snapshot is not None:
            live.update(report_table(self._snapshot()), refresh=True)
