"""The guard over the figures: what it lets pass, and what not."""

from __future__ import annotations

from argparse import ArgumentTypeError
from types import ModuleType

import pytest

from benchmarks import guard, tables
from benchmarks.guard import Finding, findings
from benchmarks.rounds import at_least_one
from benchmarks.targets import Target

TARGETS = {
    "single_fresh_c1": Target("calls, one at a time", 0.9),
    "single_fresh_c64": Target("calls, 64 at once", 3.0),
    "growth_2m": Target("rate with many keys", 0.9),
    "redis_bytes_per_key": Target("bytes of a key", 200, at_most=True),
    "latency_p99_ratio": Target("slowest calls", 1.3, at_most=True),
}
REACHED = {key: target.bound for key, target in TARGETS.items()} | {f"{key}.rounds": 5 for key in TARGETS}


@pytest.fixture(autouse=True)
def own_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets of the project change, and have known limits, which do not matter here."""
    monkeypatch.setattr("benchmarks.guard.TARGETS", TARGETS)


def found_of(key: str, now: dict[str, float], before: dict[str, float]) -> Finding:
    [found] = [finding for finding in findings({**REACHED, **now}, {**REACHED, **before}) if finding.key == key]
    return found


def wrong_with(key: str, now: dict[str, float], before: dict[str, float]) -> str:
    return found_of(key, now, before).wrong


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

    assert fallen == "is worse than the committed figure"


def test_figures_of_another_kind_of_machine_are_not_compared() -> None:
    now, before = {**REACHED, "single_fresh_c64": 3.1}, {**REACHED, "single_fresh_c64": 5.0}

    [found] = [
        finding
        for finding in findings({**now, "machine.cpu": "abacus"}, {**before, "machine.cpu": "slide rule"})
        if finding.key == "single_fresh_c64"
    ]

    assert (found.wrong, found.before) == ("", None)


def test_a_figure_with_a_known_limit_is_held_against_the_committed_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = Target("a call", 1.0, limit="the network")
    monkeypatch.setattr("benchmarks.guard.TARGETS", {"single_fresh_c1": limited})

    assert wrong_with("single_fresh_c1", {"single_fresh_c1": 0.5}, {"single_fresh_c1": 0.5}) == ""
    assert wrong_with("single_fresh_c1", {"single_fresh_c1": 0.3}, {"single_fresh_c1": 0.5}) != ""


@pytest.mark.parametrize(("now", "said"), [(0.9, "ok"), (0.86, "within 10% of its target")])
def test_a_figure_that_misses_its_target_by_less_than_the_margin_says_so(now: float, said: str) -> None:
    assert str(found_of("single_fresh_c1", {"single_fresh_c1": now}, {})).endswith(f"  {said}")


def test_a_figure_that_misses_its_target_with_a_known_limit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.guard.TARGETS", {"single_fresh_c1": Target("a call", 1.0, limit="the network")})

    found = found_of("single_fresh_c1", {"single_fresh_c1": 0.5}, {"single_fresh_c1": 0.5})

    assert str(found).endswith("  misses its target for a known reason")


def test_a_figure_of_too_few_rounds_fails() -> None:
    assert wrong_with("growth_2m", {"growth_2m.rounds": 4}, {}) == "has 4 rounds, fewer than 5"


def test_a_figure_of_records_needs_no_rounds() -> None:
    now = {key: value for key, value in REACHED.items() if key != "redis_bytes_per_key.rounds"}

    assert [finding.wrong for finding in findings(now | {"redis_bytes_per_key.records": 1_000}, {})] == [""] * len(
        TARGETS
    )


@pytest.mark.parametrize("tool", [guard, tables])
def test_who_asks_for_help_gets_nothing_else(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["it", "--help"])
    monkeypatch.delattr(tool, "LATEST")

    with pytest.raises(SystemExit, match="0"):
        tool.main()
    assert capsys.readouterr().out.startswith(f"usage: python -m {tool.__name__}")


def test_no_rounds_are_refused() -> None:
    assert at_least_one("1") == 1
    with pytest.raises(ArgumentTypeError):
        at_least_one("0")


def test_a_figure_that_needs_something_optional_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.guard.TARGETS", {"fast": Target("a call", 1.0, needs="make speedups")})

    [found] = findings({}, {"fast": 1.0, "fast.rounds": 5})

    assert found.wrong == ""
    assert str(found).endswith("  not measured: needs `make speedups`")


def test_a_figure_that_is_missing_fails() -> None:
    now = {key: value for key, value in REACHED.items() if key != "growth_2m"}

    assert [finding.wrong for finding in findings(now, {}) if finding.wrong] == ["not measured"]
