"""Lines of unknown number on standard output, for whoever reads them as far as they like."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

from integr8s_idem._util.escaping import printable_lines

T = TypeVar("T")

INTERRUPTED: Final = 130
"""Exit status: Ctrl-C, as shells tell it."""


class ReaderGoneError(Exception):
    """Whoever reads standard output has enough: `| head`."""


def write_line(line: object = "", *, dim: bool = False, color: str = "", colored: int = 0) -> None:
    """A line on standard output, or several, buffered where that is a pipe; what a terminal would obey is escaped.

    Args:
        color: Of the first `colored` characters.

    Raises:
        ReaderGoneError: Nobody reads it any more.
    """
    text = printable_lines(str(line))
    if dim:
        text = typer.style(text, dim=True)
    elif colored:
        text = typer.style(text[:colored], fg=color) + text[colored:]
    try:
        sys.stdout.write(text + "\n")
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def say(text: object = "") -> None:
    """A line on standard output, or several, written at once; what a terminal would obey is escaped."""
    typer.echo(printable_lines(str(text)))


def write_error(line: object = "") -> None:
    """A line on standard error, or several; what a terminal would obey is escaped."""
    typer.echo(printable_lines(str(line)), err=True)


def write_text(text: str) -> None:
    """All of `text` on standard output, without another end of line; what a terminal would obey is escaped."""
    typer.echo(printable_lines(text), nl=False)


def safe_console(**options: Any) -> Console:
    """A console that escapes, in whatever it prints, what a terminal would obey, but for its own styles."""
    console = Console(highlight=False, emoji=False, markup=False, **options)
    console.push_render_hook(_Escaping())
    return console


class _Escaping(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(each) for each in renderables]


@dataclass(frozen=True, slots=True)
class _Escaped:
    inner: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.inner, options):
            yield Segment(text if control else printable_lines(text), style, control)


def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns.

    Raises:
        typer.Exit: Ctrl-C, or whoever reads standard output has gone: the command ends, without a traceback.
    """
    try:
        answer = asyncio.run(work)
        sys.stdout.flush()
    except KeyboardInterrupt:
        write_error("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except (ReaderGoneError, BrokenPipeError):
        drop_output()
        raise typer.Exit from None
    return answer


def drop_output() -> None:
    """Print nothing more.  Python flushes once more at its exit, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
