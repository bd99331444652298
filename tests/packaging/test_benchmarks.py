"""The pages say what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from benchmarks import transactions
from benchmarks.__main__ import previous_results
from benchmarks.cost_tables import STAGES as TOLD_STAGES
from benchmarks.costs import STAGES
from benchmarks.deployments import known_costs, predicted_rate
from benchmarks.flames import flame_graph
from benchmarks.machine import machine
from benchmarks.profiled import GRAPH, stacks
from benchmarks.questions import KEYS
from benchmarks.rounds import Comparison, Options
from benchmarks.servers import KINDS
from benchmarks.tables import LATEST, PAGES, RESULTS, all_tables, filled, latest_tables, missed
from benchmarks.targets import GUARANTEES, RATIOS, TARGETS, Target
from tests.packaging.repository import ROOT, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_tables_are_those_of_the_results(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == filled(page.read_text(encoding="utf-8"), all_tables())


def test_every_kind_of_store_was_measured() -> None:
    told = json.loads(RESULTS.read_text(encoding="utf-8"))

    assert {name.partition(".")[0] for name in told} - {"machine", "version"} == set(KINDS)


def test_every_target_and_every_ratio_has_a_question() -> None:
    assert sorted(KEYS) == sorted([*TARGETS, *RATIOS])


@pytest.mark.parametrize("key", TARGETS)
def test_every_figure_is_the_median_of_five_rounds_or_more(key: str) -> None:
    told = json.loads(LATEST.read_text(encoding="utf-8"))

    assert told[f"{key}.min"] <= told[key] <= told[f"{key}.max"]
    assert told.get(f"{key}.rounds", told.get(f"{key}.records")) >= 5


def test_of_every_figure_that_is_missed_it_is_told_what_the_limit_is() -> None:
    told = json.loads(LATEST.read_text(encoding="utf-8"))

    assert [key for key in missed(told) if not TARGETS[key].limit] == []


def test_limits_stand_below_the_figures_that_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.loads(LATEST.read_text(encoding="utf-8")) | {"growth_2m": 0.5, "sql_inbox": 0.9}
    limited = {key: Target("it", TARGETS[key].bound, limit=f"why {key}") for key in ("growth_2m", "sql_inbox")}
    monkeypatch.setattr("benchmarks.tables.TARGETS", limited)

    assert latest_tables(told)["figures"].endswith("|\n\n- `growth_2m`: why growth_2m")


def test_each_question_tells_its_server_and_when_it_was_asked() -> None:
    told = {
        "kafka.server": "Apache Kafka 4.1.0",
        "kafka.rounds": 7,
        "kafka.turn_seconds": 1.0,
        "kafka.measured_at": "now",
    }

    assert "| `kafka.py` | Apache Kafka 4.1.0 | 7 | 1.0 | now |" in latest_tables(machine() | told)["figures-servers"]


def test_numbers_of_another_machine_are_not_added_to(tmp_path: Path) -> None:
    file = tmp_path / "latest.json"
    file.write_text(json.dumps({"machine.cpu": "another", "growth_2m": 1.0}), encoding="utf-8")

    with pytest.raises(SystemExit, match=r"machine\.cpu 'another', here 'this'"):
        previous_results(file, {"machine.cpu": "this"})
    assert previous_results(file, {"machine.cpu": "another"})["growth_2m"] == 1.0


def test_without_costs_nothing_is_foretold_and_it_is_told_what_to_run() -> None:
    with pytest.raises(SystemExit, match="--only costs --json FILE"):
        known_costs({"cost.whole_us": 1.0})


def test_what_each_contestant_promises_stands_beside_its_numbers() -> None:
    told = json.loads(LATEST.read_text(encoding="utf-8"))

    assert {name.split(".")[2] for name in told if name.startswith("contest.")} <= set(GUARANTEES)


def test_of_whoever_writes_a_transaction_it_is_told_what_he_promises() -> None:
    assert transactions.contestants(*[Mock()] * 4).keys() <= GUARANTEES.keys()


def test_nobody_takes_part_of_whom_is_not_told_what_he_promises() -> None:
    with pytest.raises(ValueError, match="GUARANTEES has no entry for somebody"):
        Comparison("here", {"somebody": AsyncMock()}, {})


class Placing:
    """Answers the second order of a name with `second`."""

    def __init__(self, second: object) -> None:
        self.order = AsyncMock(side_effect=[None, second])


@pytest.mark.parametrize("second", [transactions.RECEIPT, transactions.RefusedError("known")])
async def test_who_answers_as_before_or_refuses_blocks_what_comes_twice(second: object) -> None:
    await transactions.check_duplicate_is_blocked(Placing(second), "order")


@pytest.mark.parametrize("second", [None, AssertionError("a row of this name is there")])
async def test_who_does_neither_does_not_block_it(second: object) -> None:
    with pytest.raises(AssertionError):
        await transactions.check_duplicate_is_blocked(Placing(second), "order")


def test_with_one_figure_only_who_makes_it_takes_part_and_with_a_question_everybody() -> None:
    everybody = dict.fromkeys(transactions.contestants(*[Mock()] * 4), AsyncMock())
    comparison = Comparison("inbox", everybody, transactions.FIGURES)

    one, whole = (
        Options(only=frozenset({name})).for_benchmark("transactions") for name in ("sql_inbox", "transactions")
    )

    assert comparison.chosen(one)[0].keys() == {"guarded_core", "bare"}
    assert comparison.chosen(whole) == (everybody, transactions.FIGURES)


def test_every_stage_is_told_and_stands_in_the_results_by_five_rounds_or_more() -> None:
    told = json.loads(LATEST.read_text(encoding="utf-8"))

    assert tuple(TOLD_STAGES) == STAGES
    assert all(told[f"cost.{name}_us.rounds"] >= 5 for name in (*STAGES, "sum", "whole", "residue"))


def test_two_workers_are_foretold_twice_the_rate_of_one_until_something_is_full() -> None:
    costs = {"cost.whole_us": 100.0, "cost.redis_us": 20.0, "cost.broker_us": 5.0}

    assert predicted_rate(costs, 1, 8) == 10_000
    assert predicted_rate(costs, 2, 8) == 20_000
    assert predicted_rate(costs, 8, 16) == 50_000  # Redis has one processor
    assert predicted_rate(costs, 2, 2) == 16_000  # all share two


def test_the_flame_graph_is_small_and_tells_nothing_of_the_machine_it_was_made_on() -> None:
    drawn = GRAPH.read_text(encoding="utf-8")

    assert len(drawn) < 500_000
    assert "Crew" in drawn
    assert "(/" not in drawn
    assert str(ROOT) not in drawn
    assert "site-packages" not in drawn


def test_frames_are_named_by_what_one_would_import_and_imports_are_left_out() -> None:
    looked = "<module> (/x/lib/python3.11/site-packages/uvloop/__init__.py:5);"
    raw = "\n".join(
        [
            f"{looked}poll (/x/lib/python3.11/site-packages/aiokafka/consumer.py:7) 3",
            f"{looked}poll ({ROOT}/integr8s_idem/worker/poller.py:1) 2",
            f"{looked}poll (aiokafka/consumer.py:9) 1",
            "_find_and_load (<frozen importlib._bootstrap>:1) 9",
        ]
    )

    assert stacks(raw) == {("poll (aiokafka/consumer.py)",): 4, ("poll (integr8s_idem/worker/poller.py)",): 2}


def test_a_flame_is_as_wide_as_its_share_and_names_its_function() -> None:
    drawn = flame_graph("A & B", stacks("outer (a.py:1);inner (b.py:2) 3\nouter (a.py:1) 1"))

    assert "A &amp; B" in drawn
    assert "<title>outer (a.py) 100.0%</title>" in drawn
    assert "<title>inner (b.py) 75.0%</title>" in drawn
