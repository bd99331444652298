"""What all commands have in common: options, exit statuses, and how errors are told."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from integr8s_idem.cli.lines import drop_output
from integr8s_idem.errors import ApplicationError, IdempotencyError, SettingsError

MISTAKE: Final = 2
"""Exit status: what was asked for, or the settings, cannot be."""

FAILURE: Final = 1
"""Exit status: a service failed, or a server did."""

_FULL: Final = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}

SettingsFile = Annotated[
    Path | None, typer.Option("--settings", metavar="FILE", help="TOML file; ./settings.toml if it is there.")
]
AppOption = Annotated[
    str | None, typer.Option("--app", metavar="MODULE:APP", help="The platform whose own settings count as well.")
]
Embedded = Annotated[
    bool, typer.Option("--embedded", help="The servers of the `run --embedded` that runs in this folder.")
]
Json = Annotated[bool, typer.Option("--json", help="For machines.")]


def answered(command: Callable[[], int], *, mistake: int = MISTAKE) -> int:
    """The exit status of `command`; errors that explain themselves are printed without a traceback."""
    try:
        return command()
    except (SettingsError, ApplicationError) as error:
        typer.echo(f"{_name(error)}{error}", err=True)
        return mistake
    except IdempotencyError as error:
        typer.echo(f"{_name(error)}{error}", err=True)
        return FAILURE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        drop_output()
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"{where}{error.strerror}: nothing more can be written", err=True)
        return FAILURE


def quiet_clients() -> None:
    """What clients of servers log of their own is told by the errors and findings that come of it."""
    logging.getLogger().addHandler(logging.NullHandler())


def _name(error: IdempotencyError) -> str:
    return "" if isinstance(error, SettingsError) else f"{type(error).__name__}: "
