"""The guard over the figures: what it lets pass, and what not."""

from __future__ import annotations

import pytest

from benchmarks.guard import findings
from benchmarks.targets import TARGETS, Target

REACHED = {key: target.bound for key, target in TARGETS.items()}


@pytest.fixture(autouse=True)
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the present figures are excused for is no matter here."""
    plain = {key: Target(target.meaning, target.bound, target.at_most, noise=0.25) for key, target in TARGETS.items()}
    monkeypatch.setattr("benchmarks.guard.TARGETS", plain)


def wrong_with(key: str, now: dict[str, float], before: dict[str, float]) -> str:
    [found] = [finding for finding in findings({**REACHED, **now}, {**REACHED, **before}) if finding.key == key]
    return found.wrong


def test_figures_that_reach_their_targets_hold() -> None:
    assert [finding.wrong for finding in findings(REACHED, REACHED)] == [""] * len(TARGETS)


@pytest.mark.parametrize(("now", "wrong"), [(0.86, ""), (0.75, "misses its target")])
def test_a_figure_may_miss_its_target_by_a_margin(now: float, wrong: str) -> None:
    assert wrong_with("single_fresh_c1", {"single_fresh_c1": now}, {}) == wrong


@pytest.mark.parametrize(("now", "wrong"), [(1.4, ""), (1.5, "misses its target")])
def test_of_some_figures_less_is_better(now: float, wrong: str) -> None:
    assert wrong_with("latency_p99_ratio", {"latency_p99_ratio": now}, {}) == wrong


def test_a_figure_far_behind_the_committed_one_fails_though_it_reaches_its_target() -> None:
    fallen = wrong_with("single_fresh_c64", {"single_fresh_c64": 3.1}, {"single_fresh_c64": 5.0})

    assert fallen == "fell behind what is committed"


def test_a_figure_with_a_known_limit_is_held_against_the_committed_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = Target("a call", 1.0, limit="the network")
    monkeypatch.setattr("benchmarks.guard.TARGETS", {"single_fresh_c1": limited})

    assert wrong_with("single_fresh_c1", {"single_fresh_c1": 0.5}, {"single_fresh_c1": 0.5}) == ""
    assert wrong_with("single_fresh_c1", {"single_fresh_c1": 0.3}, {"single_fresh_c1": 0.5}) != ""


def test_a_figure_that_is_missing_fails() -> None:
    now = {key: value for key, value in REACHED.items() if key != "growth_2m"}

    assert [finding.wrong for finding in findings(now, {}) if finding.wrong] == ["not measured"]
