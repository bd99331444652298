"""Progress of the demo: a live table on a terminal, otherwise occasional lines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

_LINE_SECONDS: Final = 3.0


@dataclass(frozen=True)
class Figures:
    """The progress of the demo."""

    requested: int = 0
    scheduled: int = 0
    running: int = 0
    done: int = 0
    delivered_twice: int = 0
    duplicates_blocked: int = 0
    takeovers: int = 0
    dead_letters: int = 0

    def rows(self) -> list[tuple[str, int]]:
        return [(name.replace("_", " "), value) for name, value in vars(self).items()]


class Display:
    """A context manager; the table is removed at the end."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._started = time.monotonic()
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._last_line = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """Print a message."""
        self.console.print(f"{self.seconds:5.1f} s  {text}", soft_wrap=True, markup=False)

    def show(self, figures: Figures) -> None:
        if self.console.is_terminal:
            self._live.update(_table(figures), refresh=True)
        elif self.seconds - self._last_line >= _LINE_SECONDS:
            self._last_line = self.seconds
            self.say(", ".join(f"{value} {name}" for name, value in figures.rows()))

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()


def _table(figures: Figures) -> Table:
    table = Table(*(name for name, _ in figures.rows()))
    table.add_row(*(str(value) for _, value in figures.rows()))
    return table
