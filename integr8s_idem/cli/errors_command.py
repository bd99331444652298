"""`integr8s-idem errors`: what an error means, and what to do about it."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from integr8s_idem.cli.common import answered
from integr8s_idem.cli.output import say
from integr8s_idem.operations.error_sections import error_section, error_sections


def errors_command(
    named: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Its name, or the place that its message tells to read more.")
    ] = None,
) -> None:
    """Say what an error means, and what to do.

    Without a name, list all of them.
    """

    def tell() -> int:
        if named is None:
            sections = error_sections()
            width = max(map(len, sections))
            for name, text in sections.items():
                say(f"{name:<{width}}  {_summary(text)}")
            return 0
        name, text = error_section(named)
        say(f"{name}\n\n{text}")
        return 0

    raise typer.Exit(answered(tell))


def _summary(text: str) -> str:
    """The beginning of the first sentence, on one line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"[.:](?: |$)", paragraph, maxsplit=1)[0]
