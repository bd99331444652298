"""Workers with records in any store that kill themselves at named points, with handlers in transactions and without.

All of them share their servers and their time: they mostly wait for sessions, leases and claims to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pytest

from integr8s_idem.testing.crash_points import CrashPoint
from tests.campaigns.figures import Figures, ViolationError
from tests.crashes import store_points, transactional, transactional_zombies
from tests.crashes.forks import ForkServer
from tests.crashes.ground import Servers, open_servers
from tests.crashes.points import LIVES, TRANSACTION_POINTS, run_on
from tests.crashes.store_points import StoreTrial
from tests.crashes.transactional import KINDS, POINTS, TransactionalTrial, points_of
from tests.crashes.transactional_zombies import ZombieTrial
from tests.kafka_faults.tools import need_kafka
from tests.support import homes

FOUND = {
    # Each mistake, the point at which one death shows it, and what is said then.
    "completes_outside": (CrashPoint.BEFORE_TRANSACTION_COMMIT, "completions without a row"),
    "sends_outside": (CrashPoint.AFTER_OUTCOME, "events that wait for work that is not done"),
    "forgets_first": (CrashPoint.BEFORE_SEND, "events that neither wait nor were published"),
}

ZOMBIE = "commits_all_the_same"


@dataclass(frozen=True)
class Outcome:
    """What came of all that ran."""

    transactional: Figures | BaseException
    stand_alone: Figures | BaseException
    zombies: Figures | BaseException
    mistakes: Mapping[str, Figures | BaseException]


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    need_kafka(own=True)
    return asyncio.run(all_at_once())


async def all_at_once() -> Outcome:
    kinds = dict.fromkeys((*transactional.KINDS, *store_points.KINDS))
    async with open_servers(kinds=kinds) as servers, ForkServer() as fork_server:
        transactional_trials = run_on(
            servers, fork_server, range(transactional.CAMPAIGN.in_test), TransactionalTrial, 5
        )
        # Numbers of their own: a trial's topics and its folder have its number for a name.
        numbers = range(1000, 1000 + store_points.CAMPAIGN.in_test)
        stand_alone_trials = run_on(servers, fork_server, numbers, StoreTrial, 4)
        stalls = run_on(
            servers, fork_server, range(3000, 3000 + transactional_zombies.CAMPAIGN.in_test), ZombieTrial, 4
        )
        mistaken = [mistaken_trial(servers, fork_server, place, bug).run() for place, bug in enumerate(FOUND)]
        # By READ COMMITTED: stricter levels refuse by themselves what has been overtaken.
        mistaken.append(ZombieTrial(servers, fork_server, 4010, bug=ZOMBIE).run())
        first, second, third, *mistakes = await asyncio.gather(
            transactional_trials, stand_alone_trials, stalls, *mistaken, return_exceptions=True
        )
    return Outcome(first, second, third, dict(zip((*FOUND, ZOMBIE), mistakes, strict=True)))


def mistaken_trial(servers: Servers, fork_server: ForkServer, place: int, bug: str) -> TransactionalTrial:
    point, _ = FOUND[bug]
    # On PostgreSQL: in a file, a second transaction would wait for the handler's, and the handler for that.
    return TransactionalTrial(servers, fork_server, 2000 + place * len(KINDS), points=[point], bug=bug)


def figures_of(told: Figures | BaseException) -> Figures:
    if isinstance(told, BaseException):
        raise told
    return told


def passed_by(figures: Figures, points: Iterable[CrashPoint]) -> list[str]:
    return [point.value for point in points if not figures[f"kills:{point.value}"]]


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.scenario(28)
def test_row_outcome_and_events_exist_together_and_once_when_workers_die_at_any_point(outcome: Outcome) -> None:
    figures = figures_of(outcome.transactional)

    assert passed_by(figures, TRANSACTION_POINTS) == []
    assert figures["kills"] >= transactional.CAMPAIGN.shown_in_test
    assert min(figures["kills:postgresql"], figures["kills:sqlite"]) >= LIVES
    assert figures["completed"] > figures["completed_before_the_end"] > transactional.CAMPAIGN.in_test


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_work_is_done_once_with_any_store_when_workers_die_at_any_point(outcome: Outcome) -> None:
    figures = figures_of(outcome.stand_alone)

    assert figures["kills"] >= store_points.CAMPAIGN.shown_in_test
    assert min(figures[f"kills:{kind}"] for kind in store_points.KINDS) >= LIVES
    assert figures["lost"] == figures["fenced_repeats"] == 0
    assert figures["completed"] > figures["completed_before_the_end"] > 2 * store_points.CAMPAIGN.in_test


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_transaction_of_an_overtaken_zombie_is_rolled_back(outcome: Outcome) -> None:
    figures = figures_of(outcome.zombies)

    assert figures["zombies:postgresql"] == figures["zombies:sqlite"] == len(KINDS)
    assert figures["takeovers"] >= len(KINDS)
    assert figures["done"] == figures["completed"] == transactional_zombies.CAMPAIGN.in_test


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", FOUND)
def test_each_injected_transactional_bug_is_found_by_one_crash(outcome: Outcome, bug: str) -> None:
    _, said = FOUND[bug]

    with pytest.raises(ViolationError, match=said):
        figures_of(outcome.mistakes[bug])


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_zombie_that_commits_anyway_is_found(outcome: Outcome) -> None:
    with pytest.raises(ViolationError, match=r"more than one row"):
        figures_of(outcome.mistakes[ZOMBIE])


def test_26_consecutive_trials_cover_each_point_once_per_kind_of_database() -> None:
    for first in (0, 26, 260):
        row = [(point.value, number % 2) for number in range(first, first + 26) for point in points_of(number)]

        assert sorted(row) == sorted((point.value, kind) for point in POINTS for kind in (0, 1))


def test_five_consecutive_trials_cover_all_transactional_points() -> None:
    for first in (0, 13, 260):
        row = {point for number in range(first, first + 5) for point in points_of(number)}

        assert row > TRANSACTION_POINTS


@pytest.mark.parametrize("kind", homes.KINDS)
def test_a_server_is_available_for_each_kind_of_store(kind: str) -> None:
    if missing := homes.KINDS[kind].missing():
        pytest.skip(missing)

    assert kind == "redis" or kind in store_points.KINDS
