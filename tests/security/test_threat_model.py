"""Every row of the threat model names an existing test."""

from __future__ import annotations

import re

import pytest

from tests.packaging.repository import ROOT

PAGE = ROOT / "docs" / "explanation" / "threat-model.md"
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
ROWS = [row for row in ROWS if not row.startswith(("| They try to |", "| ---"))]
TEST = re.compile(r"\[(?P<name>test_\w+)\]\(\.\./\.\./(?P<file>tests/security/\w+\.py)\) \|$")


def test_the_threat_model_has_rows() -> None:
    assert len(ROWS) > 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_a_row_names_an_existing_test(row: str) -> None:
    named = TEST.search(row)
    assert named, row
    text = (ROOT / named["file"]).read_text(encoding="utf-8")
    assert re.search(rf"def {named['name']}\(", text), row
