"""Helpers for pages that are generated from code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

MADE: Final = "Generated from the code by `make reference`."


def cell(text: str) -> str:
    """Return `text` as one line, escaped for a table cell."""
    return " ".join(text.split()).replace("|", "\\|")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, without columns that are empty in every row; the cells are escaped already."""
    filled = [place for place in range(len(headings)) if any(row[place] for row in rows)]
    headings, rows = [headings[place] for place in filled], [[row[place] for place in filled] for row in rows]
    yield f"| {' | '.join(headings)} |"
    yield f"| {' | '.join('---' for _ in headings)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"
