"""What all commands have in common: options, exit statuses, and how errors are told."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from integr8s_idem.cli.embedded_servers import hint_of_embedded
from integr8s_idem.cli.output import INTERRUPTED, drop_output, write_error
from integr8s_idem.errors import (
    ApplicationError,
    BrokerUnavailableError,
    IdempotencyError,
    SettingsError,
    StoreUnavailableError,
)

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


def answered(command: Callable[[], int], *, mistake: int = MISTAKE, embedded: bool = True) -> int:
    """Return the exit status of `command`; print errors that explain themselves without a traceback.

    Args:
        command: What to do.
        mistake: The exit status of settings or arguments that cannot be.
        embedded: Whether the command asks embedded servers, or none at all.
    """
    try:
        return command()
    except (SettingsError, ApplicationError) as error:
        write_error(f"{_name(error)}{error}")
        return FAILURE if isinstance(error, ApplicationError) and error.is_missing else mistake
    except IdempotencyError as error:
        write_error(f"{_name(error)}{error}")
        if not embedded and isinstance(error, StoreUnavailableError | BrokerUnavailableError):
            tell_of_embedded()
        return FAILURE
    except KeyboardInterrupt:
        write_error("interrupted")
        return INTERRUPTED
    except OSError as error:
        if error.errno not in _FULL:
            raise
        drop_output()
        where = f"{error.filename}: " if error.filename else ""
        write_error(f"{where}{error.strerror}: nothing more can be written")
        return FAILURE


def tell_of_embedded() -> None:
    """Point at the embedded servers that run in this folder, if a command got no answer from others."""
    if hint := hint_of_embedded():
        write_error(hint)


def quiet_clients() -> None:
    """What clients of servers log of their own is told by the errors and findings that come of it."""
    logging.getLogger().addHandler(logging.NullHandler())


def _name(error: IdempotencyError) -> str:
    return "" if isinstance(error, SettingsError) else f"{type(error).__name__}: "
