"""A table that stays in its place on the terminal and is drawn again and again."""

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
"""What is to be seen now, on a terminal of so many columns."""


class LiveTable:
    """Redrawn about four times a second."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @asynccontextmanager
    async def shown(self, draw: Draw, hint: str) -> AsyncIterator[None]:
        """Show the table while inside, with `hint` below it; the last table stays on the screen, without it."""

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
        # Asked each time: people change the size of their terminals.
        live.update(draw(self._console.width), refresh=True)
