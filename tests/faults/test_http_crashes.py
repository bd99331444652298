"""FastAPI applications that kill themselves at named points, on a real Redis or SQL store, with clients that retry.

Uvicorn serves them on a loopback port.  The trials share their servers and run concurrently, since they mostly wait for
leases to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pytest

from integr8s_idem.testing.crash_points import CrashPoint
from tests.campaigns.figures import Figures
from tests.crashes import serving_points as points
from tests.crashes.forks import ForkServer
from tests.crashes.serving import SHAPES, TRANSACTIONAL
from tests.crashes.serving_points import MODULE, ORDERED_POINTS, RESPONSE, crash_once, open_servers
from tests.crashes.subscribing_points import COMMIT, COMPLETE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONCURRENT_TRIALS: Final = 8

ROWS: Final = {
    # Crash point: the attempts that wrote a row.
    CrashPoint.BEFORE_RESERVE: [1],
    CrashPoint.BEFORE_HANDLER: [2],
    CrashPoint.IN_HANDLER_AFTER_EFFECT: [2],
    CrashPoint.BEFORE_TRANSACTION_COMMIT: [2],
    CrashPoint.AFTER_TRANSACTION_COMMIT: [1, 2],
    CrashPoint.BEFORE_COMPLETE: [1, 2],
    CrashPoint.AFTER_COMPLETE: [1],
    CrashPoint.BEFORE_RESPONSE: [1],
    CrashPoint.IN_RESPONSE: [1],
    CrashPoint.AFTER_RESPONSE: [1],
}

SAMPLED_POINTS: Final = (COMMIT[0], COMMIT[-1], COMPLETE[0], COMPLETE[-1], *RESPONSE[:2])
FULLY_COVERED: Final = frozenset({next(iter(SHAPES)), TRANSACTIONAL})
"""Shapes that are crashed at every point; the others only at `SAMPLED_POINTS`."""


@dataclass(frozen=True)
class Outcome:
    """Results of all trials."""

    single_crashes: Mapping[tuple[str, CrashPoint], list[int] | BaseException]
    """The attempts that wrote a row, by shape and point."""
    trials: Figures | BaseException


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return asyncio.run(run_all())


async def run_all() -> Outcome:
    slots = asyncio.Semaphore(CONCURRENT_TRIALS)
    crashes = [
        (shape, point) for shape in SHAPES for point in (ORDERED_POINTS if shape in FULLY_COVERED else SAMPLED_POINTS)
    ]
    async with open_servers() as servers, ForkServer(MODULE) as fork_server:

        async def crash(shape: str, point: CrashPoint) -> list[int]:
            async with slots:
                return await crash_once(servers, fork_server, shape, point)

        trials = asyncio.create_task(points.run_on(servers, fork_server, range(points.CAMPAIGN.in_test)))
        attempts = await asyncio.gather(*(crash(*case) for case in crashes), return_exceptions=True)
        (figures,) = await asyncio.gather(trials, return_exceptions=True)
    return Outcome(dict(zip(crashes, attempts, strict=True)), figures)


def rows_of(outcome: Outcome, shape: str) -> dict[CrashPoint, list[int]]:
    """Return the attempts that wrote a row, by point; raises the error of any failed trial."""
    rows = {}
    for (crashed, point), attempts in outcome.single_crashes.items():
        if isinstance(attempts, BaseException):
            raise attempts
        if crashed == shape:
            rows[point] = attempts
    return rows


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != TRANSACTIONAL])
@pytest.mark.scenario(119)
def test_requests_to_a_crashed_server_are_answered_and_repeat_only_rows_committed_before_their_record(
    outcome: Outcome, shape: str
) -> None:
    found = rows_of(outcome, shape)

    assert {point: found[point] for point in ROWS if point in found} == {
        point: rows for point, rows in ROWS.items() if point in found
    }
    assert len(found) == len(ORDERED_POINTS if shape in FULLY_COVERED else SAMPLED_POINTS)


@pytest.mark.scenario(120)
def test_a_request_with_a_transactional_outcome_runs_once_wherever_the_server_crashes(outcome: Outcome) -> None:
    assert rows_of(outcome, TRANSACTIONAL) == {point: [1] for point in ORDERED_POINTS}


@pytest.mark.scenario(119, 120)
def test_servers_that_crash_repeatedly_under_load_lose_no_request(outcome: Outcome) -> None:
    figures = outcome.trials
    if isinstance(figures, BaseException):
        raise figures

    assert figures["kills"] >= points.CAMPAIGN.shown_in_test
    assert figures["lost"] == figures[f"repeats:{TRANSACTIONAL}"] == 0
    assert figures["answers"] == 2 * figures["events"] > 0
