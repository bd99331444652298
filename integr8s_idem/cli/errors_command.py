"""`integr8s-idem errors`: explain an error and how to resolve it."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from integr8s_idem.cli.common import Json, exit_status_of
from integr8s_idem.cli.output import echo
from integr8s_idem.operations.error_sections import error_section, error_sections


def errors_command(
    named: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Name of an error, or the link at the end of its message.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain an error and how to resolve it.

    Without a name, list all errors.  With --json, print an object that maps names of errors to their explanations.
    """

    def run() -> int:
        if as_json:
            echo(json.dumps(error_sections() if named is None else dict([error_section(named)]), indent=2))
            return 0
        if named is None:
            sections = error_sections()
            width = max(map(len, sections))
            for name, text in sections.items():
                echo(f"{name:<{width}}  {_summary(text)}")
            return 0
        name, text = error_section(named)
        echo(f"{name}\n\n{text}")
        return 0

    raise typer.Exit(exit_status_of(run))


def _summary(text: str) -> str:
    """Return the first clause on one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"[.:](?: |$)", paragraph, maxsplit=1)[0]
