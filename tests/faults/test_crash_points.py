"""Workers that kill themselves at every named crash point, on a real Redis and a real Kafka."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import uvloop
from redis.asyncio import Redis

from integr8s_idem import Attempt, IdempotencyManager
from integr8s_idem.engine.leases import RENEW_AFTER, LeaseKeeper
from integr8s_idem.engine.work import Work
from integr8s_idem.keys import Key
from integr8s_idem.records import Reserved
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.crash_points import CrashPlan, CrashPoint
from tests.crashes import points
from tests.crashes.forks import ForkServer
from tests.crashes.ground import open_servers
from tests.crashes.jobs import Kind
from tests.crashes.lone import crash_one_job
from tests.crashes.renewing import manager_of
from tests.kafka_faults.tools import need_kafka
from tests.support.conditions import eventually
from tests.support.effects import Effects


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.scenario(17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27)
def test_work_is_done_once_when_workers_die_at_any_crash_point() -> None:
    need_kafka(own=True)

    figures = points.run(0, points.CAMPAIGN.in_test)

    killed = {point.value: figures[f"kills:{point.value}"] for point in points.POINTS}
    assert all(killed.values()), f"points without a crash: {[point for point, kills in killed.items() if not kills]}"
    assert figures["kills"] >= points.CAMPAIGN.shown_in_test
    assert figures["lost"] == figures["fenced_repeats"] == 0
    assert figures["completed"] > figures["completed_before_the_end"] > 2 * points.CAMPAIGN.in_test


RUNS = {
    # Crash point: the attempts that start, and those whose effect happens.
    CrashPoint.BEFORE_RESERVE: ([1], [1]),
    CrashPoint.AFTER_RESERVE: ([2], [2]),
    CrashPoint.BEFORE_HANDLER: ([2], [2]),
    CrashPoint.IN_HANDLER_BEFORE_EFFECT: ([1, 2], [2]),
    CrashPoint.IN_HANDLER_AFTER_EFFECT: ([1, 2], [1, 2]),
    CrashPoint.BEFORE_COMPLETE: ([1, 2], [1, 2]),
    CrashPoint.AFTER_COMPLETE: ([1], [1]),
    CrashPoint.AFTER_COMMIT: ([1], [1]),
}


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.scenario(17, 19, 20, 21, 23, 24)
async def test_after_a_crash_a_job_runs_again_only_if_it_was_started_but_not_completed() -> None:
    need_kafka(own=True)

    async with open_servers() as servers, ForkServer() as fork_server:
        runs = await asyncio.gather(*(crash_one_job(servers, fork_server, point) for point in RUNS))

    assert dict(zip(RUNS, runs, strict=True)) == RUNS


DISCARDS = {point: RUNS[point] for point in RUNS if point is not CrashPoint.BEFORE_RESERVE}


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.scenario(137)
async def test_after_a_crash_a_job_whose_error_is_discarded_runs_again_only_if_it_was_not_completed() -> None:
    need_kafka(own=True)

    async with open_servers() as servers, ForkServer() as fork_server:
        runs = await asyncio.gather(*(crash_one_job(servers, fork_server, point, "withdrawn") for point in DISCARDS))

    assert dict(zip(DISCARDS, runs, strict=True)) == DISCARDS


RECONCILED = {
    **{point: RUNS[point] for point in RUNS if point is not CrashPoint.BEFORE_RESERVE},
    CrashPoint.IN_HANDLER_AFTER_EFFECT: ([1], [1]),
    CrashPoint.BEFORE_COMPLETE: ([1], [1]),
}
"""As `RUNS`, of a handler with a reconcile function: no crash repeats its effect."""


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.scenario(151)
@pytest.mark.parametrize("kind", ["plain", "talking"])
async def test_after_a_crash_a_job_with_a_reconcile_function_has_one_effect(kind: Kind) -> None:
    need_kafka(own=True)

    async with open_servers() as servers, ForkServer() as fork_server:
        crashes = [crash_one_job(servers, fork_server, point, kind, reconciles=True) for point in RECONCILED]
        runs = await asyncio.gather(*crashes)

    assert dict(zip(RECONCILED, runs, strict=True)) == RECONCILED


RENEWALS = (CrashPoint.BEFORE_RENEW, CrashPoint.IN_RENEW, CrashPoint.AFTER_RENEW)
LEASE = 2.0


@pytest.mark.scenario(25)
async def test_work_is_taken_over_within_a_lease_and_a_second_after_a_crash_during_a_renewal(
    redis_url: str, redis_client: Redis, effects: Effects, tmp_path: Path
) -> None:
    async def taken_over(point: CrashPoint) -> float:
        """Return the seconds between the crash and the start of the next run."""
        arguments = ["-m", "tests.crashes.renewing", redis_url, str(tmp_path), point.value, str(LEASE)]
        holder = await asyncio.create_subprocess_exec(sys.executable, *arguments)
        await eventually(lambda: point.value in {line.work for line in effects.lines()})
        successor = asyncio.create_task(start_of_the_second_attempt(redis_client, point.value))
        assert await holder.wait() == -signal.SIGKILL
        died_at = time.monotonic()
        return await successor - died_at

    seconds = await asyncio.gather(*map(taken_over, RENEWALS))

    assert max(seconds) < LEASE + 1, dict(zip(RENEWALS, seconds, strict=True))
    assert min(seconds) > 0


async def start_of_the_second_attempt(client: Redis, name: str) -> float:
    """Return the time of the monotonic clock at which the second attempt starts."""
    manager = manager_of(client, LEASE, CrashPlan())

    async def charge(attempt: Attempt) -> float:
        assert attempt.number == 2
        return time.monotonic()

    started_at: float = await manager.run_work(
        Work(Key.of(name)), charge, returns=charge, wait_timeout=timedelta(seconds=60)
    )
    await manager.close()
    return started_at


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_lease_can_be_held_while_another_renewal_is_due(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Regression test: uvloop returns no `TimerHandle` for calls that are due within half a millisecond."""

    async def main() -> None:
        manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="billing")
        keeper, now = LeaseKeeper(manager.repository, "billing", _never), asyncio.get_running_loop().time()
        first, second = [await manager.reserve(key) for key in ("one", "two")]
        assert isinstance(first, Reserved)
        assert isinstance(second, Reserved)
        due = now - first.lease.total_seconds() * RENEW_AFTER

        one, other = (Work(manager.space.key(key)) for key in ("one", "two"))
        held = [keeper.hold(first, due, one), keeper.hold(second, due, other)]

        assert len(keeper) == 2

        for lease in held:
            lease.drop()
        assert len(keeper) == 0
        keeper.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def _never(_: Work) -> Reserved | None:
    return None


def test_eleven_consecutive_trials_cover_each_point_once() -> None:
    for first in (0, 11, 4994):
        covered = [point for number in range(first, first + 11) for point in points.points_of(number)]

        assert sorted(point.value for point in covered) == sorted(point.value for point in points.POINTS)
