"""Before something is changed for good: what people are asked, and what scripts must say."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from integr8s_idem.cli.output import write_error
from integr8s_idem.errors import ApplicationError

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking; scripts need this.")]
AuditFile = Annotated[
    str | None,
    typer.Option(
        "--audit-file",
        metavar="FILE",
        help="Where the audit lines go; - is standard error.  [default: ~/.local/state/integr8s-idem/audit.jsonl]",
    ),
]

DECLINED: Final = "nothing was changed"


def agreed(question: str) -> bool:
    """Whether to go on.  `question` says what is going to be changed, with its number.

    Raises:
        ApplicationError: Nobody is there to be asked.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ApplicationError(f"{DECLINED}: there is no terminal to ask on. {question} Say --yes to do it")
    try:
        if typer.confirm(question, default=False, err=True):
            return True
    except typer.Abort:  # Ctrl-C or Ctrl-D
        write_error()
    write_error(DECLINED)
    return False
