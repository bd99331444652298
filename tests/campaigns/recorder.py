"""A pytest plugin that keeps the outcomes of marked tests: `pytest -p tests.campaigns.recorder -m scenario`."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from tests.campaigns.marks import marked
from tests.campaigns.record import load_tests, save_tests

_seen: defaultdict[str, Counter[str]] = defaultdict(Counter)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Set-up tells of skips and broken fixtures, the call of everything else.
    if report.when == "call" or report.outcome != "passed":
        _seen[report.nodeid.partition("[")[0]][report.outcome] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # one of several processes: the one that started them hears of all
    places = {place for row in marked().values() for place in row}
    kept = {**load_tests(), **{test: dict(outcomes) for test, outcomes in _seen.items()}}
    save_tests({test: told for test, told in kept.items() if any(belongs(test, place) for place in places)})


def belongs(test: str, place: str) -> bool:
    """Whether `test` is `place`, or is in it."""
    return test == place or test.startswith(f"{place}::")
