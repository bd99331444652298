"""The fault matrix matches the tests and the campaign records."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.campaigns import __main__ as command
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.campaigns.marks import marked
from tests.campaigns.matrix import PAGE, cases, groups, page
from tests.campaigns.record import Record, commit, load, load_tests, save
from tests.campaigns.registry import campaigns
from tests.packaging.repository import ROOT

NUMBERS = [row.number for _, rows in groups() for row in rows]


def test_the_page_matches_the_markers_rows_and_records() -> None:
    assert PAGE.read_text() == page(), "run `make matrix`"


def test_tests_without_recorded_results_are_counted() -> None:
    outcomes = {"a.py::test_b": {"passed": 2, "skipped": 1}, "a.py::test_bc": {"failed": 1}}

    assert cases(["a.py::test_b"], outcomes) == "2 passed, 1 skipped"
    assert cases(["a.py::test_b", "c.py"], outcomes) == "2 passed, 1 skipped, 1 of 2 tests not recorded"
    assert cases(["c.py"], outcomes) == "1 of 1 tests not recorded"
    assert cases([], outcomes) == "-"


IN_MEMORY = {f"tests.support.{name}" for name in ("fake_consumer", "fake_worker", "guarded", "redis_shop")}
"""Modules of `tests.support` with an in-memory broker or store."""


def test_a_marked_file_with_an_in_memory_broker_or_store_states_in_memory_in_its_docstring() -> None:
    marked_files = {place.partition("::")[0] for places in marked().values() for place in places}
    silent = {name for name in marked_files if not _states_in_memory(ast.parse((ROOT / name).read_text()))}

    assert {name for name in silent if not name.startswith("tests/unit/")} == set()


def _states_in_memory(module: ast.Module) -> bool:
    imported = {node.module for node in module.body if isinstance(node, ast.ImportFrom)}
    return imported.isdisjoint(IN_MEMORY) or "in memory" in (ast.get_docstring(module) or "")


def test_rows_are_numbered_without_gaps() -> None:
    assert list(range(1, len(NUMBERS) + 1)) == NUMBERS


def test_every_marker_and_campaign_names_existing_rows() -> None:
    named = set(marked()).union(*(campaign.scenarios for campaign in campaigns().values()))

    assert named <= set(NUMBERS)


def test_a_row_without_a_test_has_a_note() -> None:
    shown = set(marked()).union(*(campaign.scenarios for campaign in campaigns().values()))

    assert [row.number for _, rows in groups() for row in rows if row.number not in shown and not row.note] == []


def test_no_campaign_has_recorded_violations() -> None:
    assert {name: load(name).violations for name in campaigns() if load(name).violations} == {}


def test_markers_are_found_on_functions_methods_classes_and_files(tmp_path: Path) -> None:
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


def test_a_saved_record_can_be_extended(tmp_path: Path) -> None:
    record = Record()
    record.add(0, 10, Figures(kills=7, lost=0), 1.5)
    save("kills", record, tmp_path)

    loaded = load("kills", tmp_path)
    loaded.add(10, 10, Figures(kills=5, lost=0), 1.0)

    assert (loaded.next, loaded.figures["kills"], loaded.seconds) == (20, 12, 2.5)


def test_a_commit_with_uncommitted_library_changes_has_a_plus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.campaigns.record.ROOT", tmp_path)
    module = tmp_path / "integr8s_idem" / "keys.py"
    module.parent.mkdir()
    module.write_text("A = 1")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for step in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--no-gpg-sign", "--message", "one"]):
        subprocess.run([*git, *step], check=True)

    clean = commit()
    (tmp_path / "notes").write_text("outside the library")
    assert commit() == clean
    module.write_text("A = 2")

    assert re.fullmatch("[0-9a-f]{8}", clean)
    assert commit() == f"{clean}+"


class CommandBench:
    """The command with one campaign, whose record is in a temporary folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder = folder
        self.breaks = False
        self.batches: list[tuple[int, int]] = []
        campaign = Campaign("kills", "kills", "a kill", (17,), 1, 10, 5, self.run)
        monkeypatch.setattr(command, "campaigns", lambda: {"kills": campaign})
        monkeypatch.setattr(command, "load", lambda name: load(name, folder))
        monkeypatch.setattr(command, "save", lambda name, record: save(name, record, folder))

    def run(self, first: int, count: int) -> Figures:
        self.batches.append((first, count))
        if self.breaks:
            raise ViolationError(f"number {first} lost one")
        return Figures(kills=count, lost=0)

    @property
    def record(self) -> Record:
        return load("kills", self.folder)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandBench:
    return CommandBench(monkeypatch, tmp_path)


def test_a_campaign_runs_in_batches_up_to_its_target(bench: CommandBench) -> None:
    assert command.main(["kills"]) == 0
    assert command.main(["kills"]) == 0

    assert bench.batches == [(0, 5), (5, 5)]
    assert bench.record.figures == {"kills": 10, "lost": 0}


def test_a_violation_is_recorded_and_ends_the_campaign(bench: CommandBench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.breaks = True

    assert command.main(["kills"]) == 1
    assert bench.record.violations == ["batch from 0: number 0 lost one"]
    assert bench.record.figures == {}
    assert "to repeat the batch: python -m tests.campaigns kills --only 0:5" in capsys.readouterr().err


@pytest.mark.parametrize("breaks", [False, True])
def test_only_repeats_trials_without_recording_them(
    bench: CommandBench, breaks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.breaks = breaks

    assert command.main(["kills", "--only", "7"]) == breaks

    assert command.main(["kills", "--only", "30:10"]) == breaks
    assert bench.batches == [(7, 1), (30, 10)]
    assert bench.record == Record()
    output = capsys.readouterr()
    assert "kills 7" in (output.err if breaks else output.out)
    assert ("BROKEN: number 7 lost one" in output.err) == breaks


def test_the_progress_of_campaigns_is_printed_as_text_and_json(
    bench: CommandBench, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main(["kills", "--target", "5"])
    capsys.readouterr()

    assert command.main([]) == 0
    assert capsys.readouterr().out.split()[:5] == ["kills", "5", "of", "10", "kills"]
    assert command.main(["--json"]) == 0
    progress = json.loads(capsys.readouterr().out)["kills"]
    assert (progress["target"], progress["next"], progress["figures"]["kills"], progress["violations"]) == (
        10,
        5,
        5,
        [],
    )


@pytest.mark.parametrize(
    "wrong", [["--only", "x"], ["--only", "5:0"], ["--only", "-1"], ["--target", "-3"], ["--minutes", "nan"]]
)
def test_invalid_numbers_are_rejected(bench: CommandBench, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(["kills", *wrong])

    assert refused.value.code == 2
    assert bench.batches == []


def test_no_test_has_a_recorded_failure() -> None:
    assert [test for test, counts in load_tests().items() if counts.get("failed")] == []


def test_an_unknown_campaign_is_rejected(bench: CommandBench, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["kill"]) == 2
    assert "unknown campaign: kill; choose from kills" in capsys.readouterr().err
