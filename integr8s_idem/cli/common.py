"""Options, exit statuses and error reporting shared by all commands."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from integr8s_idem.cli.embedded_servers import embedded_hint
from integr8s_idem.cli.output import (
    INTERRUPTED,
    OutputClosedError,
    OutputError,
    drop_output,
    finish_output,
    write_error,
)
from integr8s_idem.errors import (
    ApplicationError,
    BrokerUnavailableError,
    IdempotencyError,
    SettingsError,
    StoreUnavailableError,
)

INVALID_INPUT: Final = 2
"""Exit status: the arguments or the settings are invalid."""

FAILURE: Final = 1
"""Exit status: a service or a server failed."""

_FULL: Final = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}

SettingsFile = Annotated[
    Path | None,
    typer.Option("--settings", metavar="FILE", help="Read settings from FILE.  [default: ./settings.toml, if present]"),
]
AppOption = Annotated[
    str | None, typer.Option("--app", metavar="MODULE:APP", help="Use the settings class of this platform.")
]
Embedded = Annotated[
    bool, typer.Option("--embedded", help="Use the servers that `run --embedded` started in this directory.")
]
Json = Annotated[bool, typer.Option("--json", help="Output JSON.")]


def exit_status_of(command: Callable[[], int], *, invalid_input: int = INVALID_INPUT, embedded: bool = True) -> int:
    """Run `command` and return its exit status; print expected errors without a traceback.

    The status is 0 if the reader of standard output closes it.  Commands whose status has another meaning use
    `write_report` or `closable_output`.

    Args:
        command: Returns an exit status.
        invalid_input: Exit status for invalid settings or arguments.
        embedded: Whether the command uses embedded servers, or no servers.
    """
    try:
        return command()
    except (SettingsError, ApplicationError) as error:
        write_error(f"{_name(error)}{error}")
        return FAILURE if isinstance(error, ApplicationError) and error.is_missing else invalid_input
    except IdempotencyError as error:
        write_error(f"{_name(error)}{error}")
        if not embedded and isinstance(error, StoreUnavailableError | BrokerUnavailableError):
            print_embedded_hint()
        return FAILURE
    except KeyboardInterrupt:
        write_error("interrupted")
        return INTERRUPTED
    except OutputClosedError:
        drop_output()
        return 0
    except OutputError as error:
        drop_output()
        write_error(f"cannot write to standard output: {error}")
        return FAILURE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        drop_output()
        where = f"{error.filename}: " if error.filename else ""
        write_error(f"{where}{error.strerror}")
        return FAILURE
    finally:
        finish_output()


def print_embedded_hint() -> None:
    """Suggest `--embedded` if embedded servers run in this folder."""
    if hint := embedded_hint():
        write_error(hint)


def silence_client_logs() -> None:
    """Suppress the log lines of client libraries; commands report errors themselves."""
    logging.getLogger().addHandler(logging.NullHandler())


def _name(error: IdempotencyError) -> str:
    return "" if isinstance(error, SettingsError) else f"{type(error).__name__}: "
