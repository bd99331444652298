"""Write to standard output and standard error, with control characters escaped."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, TypeVar

import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

from integr8s_idem._util.escaping import printable_lines

T = TypeVar("T")

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, by the convention of shells."""


class OutputError(Exception):
    """Standard output cannot be written, for example because the disk is full."""


class OutputClosedError(OutputError):
    """The reader of standard output has closed it, as in `| head`."""


@contextmanager
def output_errors() -> Iterator[None]:
    """Raise errors of standard output as `OutputError`, to distinguish them from those of files and connections."""
    try:
        yield
    except BrokenPipeError as error:
        raise OutputClosedError(error.strerror) from error
    except OSError as error:
        raise OutputError(error.strerror) from error


@contextmanager
def closable_output() -> Iterator[None]:
    """Continue after the block if the reader closes standard output, since the exit status is a result as well."""
    try:
        yield
    except OutputClosedError:
        drop_output()


def write_line(line: object = "", *, dim: bool = False, color: str = "", colored: int = 0) -> None:
    """Write lines to standard output, buffered if it is a pipe.

    Args:
        line: One or more lines.
        dim: Whether to print them dimmed.
        color: Color of the first `colored` characters.
        colored: Number of characters to color.

    Raises:
        OutputError: Standard output cannot be written.
    """
    text = printable_lines(str(line))
    if dim:
        text = typer.style(text, dim=True)
    elif colored:
        text = typer.style(text[:colored], fg=color) + text[colored:]
    with output_errors():
        sys.stdout.write(text + "\n")


def echo(text: object = "") -> None:
    """Write lines to standard output and flush.  Raises `OutputError`."""
    with output_errors():
        typer.echo(printable_lines(str(text)))


def write_report(report: str, summary: str) -> bool:
    """Write the report of a change to standard output.

    If that fails, the change has been made nevertheless, so `summary` is written to standard error with the reason.

    Args:
        report: Lines for standard output.
        summary: What was changed.

    Returns:
        Whether standard output could be written.
    """
    try:
        echo(report)
    except OutputError as error:
        drop_output()
        with suppress(OSError):  # standard error may be full as well
            write_error(f"{summary}\nOnly this report could not be written to standard output: {error}")
        return False
    return True


def write_error(line: object = "") -> None:
    """Write lines to standard error."""
    typer.echo(printable_lines(str(line)), err=True)


def write_text(text: str) -> None:
    """Write `text` to standard output without a trailing newline.  Raises `OutputError`."""
    with output_errors():
        typer.echo(printable_lines(text), nl=False)


def safe_console(**options: Any) -> Console:
    """Return a console that escapes control characters in everything it prints, except its own styles."""
    console = _SafeConsole(highlight=False, emoji=False, markup=False, **options)
    console.push_render_hook(_EscapeHook())
    return console


class _SafeConsole(Console):
    def on_broken_pipe(self) -> None:
        # Rich would end the process, which services survive: see `ConsoleHandler`.
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


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
        OutputError: Standard output cannot be written.
        typer.Exit: After Ctrl-C.
    """
    try:
        result = asyncio.run(main)
        with output_errors():
            sys.stdout.flush()
    except KeyboardInterrupt:
        write_error("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    return result


@contextmanager
def cleanup_on_signals() -> Iterator[None]:
    """Exit with 128 + N at SIGTERM or SIGHUP in the block, so that `finally` blocks remove what they created.

    Without it, these signals end the process at once.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    numbers = [signal.SIGTERM, *([signal.SIGHUP] if sys.platform != "win32" else [])]
    # A command started with `nohup` continues after SIGHUP.
    before = {each: signal.signal(each, stop) for each in numbers if signal.getsignal(each) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def finish_output() -> None:
    """Flush standard output, or discard the rest if that fails.

    What a command prints has been flushed already; lines of logs that could not be written may remain.  Python would
    report them at exit, and replace the exit status.
    """
    if sys.stdout is None:  # closed by the caller
        return
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()


def drop_output() -> None:
    """Discard all further output.  Python flushes standard output at exit, which would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
