"""Rebalances under load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

import pytest

from tests.kafka_faults import servers
from tests.kafka_faults.rebalances import CAMPAIGN
from tests.kafka_faults.tools import need_kafka
from tests.kafka_faults.workload import BY_KEY, KEYS, open_workload
from tests.support.conditions import eventually
from tests.support.workers import WorkerInTest

pytestmark = pytest.mark.kafka

MOST_IN_FLIGHT: Final = KEYS + 2
"""Of one member: a poll that is interrupted by a rebalance may still return one message."""


@pytest.fixture(autouse=True)
def _require_kafka() -> None:
    need_kafka()


@pytest.mark.scenario(62, 63)
def test_members_that_join_and_leave_every_two_seconds_lose_no_event_and_keep_the_order() -> None:
    figures = CAMPAIGN.run(0, CAMPAIGN.in_test)

    assert figures["rebalances"] == CAMPAIGN.in_test
    assert (figures["lost"], figures["fenced_repeats"]) == (0, 0)
    assert figures["events"] > 2 * CAMPAIGN.in_test


@pytest.mark.scenario(65)
async def test_a_full_worker_stays_paused_after_a_rebalance() -> None:
    async with open_workload(servers.kafka(), partitions=2) as workload:
        workload.service = BY_KEY.model_copy(update={"max_in_flight": KEYS, "drain_timeout_seconds": 0.1})
        first = await workload.join()
        await eventually(lambda: first.worker.health().ready)
        for _ in range(2):  # the second time, after the assignments have been resumed
            workload.may_end.clear()
            for _ in range(8):
                await workload.publish_round()
            await wait_until_paused([first])
            second = await workload.join()
            await eventually(lambda member=second: member.worker.report().partitions == 1)  # type: ignore[misc]
            await wait_until_paused([first, second])

            assert max(member.worker.report().in_flight for member in workload.members) <= MOST_IN_FLIGHT
            workload.may_end.set()
            await workload.all_settled()
            await workload.leave(second)
            await eventually(lambda: first.worker.report().partitions == 2)
        await workload.judge()


async def wait_until_paused(members: Sequence[WorkerInTest]) -> None:
    """Wait until the client of each member has had all of its partitions paused for several consecutive polls."""
    paused_since = time.monotonic()
    give_up_at = paused_since + 60
    while time.monotonic() < paused_since + 0.7:
        assert time.monotonic() < give_up_at, [
            (member.worker.report(), client_of(member).paused()) for member in members
        ]
        if not all(client_of(member).paused() >= client_of(member).assignment() != set() for member in members):
            paused_since = time.monotonic()
        await asyncio.sleep(0.02)


def client_of(member: WorkerInTest) -> Any:
    assert member.worker._poller is not None
    return member.worker._poller.consumer
