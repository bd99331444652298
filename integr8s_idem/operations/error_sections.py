"""What the documentation says of each error, for whoever has the package alone.

There is one text, `docs/reference/errors.md`.  A wheel carries it; in a checkout it is read where it stands.
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
"""What messages of errors name."""
_SECTION: Final = re.compile(r"^## (?P<name>\w+)\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\[(?P<words>[^\]]+)\]\((?P<target>[^)]+)\)")


@cache
def error_sections() -> dict[str, str]:
    """What is said of each error, by its name, in the order of the page; as plain text."""
    page = files("integr8s_idem.operations").joinpath("errors.md")
    text = page.read_text("utf-8") if page.is_file() else _in_the_checkout().read_text("utf-8")
    return {found["name"]: _plain(found["text"]) for found in _SECTION.finditer(text)}


def error_section(named: str) -> tuple[str, str]:
    """The name of an error, and what is said of it.

    Args:
        named: Its name, in capitals or not, or the place in the documentation that its message tells.

    Raises:
        ApplicationError: There is no such error.
    """
    wanted = named.rpartition("#")[2].rpartition(".")[2].lower()
    sections = error_sections()
    for name, text in sections.items():
        if name.lower() == wanted:
            return name, text
    near = get_close_matches(wanted, [name.lower() for name in sections], n=1)
    meant = next((name for name in sections if [name.lower()] == near), "")
    hint = f' (did you mean "{meant}"?)' if meant else ""
    raise ApplicationError(f'no error of ours is called "{named}"{hint}; `integr8s-idem errors` lists them')


def _in_the_checkout() -> Path:
    return Path(__file__).parents[2] / PLACE


def _plain(markdown: str) -> str:
    """Links as their words; those that lead out of the page with the place behind them."""
    return _LINK.sub(_told, markdown.replace("**", "")).strip()


def _told(link: re.Match[str]) -> str:
    target = link["target"]
    return link["words"] if target.startswith("#") else f"{link['words']} (docs/{target.removeprefix('../')})"
