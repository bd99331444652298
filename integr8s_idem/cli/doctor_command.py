"""`integr8s-idem doctor`: check settings, store, brokers and topics."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from integr8s_idem.cli.application_loader import optional_application
from integr8s_idem.cli.common import (
    INVALID_INPUT,
    Embedded,
    Json,
    SettingsFile,
    exit_status_of,
    print_embedded_hint,
    silence_client_logs,
)
from integr8s_idem.cli.output import closable_output, echo
from integr8s_idem.diagnostics import Code
from integr8s_idem.doctor import Examination, as_json, as_text, examine, status_of
from integr8s_idem.doctor.permissions import access_of

USAGE: Final = 64
"""Exit status for wrong usage; 1 and 2 are the statuses of findings."""


_UNANSWERED: Final = {Code.STORE_UNAVAILABLE, Code.BROKER_UNAVAILABLE}


class DoctorCommand(TyperCommand):
    """A command that exits with `USAGE` after usage errors."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # typer has no public base class for its usage errors; they carry an exit code.
            if hasattr(error, "exit_code") and error.exit_code == INVALID_INPUT:
                error.exit_code = USAGE
            raise


def doctor_command(
    application: Annotated[
        str | None, typer.Argument(metavar="MODULE:APP", help="Also check the topics of this platform.")
    ] = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_objects: Json = False,
    acl: Annotated[
        bool, typer.Option("--acl", help="Print the minimum permissions of the store's user and exit.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also list checks that passed.")] = False,
) -> None:
    """Find problems that could lose or duplicate events.

    Checks the settings, the store, the brokers and the topics, and prints one line for each finding.  The exit status
    is that of the worst finding: 0 no problems, 1 a warning, 2 an error; 64 for wrong usage.
    """

    def run() -> int:
        silence_client_logs()
        examination = Examination(settings, optional_application(application), embedded)
        if acl:
            permissions = access_of(examination.settings())
            echo(_as_json(permissions) if as_objects else permissions)
            return 0
        findings = asyncio.run(examine(examination))
        with closable_output():
            echo(as_json(findings) if as_objects else as_text(findings, verbose=verbose))
        if not embedded and not _UNANSWERED.isdisjoint(finding.code for finding in findings):
            print_embedded_hint()
        return status_of(findings)

    raise typer.Exit(exit_status_of(run, invalid_input=USAGE))


def _as_json(lines: str) -> str:
    """Return a policy unchanged, since it is JSON; return commands and statements as a list of strings."""
    return lines if lines.startswith("{") else json.dumps(lines.splitlines(), indent=2)
