"""The documentation of errors, available without the documentation site.

The text is `docs/reference/errors.md`.  Wheels include it; in a checkout it is read from `docs`.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from integr8s_idem.errors import ApplicationError

PLACE: Final = "docs/reference/errors.md"
"""The page that error messages refer to."""
_SECTION: Final = re.compile(r"^## (?P<name>\w+)\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\[(?P<words>[^\]]+)\]\((?P<target>[^)]+)\)")


@cache
def error_sections() -> dict[str, str]:
    """Return the section of each error as plain text, by name, in the order of the page."""
    page = files("integr8s_idem.operations").joinpath("errors.md")
    text = page.read_text("utf-8") if page.is_file() else _in_the_checkout().read_text("utf-8")
    return {found["name"]: _plain(found["text"]) for found in _SECTION.finditer(text)}


def error_section(named: str) -> tuple[str, str]:
    """Return the name of an error and its section.

    Args:
        named: Name of the error, ignoring case, or the link in its message.

    Raises:
        ApplicationError: The error is unknown.
    """
    wanted = named.rpartition("#")[2].rpartition(".")[2].lower()
    sections = error_sections()
    for name, text in sections.items():
        if name.lower() == wanted:
            return name, text
    near = get_close_matches(wanted, [name.lower() for name in sections], n=1)
    meant = next((name for name in sections if [name.lower()] == near), "")
    hint = f' (did you mean "{meant}"?)' if meant else ""
    raise ApplicationError(f'unknown error "{named}"{hint}; `integr8s-idem errors` lists all errors')


def _in_the_checkout() -> Path:
    return Path(__file__).parents[2] / PLACE


def _plain(markdown: str) -> str:
    """Replace links by their text, and list the pages to which they lead at the end."""
    targets = (link["target"].removeprefix("../") for link in _LINK.finditer(markdown))
    pages = dict.fromkeys(f"docs/{target}" for target in targets if not target.startswith("#"))
    text = _LINK.sub(lambda link: link["words"], markdown.replace("**", "")).strip()
    return f"{text}\n\nSee {', '.join(pages)}." if pages else text
