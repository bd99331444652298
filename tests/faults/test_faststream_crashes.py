"""FastStream applications that kill themselves at named points, on a real Redis and a real Kafka.

The trials share their servers and run concurrently, since they mostly wait for sessions and leases to end.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import pytest

from integr8s_idem import IdempotencyStatus
from integr8s_idem.testing.crash_points import CrashPoint
from tests.campaigns.figures import Figures
from tests.crashes import subscribing_points as points
from tests.crashes.forks import ForkServer
from tests.crashes.ground import Servers, open_servers
from tests.crashes.jobs import Job
from tests.crashes.judging import log_tail
from tests.crashes.subscribing import SHAPES, Shape
from tests.crashes.subscribing_points import COMMIT, COMPLETE, KINDS, MODULE, POINTS, PUBLISH, Trial, crash_once
from tests.kafka_faults.tools import need_kafka
from tests.support.conditions import eventually

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(400)]

CONCURRENT_TRIALS: Final = 8

ROWS: Final = {
    # Crash point: the attempts that wrote a row.
    CrashPoint.BEFORE_RESERVE: [1],
    CrashPoint.BEFORE_HANDLER: [2],
    CrashPoint.IN_HANDLER_AFTER_EFFECT: [2],
    CrashPoint.BEFORE_TRANSACTION_COMMIT: [2],
    CrashPoint.AFTER_TRANSACTION_COMMIT: [1, 2],
    CrashPoint.BEFORE_PUBLISH: [1, 2],
    CrashPoint.AFTER_PUBLISH: [1, 2],
    CrashPoint.BEFORE_COMPLETE: [1, 2],
    CrashPoint.AFTER_COMPLETE: [1],
    CrashPoint.BEFORE_COMMIT: [1],
    CrashPoint.AFTER_COMMIT: [1],
}

ORDER_DEPENDENT_POINTS: Final = (COMMIT[0], COMMIT[-1], *PUBLISH, COMPLETE[0], COMPLETE[-1])
"""Points whose order depends on the shape, and their neighbors."""


@dataclass(frozen=True)
class Outcome:
    """Results of all trials."""

    single_crashes: Mapping[tuple[str, CrashPoint], list[int] | BaseException]
    """The attempts that wrote a row, by shape and point."""
    trials: Figures | BaseException


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    need_kafka(own=True)
    return asyncio.run(run_all())


async def run_all() -> Outcome:
    slots = asyncio.Semaphore(CONCURRENT_TRIALS)
    plain = next(iter(SHAPES))
    crashes = [(shape, point) for shape in SHAPES for point in (POINTS if shape == plain else ORDER_DEPENDENT_POINTS)]
    async with open_servers(kinds=KINDS) as servers, ForkServer(MODULE) as fork_server:

        async def crash(shape: str, point: CrashPoint) -> list[int]:
            async with slots:
                return (await crash_once(servers, fork_server, shape, point))[0]

        trials = asyncio.create_task(points.run_on(servers, fork_server, range(points.CAMPAIGN.in_test)))
        attempts = await asyncio.gather(*(crash(*case) for case in crashes), return_exceptions=True)
        (figures,) = await asyncio.gather(trials, return_exceptions=True)
    return Outcome(dict(zip(crashes, attempts, strict=True)), figures)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.scenario(117)
def test_a_crashed_subscriber_loses_nothing_and_repeats_only_rows_committed_before_their_record(
    outcome: Outcome, shape: str
) -> None:
    found = {point: rows for (crashed, point), rows in outcome.single_crashes.items() if crashed == shape}

    for rows in found.values():
        if isinstance(rows, BaseException):
            raise rows
    if not SHAPES[shape].handler_publishes:
        assert {point: found[point] for point in ROWS if point in found} == {
            point: rows for point, rows in ROWS.items() if point in found
        }
    assert len(found) == len(POINTS if SHAPES[shape] == Shape() else ORDER_DEPENDENT_POINTS)


@pytest.mark.scenario(117)
def test_subscribers_that_crash_repeatedly_under_load_lose_nothing(outcome: Outcome) -> None:
    figures = outcome.trials
    if isinstance(figures, BaseException):
        raise figures

    assert figures["kills"] >= points.CAMPAIGN.shown_in_test
    assert figures["lost"] == 0
    assert figures["completed"] == figures["events"] > 0


@pytest.mark.scenario(118)
async def test_a_message_is_not_acknowledged_and_not_run_again_while_the_broker_rejects_its_response() -> None:
    need_kafka(own=True)
    async with open_servers(kinds=("sqlite",)) as servers, ForkServer(MODULE) as fork_server:
        trial = Trial(
            servers, fork_server, "outage", "scope_commits", "sqlite", partitions=1, request_timeout=1.0, max_attempts=1
        )
        await _outage(servers, fork_server, trial)


async def _outage(servers: Servers, fork_server: ForkServer, trial: Trial) -> None:
    async with trial.resources() as topics:
        await topics.publish([Job(work="one")])
        stalls = replace(trial.order, point=CrashPoint.BEFORE_PUBLISH.value, stalls=True, lease=60.0)
        worker = await fork_server.start(stalls)
        await eventually((trial.folder / "stalled").exists)
        servers.broker.kill()
        worker.send_signal(signal.SIGCONT)
        await eventually(lambda: "failed, retrying" in log_tail(trial.folder))

        (record,) = [record async for record in servers.store.scan("outage:")]
        assert record.status is IdempotencyStatus.PROCESSING
        assert record.attempt == 1

        servers.broker.start()
        assert await trial.run_until_settled(topics, worker) == 0
        assert await trial.verdict(topics) == {"one": [1]}
