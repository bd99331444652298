"""Text from outside, made fit for people to read: nothing that a terminal or a log would obey instead of show.

Keys, errors, headers, paths and names of topics are chosen by others.  Whatever shows them goes through here.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` in one line, with escapes for whatever a terminal would obey instead of show."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """As `printable`, but ends of lines and tabs stay: for text that was made of printable lines."""
    if text.isprintable():
        return text
    return "".join(
        each if each in "\n\t" or each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def shown(text: str, longest: int) -> str:
    """`text` as `printable` makes it, cut at `longest` characters."""
    return printable(text if len(text) <= longest else text[:longest] + "…")
