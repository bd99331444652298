"""Progress of long work, on standard error: what a command prints stays fit for a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from integr8s_idem.cli.output import safe_console

Advance: TypeAlias = Callable[[int], None]
"""Tell that so many more are done."""


@contextmanager
def progress(title: str, total: int | None = None, *, quiet: bool = False) -> Iterator[Advance]:
    """A bar while inside, gone afterwards; nothing where standard error is no terminal.

    Args:
        title: What is done, in a word or two.
        total: How many there will be, if that is known or can be guessed.
        quiet: No bar, whatever standard error is.
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
        # Lines for the same terminal go above the bar; into a pipe they go as they are.
        redirect_stdout=sys.stdout.isatty(),
    )
    with shown:
        task = shown.add_task(title, total=total)
        done = 0

        def advance(more: int) -> None:
            nonlocal done
            done += more
            # A number that was guessed grows with what there is.
            shown.update(task, completed=done, total=None if total is None else max(total, done))

        yield advance
