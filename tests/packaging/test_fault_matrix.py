"""The fault matrix says what the tests say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.campaigns.marks import marked
from tests.campaigns.matrix import PAGE, groups, page
from tests.campaigns.record import Record, load, save
from tests.campaigns.registry import campaigns

NUMBERS = [row.number for _, rows in groups() for row in rows]


def test_the_page_is_what_marks_rows_and_records_make() -> None:
    assert PAGE.read_text() == page(), "run `make matrix`"


def test_rows_are_numbered_without_gaps() -> None:
    assert list(range(1, len(NUMBERS) + 1)) == NUMBERS


def test_every_mark_and_every_campaign_names_rows_that_exist() -> None:
    named = set(marked()).union(*(campaign.scenarios for campaign in campaigns().values()))

    assert named <= set(NUMBERS)


def test_a_row_without_a_test_says_why() -> None:
    shown = set(marked()).union(*(campaign.scenarios for campaign in campaigns().values()))

    assert [row.number for _, rows in groups() for row in rows if row.number not in shown and not row.note] == []


def test_no_campaign_has_a_broken_promise_on_record() -> None:
    assert {name: load(name).violations for name in campaigns() if load(name).violations} == {}


def test_marks_are_found_on_functions_methods_classes_and_files(tmp_path: Path) -> None:
    mark = "pytest.mark." + "scenario"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        f"pytestmark = [pytest.mark.kafka, {mark}(1)]\n@{mark}(2, 3)\nasync def test_b(): ...\n"
        f"@{mark}(4)\nclass TestC:\n    @{mark}(5)\n    def test_d(self): ...\n"
    )

    found = marked(tmp_path / "tests")

    assert found == {
        1: ["tests/test_a.py"],
        2: ["tests/test_a.py::test_b"],
        3: ["tests/test_a.py::test_b"],
        4: ["tests/test_a.py::TestC"],
        5: ["tests/test_a.py::TestC::test_d"],
    }


def test_a_record_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    record = Record()
    record.add(0, 10, Figures(kills=7, lost=0), 1.5)
    save("kills", record, tmp_path)

    again = load("kills", tmp_path)
    again.add(10, 10, Figures(kills=5, lost=0), 1.0)

    assert (again.next, again.figures["kills"], again.seconds) == (20, 12, 2.5)


def test_a_broken_promise_is_kept_and_ends_the_campaign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.campaigns import __main__ as command

    def broken(first: int, count: int) -> Figures:
        raise ViolationError(f"number {first} lost one")

    campaign = Campaign("kills", "kills", "a kill", (17,), 1, 10, 5, broken)
    monkeypatch.setattr(command, "campaigns", lambda: {"kills": campaign})
    monkeypatch.setattr(command, "load", lambda name: load(name, tmp_path))
    monkeypatch.setattr(command, "save", lambda name, record: save(name, record, tmp_path))

    assert command.main(["kills"]) == 1
    assert load("kills", tmp_path).violations == ["batch from 0: number 0 lost one"]
    assert load("kills", tmp_path).figures == {}
