"""Write to standard output and standard error, with control characters escaped."""

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
"""Exit status after Ctrl-C, by the convention of shells."""


class OutputClosedError(Exception):
    """The reader of standard output has closed it, as in `| head`."""


def write_line(line: object = "", *, dim: bool = False, color: str = "", colored: int = 0) -> None:
    """Write lines to standard output, buffered if it is a pipe.

    Args:
        line: One or more lines.
        dim: Whether to print them dimmed.
        color: Color of the first `colored` characters.
        colored: Number of characters to color.

    Raises:
        OutputClosedError: The reader has closed the pipe.
    """
    text = printable_lines(str(line))
    if dim:
        text = typer.style(text, dim=True)
    elif colored:
        text = typer.style(text[:colored], fg=color) + text[colored:]
    try:
        sys.stdout.write(text + "\n")
    except BrokenPipeError as error:
        raise OutputClosedError from error


def echo(text: object = "") -> None:
    """Write lines to standard output and flush."""
    typer.echo(printable_lines(str(text)))


def write_error(line: object = "") -> None:
    """Write lines to standard error."""
    typer.echo(printable_lines(str(line)), err=True)


def write_text(text: str) -> None:
    """Write `text` to standard output without a trailing newline."""
    typer.echo(printable_lines(text), nl=False)


def safe_console(**options: Any) -> Console:
    """Return a console that escapes control characters in everything it prints, except its own styles."""
    console = Console(highlight=False, emoji=False, markup=False, **options)
    console.push_render_hook(_EscapeHook())
    return console


class _EscapeHook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(each) for each in renderables]


@dataclass(frozen=True, slots=True)
class _Escaped:
    inner: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.inner, options):
            yield Segment(text if control else printable_lines(text), style, control)


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return its result.

    Raises:
        typer.Exit: After Ctrl-C, or when the reader of standard output has closed it.
    """
    try:
        result = asyncio.run(main)
        sys.stdout.flush()
    except KeyboardInterrupt:
        write_error("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except (OutputClosedError, BrokenPipeError):
        drop_output()
        raise typer.Exit from None
    return result


def drop_output() -> None:
    """Discard all further output.  Python flushes standard output at exit, which would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
