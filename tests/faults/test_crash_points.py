"""Workers that kill themselves at every named point, on a real Redis and a real Kafka, counted from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from integr8s_idem import IdempotencyManager
from integr8s_idem.leases import RENEW_AFTER, LeaseKeeper
from integr8s_idem.records import Reserved
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.crash_points import CrashPoint
from tests.crashes import points
from tests.kafka_faults.tools import need_kafka


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.scenario(17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27)
def test_whatever_point_workers_die_at_all_work_is_done_once_and_nothing_is_stuck() -> None:
    need_kafka(own=True)

    figures = points.run(0, points.CAMPAIGN.in_test)

    killed = {point.value: figures[f"kills:{point.value}"] for point in CrashPoint}
    assert all(killed.values()), (
        f"points that nobody died at: {[point for point, kills in killed.items() if not kills]}"
    )
    assert figures["kills"] >= points.CAMPAIGN.shown_in_test
    assert figures["lost"] == figures["fenced_repeats"] == 0


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_lease_is_taken_beside_one_that_is_due_now(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Found by trial 41: uvloop gives no `TimerHandle` for what is due within half a millisecond."""

    async def main() -> None:
        manager = IdempotencyManager(repository=MemoryIdempotencyRepository(), scope="billing")
        keeper, now = LeaseKeeper(manager.repository, "billing"), asyncio.get_running_loop().time()
        first, second = [await manager.reserve(key) for key in ("one", "two")]
        assert isinstance(first, Reserved)
        assert isinstance(second, Reserved)
        due = now - first.lease.total_seconds() * RENEW_AFTER

        async with keeper.hold(first, due, _never), keeper.hold(second, due, _never):
            assert len(keeper) == 2

        assert len(keeper) == 0
        keeper.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def _never() -> Reserved | None:
    return None


def test_eleven_trials_in_a_row_have_each_point_once() -> None:
    for first in (0, 11, 4994):
        row = [point for number in range(first, first + 11) for point in points.points_of(number)]

        assert sorted(point.value for point in row) == sorted(point.value for point in CrashPoint)
