"""Workers that are killed at the steps of a delayed retry, on a real Kafka and a real Redis."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.campaigns.figures import ViolationError
from tests.crashes import retry_kills
from tests.crashes.forks import ForkServer
from tests.crashes.ground import open_servers
from tests.crashes.retry_kills import KILLS, MODULE, POINTS, ROUND, WAITING, Trial, points_of
from tests.kafka_faults.tools import need_kafka


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.scenario(145, 148)
def test_no_event_is_lost_or_silently_repeated_wherever_a_worker_dies() -> None:
    need_kafka(own=True)

    figures = retry_kills.run(0, retry_kills.CAMPAIGN.in_test)

    assert figures["kills"] >= retry_kills.CAMPAIGN.shown_in_test
    assert figures["lost"] == figures["fenced_repeats"] == 0
    assert figures["onward_copies"] > 0
    assert figures["expired"] > 0


BUGS = {"offset_before_copy": "before_copy", "attempt_of_copy_ignored": WAITING}
"""Injected bugs, each with the step at which its worker is killed."""


@pytest.mark.kafka
@pytest.mark.slow
async def test_the_campaign_finds_bugs_of_delayed_retries() -> None:
    need_kafka(own=True)

    async with open_servers() as servers, ForkServer(MODULE) as fork_server:
        trials = [
            Trial(servers, fork_server, 2 * number, points=[point], bug=bug)
            for number, (bug, point) in enumerate(BUGS.items())
        ]
        lost, silent = await asyncio.gather(*(trial.run() for trial in trials), return_exceptions=True)

    assert isinstance(lost, ViolationError)
    assert re.match(r"lost \['0\.0\.0:|dead letters of .*, expected of \['0\.0\.0:", str(lost)), lost
    assert isinstance(silent, ViolationError)
    assert "runs that could not tell that they were repeats" in str(silent)


def test_consecutive_trials_cover_each_step() -> None:
    for first in (0, ROUND, 100 * ROUND):
        covered = [point for number in range(first, first + ROUND) for point in points_of(number)]

        assert set(covered) == set(POINTS)
        assert len(covered) == ROUND * KILLS
