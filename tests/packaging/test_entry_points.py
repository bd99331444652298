"""The page about entry points matches the declarations in the tests."""

from __future__ import annotations

from tests.entry_points.entry import Case
from tests.entry_points.table import GROUPS, PAGE, with_tables


def test_the_tables_match_the_declared_entry_points() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run `python -m tests.entry_points.table`"


def test_every_case_is_in_exactly_one_table() -> None:
    assert sorted(case.name for cases in GROUPS.values() for case in cases) == sorted(case.name for case in Case)
