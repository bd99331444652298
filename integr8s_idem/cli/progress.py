"""Progress bars on standard error, so that standard output can be piped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from integr8s_idem.cli.output import safe_console

Advance: TypeAlias = Callable[[int], None]
"""Advance the bar by a number of items."""


@contextmanager
def progress(title: str, total: int | None = None, *, quiet: bool = False) -> Iterator[Advance]:
    """Show a progress bar inside the block, if standard error is a terminal.

    Args:
        title: Text before the bar.
        total: Number of items, exact or estimated.
        quiet: Whether to suppress the bar.
    """
    console = safe_console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    is_hidden = quiet or not console.is_terminal
    shown = Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=is_hidden,
        # Print lines for the same terminal above the bar.
        redirect_stdout=sys.stdout.isatty(),
    )
    with shown:
        task = shown.add_task(title, total=total)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            # An estimated total may be too low.
            shown.update(task, completed=done, total=None if total is None else max(total, done))

        yield advance
