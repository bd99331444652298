"""Lines of unknown number on standard output, for whoever reads them as far as they like."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import typer

T = TypeVar("T")

INTERRUPTED: Final = 130
"""Exit status: Ctrl-C, as shells tell it."""


class ReaderGoneError(Exception):
    """Whoever reads standard output has enough: `| head`."""


def write_line(line: str) -> None:
    """One line on standard output, buffered where that is a pipe.

    Raises:
        ReaderGoneError: Nobody reads it any more.
    """
    try:
        sys.stdout.write(line + "\n")
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns.

    Raises:
        typer.Exit: Ctrl-C, or whoever reads standard output has gone: the command ends, without a traceback.
    """
    try:
        answer = asyncio.run(work)
        sys.stdout.flush()
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (ReaderGoneError, BrokenPipeError):
        drop_output()
        raise typer.Exit from None
    return answer


def drop_output() -> None:
    """Print nothing more.  Python flushes once more at its exit, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
