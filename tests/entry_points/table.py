"""Generate the tables of docs/reference/entry-points.md: `python -m tests.entry_points.table`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.entry_points.entry import Case
from tests.entry_points.ground import ENTRIES

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "entry-points.md"

GROUPS: Final[Mapping[str, Sequence[Case]]] = {
    "One key, more than once": (*(Case.TWO_AT_ONCE, Case.FALSY, Case.ITERATOR, Case.TOO_LARGE, Case.OTHER_PAYLOAD),),
    "The work fails": (Case.FAILURE, Case.FAILURES),
    "The process dies, stalls, or stops": (Case.CRASH, Case.ZOMBIE, Case.CANCELLED),
    "The store is down": (Case.DOWN_BEFORE, Case.DOWN_AFTER, Case.DOWN_FOR_LONG),
}


def table(cases: Sequence[Case]) -> str:
    """Return a table with a row for each entry point and a column for each case."""
    rows = [["entry", *(case.value for case in cases)], ["---"] * (1 + len(cases))]
    rows += [[entry.label, *(entry.cell(case) for case in cases)] for entry in ENTRIES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_tables(page: str) -> str:
    """Return `page` with the table below each heading regenerated."""
    for heading, cases in GROUPS.items():
        below = re.compile(rf"(## {re.escape(heading)}\n(?:(?!\n##).)*?\n\n)(?:\|[^\n]*\n)+", re.DOTALL)
        page, count = below.subn(lambda found, cases=cases: found[1] + table(cases), page)  # type: ignore[misc]
        assert count == 1, heading
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
