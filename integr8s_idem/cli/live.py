"""A table that stays in its place on the terminal and is drawn again and again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeAlias

from rich.console import Console, RenderableType
from rich.live import Live

REFRESH_SECONDS: Final = 0.25

Draw: TypeAlias = Callable[[int], RenderableType]
"""What is to be seen now, on a terminal of so many columns."""


class LiveTable:
    """Redrawn about four times a second."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @asynccontextmanager
    async def shown(self, draw: Draw) -> AsyncIterator[None]:
        """On the screen while inside; what it said last stays there."""
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            drawing = asyncio.create_task(self._draw(live, draw), name="integr8s-idem table")
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
        # Asked each time: people change the size of their terminals.
        live.update(draw(self._console.width), refresh=True)
