"""Workers with transactional handlers that kill themselves at every named point, on real databases and a real Kafka."""

from __future__ import annotations

import asyncio

import pytest

from integr8s_idem.testing.crash_points import CrashPoint
from tests.campaigns.figures import ViolationError
from tests.crashes import transactional
from tests.crashes.forks import Nursery
from tests.crashes.ground import Ground, open_ground
from tests.crashes.points import OF_TRANSACTIONS
from tests.crashes.transactional import KINDS, POINTS, TransactionalTrial, points_of
from tests.kafka_faults.tools import need_kafka


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whatever_point_workers_die_at_row_outcome_and_events_are_there_together_and_once() -> None:
    need_kafka(own=True)

    figures = transactional.run(0, transactional.CAMPAIGN.in_test)

    killed = {point.value: figures[f"kills:{point.value}"] for point in OF_TRANSACTIONS}
    assert all(killed.values()), (
        f"points that nobody died at: {[point for point, kills in killed.items() if not kills]}"
    )
    assert figures["kills"] >= transactional.CAMPAIGN.shown_in_test
    assert min(figures["kills:postgresql"], figures["kills:sqlite"]) >= 5
    assert figures["completed"] > figures["completed_before_the_end"] > transactional.CAMPAIGN.in_test


FOUND = {
    "completes_outside": (CrashPoint.BEFORE_TRANSACTION_COMMIT, "completions without a row"),
    "sends_outside": (CrashPoint.AFTER_OUTCOME, "events that wait for work that is not done"),
    "forgets_first": (CrashPoint.BEFORE_SEND, "events that neither wait nor were published"),
}


@pytest.mark.kafka
@pytest.mark.slow
async def test_each_mistake_of_a_transactional_mode_is_found_by_one_death() -> None:
    need_kafka(own=True)

    async with open_ground(kinds=KINDS) as ground, Nursery() as nursery:
        trials = [mistaken(ground, nursery, place, bug) for place, bug in enumerate(FOUND)]
        found = await asyncio.gather(*(trial.run() for trial in trials), return_exceptions=True)

    for (_, said), error in zip(FOUND.values(), found, strict=True):
        assert isinstance(error, ViolationError)
        assert said in str(error)


def mistaken(ground: Ground, nursery: Nursery, place: int, bug: str) -> TransactionalTrial:
    point, _ = FOUND[bug]
    # On PostgreSQL: in a file, a second transaction would wait for the handler's, and the handler for that.
    return TransactionalTrial(ground, nursery, place * len(KINDS), points=[point], bug=bug)


def test_26_trials_in_a_row_have_each_point_once_in_each_kind_of_database() -> None:
    for first in (0, 26, 260):
        row = [(point.value, number % 2) for number in range(first, first + 26) for point in points_of(number)]

        assert sorted(row) == sorted((point.value, kind) for point in POINTS for kind in (0, 1))


def test_five_trials_in_a_row_have_each_point_that_only_transactional_handlers_and_relays_have() -> None:
    for first in (0, 13, 260):
        row = {point for number in range(first, first + 5) for point in points_of(number)}

        assert row > OF_TRANSACTIONS
