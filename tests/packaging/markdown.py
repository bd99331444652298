"""What pages that are made from code have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

MADE: Final = "Made by `make reference` from the code."


def cell(text: str) -> str:
    """One line that does not end its cell."""
    return " ".join(text.split()).replace("|", "\\|")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table without the columns that are empty in every row; cells are fit to stand in one."""
    filled = [place for place in range(len(headings)) if any(row[place] for row in rows)]
    headings, rows = [headings[place] for place in filled], [[row[place] for place in filled] for row in rows]
    yield f"| {' | '.join(headings)} |"
    yield f"| {' | '.join('---' for _ in headings)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"
