"""Workers on any store that kill themselves at named points, with and without transactional handlers.

The trials share their servers and run concurrently, since they mostly wait for sessions, leases and claims to end.
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
from tests.crashes.points import CRASHES, TRANSACTION_POINTS, run_on
from tests.crashes.store_points import StoreTrial
from tests.crashes.transactional import KINDS, POINTS, TransactionalTrial, points_of
from tests.crashes.transactional_zombies import ZombieTrial
from tests.kafka_faults.tools import need_kafka
from tests.support import homes

FOUND = {
    # Bug: the point at which one crash reveals it, and the error.
    "completes_outside": (CrashPoint.BEFORE_TRANSACTION_COMMIT, "completions without a row"),
    "sends_outside": (CrashPoint.AFTER_OUTCOME, "events in the outbox of work that is not done"),
    "forgets_first": (CrashPoint.BEFORE_SEND, "events that are neither in the outbox nor published"),
}

ZOMBIE = "commits_anyway"


@dataclass(frozen=True)
class Outcome:
    """Results of all trials."""

    transactional: Figures | BaseException
    stand_alone: Figures | BaseException
    zombies: Figures | BaseException
    bugs: Mapping[str, Figures | BaseException]


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    need_kafka(own=True)
    return asyncio.run(run_all())


async def run_all() -> Outcome:
    kinds = dict.fromkeys((*transactional.KINDS, *store_points.KINDS))
    async with open_servers(kinds=kinds) as servers, ForkServer() as fork_server:
        transactional_trials = run_on(
            servers, fork_server, range(transactional.CAMPAIGN.in_test), TransactionalTrial, 5
        )
        # The numbers must not overlap: topics and folder of a trial are named after its number.
        numbers = range(1000, 1000 + store_points.CAMPAIGN.in_test)
        stand_alone_trials = run_on(servers, fork_server, numbers, StoreTrial, 4)
        stalls = run_on(
            servers, fork_server, range(3000, 3000 + transactional_zombies.CAMPAIGN.in_test), ZombieTrial, 4
        )
        buggy = [buggy_trial(servers, fork_server, index, bug).run() for index, bug in enumerate(FOUND)]
        # Trial 4010 uses READ COMMITTED: stricter levels reject overtaken transactions themselves.
        buggy.append(ZombieTrial(servers, fork_server, 4010, bug=ZOMBIE).run())
        first, second, third, *bugs = await asyncio.gather(
            transactional_trials, stand_alone_trials, stalls, *buggy, return_exceptions=True
        )
    return Outcome(first, second, third, dict(zip((*FOUND, ZOMBIE), bugs, strict=True)))


def buggy_trial(servers: Servers, fork_server: ForkServer, index: int, bug: str) -> TransactionalTrial:
    point, _ = FOUND[bug]
    # Even numbers use PostgreSQL: with SQLite, a second transaction and the handler's would wait for each other.
    return TransactionalTrial(servers, fork_server, 2000 + index * len(KINDS), points=[point], bug=bug)


def figures_of(result: Figures | BaseException) -> Figures:
    if isinstance(result, BaseException):
        raise result
    return result


def without_kills(figures: Figures, points: Iterable[CrashPoint]) -> list[str]:
    return [point.value for point in points if not figures[f"kills:{point.value}"]]


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.scenario(28)
def test_row_outcome_and_events_exist_together_and_once_when_workers_die_at_any_point(outcome: Outcome) -> None:
    figures = figures_of(outcome.transactional)

    assert without_kills(figures, TRANSACTION_POINTS) == []
    assert figures["kills"] >= transactional.CAMPAIGN.shown_in_test
    assert min(figures["kills:postgresql"], figures["kills:sqlite"]) >= CRASHES
    assert figures["completed"] > figures["completed_before_the_end"] > transactional.CAMPAIGN.in_test


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_work_is_done_once_with_any_store_when_workers_die_at_any_point(outcome: Outcome) -> None:
    figures = figures_of(outcome.stand_alone)

    assert figures["kills"] >= store_points.CAMPAIGN.shown_in_test
    assert min(figures[f"kills:{kind}"] for kind in store_points.KINDS) >= CRASHES
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
    _, message = FOUND[bug]

    with pytest.raises(ViolationError, match=message):
        figures_of(outcome.bugs[bug])


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_zombie_that_commits_anyway_is_found(outcome: Outcome) -> None:
    with pytest.raises(ViolationError, match=r"more than one row"):
        figures_of(outcome.bugs[ZOMBIE])


def test_26_consecutive_trials_cover_each_point_once_per_kind_of_database() -> None:
    for first in (0, 26, 260):
        covered = [(point.value, number % 2) for number in range(first, first + 26) for point in points_of(number)]

        assert sorted(covered) == sorted((point.value, kind) for point in POINTS for kind in (0, 1))


def test_five_consecutive_trials_cover_all_transactional_points() -> None:
    for first in (0, 13, 260):
        covered = {point for number in range(first, first + 5) for point in points_of(number)}

        assert covered > TRANSACTION_POINTS


@pytest.mark.parametrize("kind", homes.KINDS)
def test_a_server_is_available_for_each_kind_of_store(kind: str) -> None:
    if missing := homes.KINDS[kind].missing():
        pytest.skip(missing)

    assert kind == "redis" or kind in store_points.KINDS
