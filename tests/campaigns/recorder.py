"""Pytest plugin that records the outcomes of marked tests: `pytest -p tests.campaigns.recorder -m scenario`."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from tests.campaigns.marks import marked
from tests.campaigns.record import load_tests, save_tests

_seen: defaultdict[str, Counter[str]] = defaultdict(Counter)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Skips and broken fixtures are reported by the set-up phase, everything else by the call.
    if report.when == "call" or report.outcome != "passed":
        _seen[report.nodeid.partition("[")[0]][report.outcome] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # an xdist worker: the controller receives the reports of all workers
    places = {place for row in marked().values() for place in row}
    kept = {**load_tests(), **{test: dict(outcomes) for test, outcomes in _seen.items()}}
    save_tests({test: counts for test, counts in kept.items() if any(belongs(test, place) for place in places)})


def belongs(test: str, place: str) -> bool:
    """Return whether `test` is `place`, or is inside it."""
    return test == place or test.startswith(f"{place}::")
