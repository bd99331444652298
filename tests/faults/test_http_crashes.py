"""FastAPI applications that kill themselves at named points, on a real Redis or SQL store, behind clients that retry.

Uvicorn serves them at a port of the loopback.  All share their servers and their time: they mostly wait for leases.
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

SIDE_BY_SIDE: Final = 8

ROWS: Final = {
    # Where it dies: the attempts whose row is there in the end.
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

OF_EVERY_SHAPE: Final = (COMMIT[0], COMMIT[-1], COMPLETE[0], COMPLETE[-1], *RESPONSE[:2])
WHOLE: Final = frozenset({next(iter(SHAPES)), TRANSACTIONAL})
"""Shapes that die at every point."""


@dataclass(frozen=True)
class Outcome:
    """What came of all that ran."""

    lone: Mapping[tuple[str, CrashPoint], list[int] | BaseException]
    """By shape and point: the attempts whose row is there."""
    trials: Figures | BaseException


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return asyncio.run(all_at_once())


async def all_at_once() -> Outcome:
    slots = asyncio.Semaphore(SIDE_BY_SIDE)
    deaths = [(shape, point) for shape in SHAPES for point in (ORDERED_POINTS if shape in WHOLE else OF_EVERY_SHAPE)]
    async with open_servers() as servers, ForkServer(MODULE) as fork_server:

        async def lone(shape: str, point: CrashPoint) -> list[int]:
            async with slots:
                return await crash_once(servers, fork_server, shape, point)

        trials = asyncio.create_task(points.run_on(servers, fork_server, range(points.CAMPAIGN.in_test)))
        told = await asyncio.gather(*(lone(*death) for death in deaths), return_exceptions=True)
        (figures,) = await asyncio.gather(trials, return_exceptions=True)
    return Outcome(dict(zip(deaths, told, strict=True)), figures)


def rows_of(outcome: Outcome, shape: str) -> dict[CrashPoint, list[int]]:
    """By point, once all are known to be good."""
    rows = {}
    for (of, point), told in outcome.lone.items():
        if isinstance(told, BaseException):
            raise told
        if of == shape:
            rows[point] = told
    return rows


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != TRANSACTIONAL])
@pytest.mark.scenario(119)
def test_requests_to_a_crashed_server_are_answered_and_repeat_only_rows_committed_before_their_record(
    outcome: Outcome, shape: str
) -> None:
    told = rows_of(outcome, shape)

    assert {point: told[point] for point in ROWS if point in told} == {
        point: rows for point, rows in ROWS.items() if point in told
    }
    assert len(told) == len(ORDERED_POINTS if shape in WHOLE else OF_EVERY_SHAPE)


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
