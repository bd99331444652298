"""The page of doctor's codes and the code agree."""

from __future__ import annotations

import re

import pytest

from integr8s_idem.findings import Code, Severity
from tests.packaging.repository import ROOT

PAGE = (ROOT / "docs" / "reference" / "doctor.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z-]+)` \| ([a-z, ]+) \| (.+) \|$", PAGE, re.MULTILINE)
LIBRARY = [file for file in (ROOT / "integr8s_idem").rglob("*.py") if file.name != "findings.py"]
SOURCE = "\n".join(file.read_text(encoding="utf-8") for file in LIBRARY)


def test_the_page_explains_every_code_once_and_no_other() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(code.value for code in Code)


@pytest.mark.parametrize(("name", "severities"), [(name, severities) for name, severities, _ in ROWS])
def test_severities_are_those_that_there_are(name: str, severities: str) -> None:
    assert {word.strip() for word in severities.split(",")} <= {severity.value for severity in Severity}, name


@pytest.mark.parametrize("code", Code)
def test_every_code_is_found_by_something(code: Code) -> None:
    assert re.search(rf"\bCode\.{code.name}\b", SOURCE)
