"""Confirmation prompts and options of commands that change records or publish messages."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from integr8s_idem.cli.output import write_error
from integr8s_idem.errors import ApplicationError

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
AuditFile = Annotated[
    str | None,
    typer.Option(
        "--audit-file",
        metavar="FILE",
        help="Append audit lines to FILE, or to standard error if it is -.  "
        "[default: ~/.local/state/integr8s-idem/audit.jsonl]",
    ),
]

DECLINED: Final = "nothing was changed"


def confirm(question: str) -> bool:
    """Ask `question` on the terminal and return whether the answer is yes.

    Raises:
        ApplicationError: There is no terminal.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ApplicationError(f"{DECLINED}: no terminal to ask for confirmation. {question} Use --yes to confirm")
    try:
        if typer.confirm(question, default=False, err=True):
            return True
    except typer.Abort:  # Ctrl-C or Ctrl-D
        write_error()
    write_error(DECLINED)
    return False
