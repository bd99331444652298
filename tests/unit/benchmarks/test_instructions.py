"""Counting instructions: reading the report, and what is missing on the machine."""

from __future__ import annotations

import pytest

from benchmarks.instructions import instructions, total_of

REPORT = """# callgrind format
events: Ir
summary: 1200

fn=(1) run
1 1200

totals: 1200
"""


def test_the_total_is_read() -> None:
    assert total_of(REPORT.replace("summary: 1200\n", "")) == 1200


def test_a_total_that_is_stated_twice_is_counted_once() -> None:
    assert total_of(REPORT) == 1200


def test_a_report_without_a_total_is_refused() -> None:
    with pytest.raises(ValueError, match="no total"):
        total_of("# callgrind format\n")


def test_valgrind_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(SystemExit, match="apt-get install valgrind"):
        instructions("guarded", 1)
