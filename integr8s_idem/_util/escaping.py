"""Escape control characters in text from outside before it is logged or displayed.

Keys, errors, headers, paths and topic names come from outside; all code that displays them uses these functions.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` on one line, with control characters escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """Return `text` with control characters escaped, except line breaks and tabs."""
    if text.isprintable():
        return text
    return "".join(
        each if each in "\n\t" or each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def shown(text: str, longest: int) -> str:
    """Return `text` as `printable` does, truncated to `longest` characters."""
    return printable(text if len(text) <= longest else text[:longest] + "…")
