"""Members come and go while events flow."""

from __future__ import annotations

import asyncio

import pytest

from tests.kafka_faults import servers
from tests.kafka_faults.rebalances import CAMPAIGN
from tests.kafka_faults.tools import need_kafka
from tests.kafka_faults.workload import BY_KEY, KEYS, open_workload
from tests.support.conditions import eventually

pytestmark = pytest.mark.kafka


@pytest.fixture(autouse=True)
def _kafka_is_there() -> None:
    need_kafka()


@pytest.mark.scenario(62, 63)
def test_members_that_join_and_leave_every_two_seconds_cost_no_event_and_no_order() -> None:
    figures = CAMPAIGN.run(0, CAMPAIGN.in_test)

    assert figures["rebalances"] == CAMPAIGN.in_test
    assert (figures["lost"], figures["fenced_repeats"]) == (0, 0)
    assert figures["events"] > 2 * CAMPAIGN.in_test


@pytest.mark.scenario(65)
async def test_a_full_worker_rests_on_after_a_rebalance_that_cleared_its_pauses() -> None:
    narrow = BY_KEY.model_copy(update={"max_in_flight": KEYS, "drain_timeout_seconds": 0.1})
    async with open_workload(servers.kafka(), partitions=2) as workload:
        workload.service, workload.handler_seconds = narrow, 3.0
        first = await workload.join()
        await eventually(lambda: first.worker.health().ready)
        for _ in range(4):
            await workload.publish_round()
        await eventually(lambda: first.worker.report().in_flight >= KEYS)

        second = await workload.join()
        most = 0
        while second.worker.report().partitions == 0 or most == 0:
            most = max(most, *(member.worker.report().in_flight for member in workload.members))
            await asyncio.sleep(0.01)
        workload.handler_seconds = 0.01
        await workload.all_settled()

        assert most <= 2 * KEYS  # what was given up still runs, what came anew is bounded
        await workload.judge()
