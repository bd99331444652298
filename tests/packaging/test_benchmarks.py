"""The pages show the results of the benchmarks."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any, Final
from unittest.mock import AsyncMock, Mock

import pytest

from benchmarks import transactions
from benchmarks.__main__ import known_key, previous_results
from benchmarks.cost_tables import STAGES as LISTED_STAGES
from benchmarks.costs import STAGES
from benchmarks.deployments import known_costs, predicted_rate
from benchmarks.flames import flame_graph
from benchmarks.guard import _problem
from benchmarks.limits import FORBIDDEN, LIMITS
from benchmarks.machine import machine
from benchmarks.profiled import GRAPH, stacks
from benchmarks.questions import KEYS
from benchmarks.rounds import Comparison, Options
from benchmarks.servers import KINDS
from benchmarks.tables import LATEST, PAGES, RESULTS, all_tables, filled, latest_tables, missed
from benchmarks.targets import GUARANTEES, RATIOS, TARGETS, Target
from tests.packaging.repository import ROOT, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_tables_of_a_page_match_the_results(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == filled(page.read_text(encoding="utf-8"), all_tables())


def test_every_kind_of_store_was_measured() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))

    assert {name.partition(".")[0] for name in results} - {"machine", "version"} == set(KINDS)


OTHER_MACHINE: Final[dict[str, Any]] = machine() | {
    "machine.cpu": "abacus",
    "kafka.server": "Kafka 3",
    "transactions.server": "PostgreSQL 9",
    "kafka.measured_at": "2026-01-03T10:00+00:00",
    "batches.measured_at": "2026-01-02T10:00+00:00",
    "batches.commit": "12345678",
    "growth_2m": 1.23,
}


def test_every_target_and_ratio_has_a_benchmark() -> None:
    assert sorted(KEYS) == sorted([*TARGETS, *RATIOS])


@pytest.mark.parametrize("key", [key for key, target in TARGETS.items() if not target.needs])
def test_every_figure_is_the_median_of_five_rounds_or_more(key: str) -> None:
    results = json.loads(LATEST.read_text(encoding="utf-8"))

    assert results[f"{key}.min"] <= results[key] <= results[f"{key}.max"]
    assert results.get(f"{key}.rounds", results.get(f"{key}.records")) >= 5


def test_every_missed_target_states_its_limit() -> None:
    results = json.loads(LATEST.read_text(encoding="utf-8"))

    assert [key for key in missed(results) if not TARGETS[key].limit] == []


@pytest.mark.parametrize(
    ("value", "limit", "mark"), [(0.9, "why", ""), (0.85, "why", " ≈"), (0.5, "why", " †"), (0.5, "", " ✗")]
)
def test_a_missed_target_is_marked_and_its_reason_is_listed(
    monkeypatch: pytest.MonkeyPatch, value: float, limit: str, mark: str
) -> None:
    results = json.loads(LATEST.read_text(encoding="utf-8")) | {"growth_2m": value}
    monkeypatch.setattr("benchmarks.tables.TARGETS", {"growth_2m": Target("it", 0.9, limit=limit)})

    figures = latest_tables(results, results)["figures"]

    row = next(line for line in figures.splitlines() if "`growth_2m`" in line)
    assert row.startswith("| `growth_2m` | it | ≥ 0.9 |")
    assert f"){mark} |" in row
    reasons = "Missed targets, and why:\n\n- `growth_2m`, ≥ 0.9: why"
    assert figures.endswith(reasons) == (value < 0.9 and bool(limit))


def test_a_dropped_target_is_not_marked_and_its_limit_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    results = json.loads(LATEST.read_text(encoding="utf-8")) | {"growth_2m": 0.5}
    monkeypatch.setattr("benchmarks.tables.TARGETS", {"growth_2m": Target("it", 0.9, forbidden="physics")})

    figures = latest_tables(results, results)["figures"]

    row = next(line for line in figures.splitlines() if "`growth_2m`" in line)
    assert row.startswith("| `growth_2m` | it | dropped | **0.50** (")
    assert not set(row) & set("≈†✗")
    assert figures.endswith("Targets that a measured limit forbids:\n\n- `growth_2m`, was 0.9: physics")


@pytest.mark.parametrize(("now", "problem"), [(0.5, ""), (0.3, "is worse than the committed figure")])
def test_the_guard_compares_a_figure_without_a_target_with_the_last_commit(now: float, problem: str) -> None:
    target = Target("it", 0.9, forbidden="physics")

    assert _problem(target, now, 0.5, 7) == problem


def test_each_reason_belongs_to_a_target() -> None:
    assert FORBIDDEN.keys() | LIMITS.keys() <= TARGETS.keys()
    assert FORBIDDEN.keys() & LIMITS.keys() == set()


def test_each_benchmark_reports_its_server_and_time() -> None:
    results = {
        "kafka.server": "Apache Kafka 4.1.0",
        "kafka.rounds": 7,
        "kafka.turn_seconds": 1.0,
        "kafka.measured_at": "now",
        "kafka.commit": "12345678+",
    }

    servers = latest_tables(machine() | results, OTHER_MACHINE)["figures-servers"]

    assert "| `kafka.py` | Apache Kafka 4.1.0 | 7 | 1.0 | now | 12345678+ |" in servers


def test_figures_are_listed_with_those_of_another_machine_and_its_servers() -> None:
    results = json.loads(LATEST.read_text(encoding="utf-8"))

    found = latest_tables(results, OTHER_MACHINE)

    assert ") | 1.23 |" in next(line for line in found["figures"].splitlines() if line.startswith("| `growth_2m` |"))
    assert "(abacus)" in found["other-machine"]
    assert found["other-machine"].endswith("Kafka 3; PostgreSQL 9. Measured from 2026-01-02 on, at commit 12345678.")


def test_results_of_another_machine_are_not_extended(tmp_path: Path) -> None:
    file = tmp_path / "latest.json"
    file.write_text(json.dumps({"machine.cpu": "another", "growth_2m": 1.0}), encoding="utf-8")

    with pytest.raises(SystemExit, match=r"machine\.cpu 'another', here 'this'"):
        previous_results(file, {"machine.cpu": "this"})
    assert previous_results(file, {"machine.cpu": "another"})["growth_2m"] == 1.0


@pytest.mark.parametrize(
    ("argument", "advice"), [("kafka_nop", "did you mean kafka_noop"), ("x", "see --help")], ids=["similar", "unknown"]
)
def test_an_unknown_figure_on_the_command_line_is_refused_in_one_short_line(argument: str, advice: str) -> None:
    with pytest.raises(ArgumentTypeError, match=advice) as refused:
        known_key(argument)

    assert len(str(refused.value)) < 200
    assert known_key("kafka_noop") == "kafka_noop"


def test_a_prediction_without_costs_names_the_command_that_measures_them() -> None:
    with pytest.raises(SystemExit, match="--only costs --json FILE"):
        known_costs({"cost.whole_us": 1.0})


def test_every_measured_contestant_has_a_documented_guarantee() -> None:
    results = json.loads(LATEST.read_text(encoding="utf-8"))

    assert {name.split(".")[2] for name in results if name.startswith("contest.")} <= set(GUARANTEES)


def test_every_transaction_contestant_has_a_documented_guarantee() -> None:
    assert transactions.contestants(*[Mock()] * 4).keys() <= GUARANTEES.keys()


def test_a_contestant_without_a_documented_guarantee_is_rejected() -> None:
    with pytest.raises(ValueError, match="GUARANTEES has no entry for somebody"):
        Comparison("here", {"somebody": AsyncMock()}, {})


class OrderService:
    """Returns or raises `second` for the second order."""

    def __init__(self, second: object) -> None:
        self.order = AsyncMock(side_effect=[None, second])


@pytest.mark.parametrize("second", [transactions.RECEIPT, transactions.RefusedError("known")])
async def test_the_same_answer_or_a_refusal_counts_as_a_blocked_duplicate(second: object) -> None:
    await transactions.check_duplicate_is_blocked(OrderService(second), "order")


@pytest.mark.parametrize("second", [None, AssertionError("a row with this name exists")])
async def test_another_answer_or_error_does_not_count_as_a_blocked_duplicate(second: object) -> None:
    with pytest.raises(AssertionError):
        await transactions.check_duplicate_is_blocked(OrderService(second), "order")


def test_one_figure_selects_its_contestants_and_a_benchmark_selects_all() -> None:
    contestants = dict.fromkeys(transactions.contestants(*[Mock()] * 4), AsyncMock())
    comparison = Comparison("inbox", contestants, transactions.FIGURES)

    figure, benchmark = (
        Options(only=frozenset({name})).for_benchmark("transactions") for name in ("sql_inbox", "transactions")
    )

    assert comparison.chosen(figure)[0].keys() == {"guarded_core", "bare"}
    assert comparison.chosen(benchmark) == (contestants, transactions.FIGURES)


def test_every_stage_is_listed_and_was_measured_in_five_rounds_or_more() -> None:
    results = json.loads(LATEST.read_text(encoding="utf-8"))

    assert tuple(LISTED_STAGES) == STAGES
    assert all(results[f"cost.{name}_us.rounds"] >= 5 for name in (*STAGES, "sum", "whole", "residue"))


def test_the_predicted_rate_doubles_with_two_workers_until_a_resource_is_saturated() -> None:
    costs = {"cost.whole_us": 100.0, "cost.redis_us": 20.0, "cost.broker_us": 5.0}

    assert predicted_rate(costs, 1, 8) == 10_000
    assert predicted_rate(costs, 2, 8) == 20_000
    assert predicted_rate(costs, 8, 16) == 50_000  # Redis uses one processor
    assert predicted_rate(costs, 2, 2) == 16_000  # workers and servers share two processors


def test_the_flame_graph_is_small_and_does_not_contain_paths_of_the_machine() -> None:
    drawn = GRAPH.read_text(encoding="utf-8")

    assert len(drawn) < 500_000
    assert "Pipeline" in drawn
    assert "(/" not in drawn
    assert str(ROOT) not in drawn
    assert "site-packages" not in drawn


def test_frames_are_named_by_importable_paths_and_imports_are_omitted() -> None:
    importing = "<module> (/x/lib/python3.11/site-packages/uvloop/__init__.py:5);"
    raw = "\n".join(
        [
            f"{importing}poll (/x/lib/python3.11/site-packages/aiokafka/consumer.py:7) 3",
            f"{importing}poll ({ROOT}/integr8s_idem/worker/poller.py:1) 2",
            f"{importing}poll (aiokafka/consumer.py:9) 1",
            "_find_and_load (<frozen importlib._bootstrap>:1) 9",
        ]
    )

    assert stacks(raw) == {("poll (aiokafka/consumer.py)",): 4, ("poll (integr8s_idem/worker/poller.py)",): 2}


def test_a_frame_shows_its_function_and_share() -> None:
    drawn = flame_graph("A & B", stacks("outer (a.py:1);inner (b.py:2) 3\nouter (a.py:1) 1"))

    assert "A &amp; B" in drawn
    assert "<title>outer (a.py) 100.0%</title>" in drawn
    assert "<title>inner (b.py) 75.0%</title>" in drawn
