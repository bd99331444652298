"""A table on the terminal that is redrawn in place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

REFRESH_SECONDS: Final = 0.25

Draw: TypeAlias = Callable[[int], RenderableType]
"""Returns the current content for a terminal of the given width."""


class LiveTable:
    """Redraws a table about four times a second."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @asynccontextmanager
    async def shown(self, draw: Draw, hint: str) -> AsyncIterator[None]:
        """Show the table inside the block, with `hint` below it; the last table remains, without the hint."""

        def with_hint(width: int) -> RenderableType:
            return Group(draw(width), Text(hint, style="dim italic"))

        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            drawing = asyncio.create_task(self._draw(live, with_hint), name="integr8s-idem table")
            try:
                yield
            finally:
                drawing.cancel()
                with suppress(asyncio.CancelledError):
                    await drawing
                self._show(live, draw)

    async def _draw(self, live: Live, draw: Draw) -> None:
        while True:
            self._show(live, draw)
            await asyncio.sleep(REFRESH_SECONDS)

    def _show(self, live: Live, draw: Draw) -> None:
        # Read each time, since terminals can be resized.
        live.update(draw(self._console.width), refresh=True)
