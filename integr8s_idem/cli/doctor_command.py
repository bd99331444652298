"""`integr8s-idem doctor`: what may be wrong with a set-up, one line a finding."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from integr8s_idem.cli.application_loader import optional_application
from integr8s_idem.cli.common import MISTAKE, Embedded, Json, SettingsFile, answered, quiet_clients, tell_of_embedded
from integr8s_idem.cli.output import say
from integr8s_idem.diagnostics import Code
from integr8s_idem.doctor import Asked, as_json, as_text, examined, status_of
from integr8s_idem.doctor.permissions import access_of

USAGE: Final = 64
"""Exit status of what was typed wrongly: 1 and 2 are those of findings."""


_UNANSWERED: Final = {Code.STORE_UNAVAILABLE, Code.BROKER_UNAVAILABLE}


class DoctorCommand(TyperCommand):
    """A command whose usage errors have a status of their own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # typer has no public name for the base of these errors; this is how it tells their status.
            if hasattr(error, "exit_code") and error.exit_code == MISTAKE:
                error.exit_code = USAGE
            raise


def doctor_command(
    application: Annotated[
        str | None, typer.Argument(metavar="MODULE:APP", help="The platform whose topics are looked at, too.")
    ] = None,
    settings: SettingsFile = None,
    embedded: Embedded = False,
    as_objects: Json = False,
    acl: Annotated[
        bool, typer.Option("--acl", help="Print the least rights that the store's user needs, and leave.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="What is well, too.")] = False,
) -> None:
    """Look for what would lose events or do them twice.

    It looks at the settings, the store, the brokers and the topics, and prints one line for each finding.  The exit
    status is that of the worst finding: 0 nothing to mend, 1 a warning, 2 an error; 64 for wrong usage.
    """

    def look() -> int:
        quiet_clients()
        asked = Asked(settings, optional_application(application), embedded)
        if acl:
            told = access_of(asked.settings())
            say(_as_json(told) if as_objects else told)
            return 0
        findings = asyncio.run(examined(asked))
        say(as_json(findings) if as_objects else as_text(findings, verbose=verbose))
        if not embedded and not _UNANSWERED.isdisjoint(finding.code for finding in findings):
            tell_of_embedded()
        return status_of(findings)

    raise typer.Exit(answered(look, mistake=USAGE))


def _as_json(lines: str) -> str:
    """A policy as it is, which is JSON; commands and statements as a list of texts."""
    return lines if lines.startswith("{") else json.dumps(lines.splitlines(), indent=2)
