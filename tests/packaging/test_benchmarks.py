"""The pages say what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.servers import KINDS
from benchmarks.tables import PAGES, RESULTS, filled
from tests.packaging.repository import name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_tables_are_those_of_the_results(page: Path) -> None:
    told = json.loads(RESULTS.read_text(encoding="utf-8"))

    assert page.read_text(encoding="utf-8") == filled(page.read_text(encoding="utf-8"), told)


def test_every_kind_of_store_was_measured() -> None:
    told = json.loads(RESULTS.read_text(encoding="utf-8"))

    assert {name.partition(".")[0] for name in told} - {"machine", "version"} == set(KINDS)
