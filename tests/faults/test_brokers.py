"""Brokers that die, stall and restart, and a group whose coordinator moves."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kafka_faults.brokers import CAMPAIGN, wait_for_progress
from tests.kafka_faults.tools import need_kafka
from tests.kafka_faults.workload import open_workload
from tests.support.conditions import eventually
from tests.support.kafka.cluster import KafkaCluster

pytestmark = pytest.mark.kafka


@pytest.fixture(autouse=True)
def _require_kafka() -> None:
    need_kafka(own=True)


@pytest.fixture
async def cluster() -> AsyncIterator[KafkaCluster]:
    with tempfile.TemporaryDirectory(prefix="idem-cluster-") as folder:
        cluster = await asyncio.to_thread(KafkaCluster, Path(folder))
        try:
            await asyncio.to_thread(cluster.start)
            yield cluster
        finally:
            await asyncio.to_thread(cluster.kill)


@pytest.mark.scenario(60, 61)
def test_a_broker_crash_or_stall_only_delays_work() -> None:
    figures = CAMPAIGN.run(0, CAMPAIGN.in_test)

    assert figures["restarts"] == CAMPAIGN.in_test
    assert (figures["lost"], figures["fenced_repeats"]) == (0, 0)


@pytest.mark.scenario(60)
async def test_a_group_continues_when_its_coordinator_moves(cluster: KafkaCluster) -> None:
    async with open_workload(cluster) as workload:
        for _ in range(2):
            await workload.join()
        await eventually(lambda: all(member.worker.health().ready for member in workload.members))
        feeding = asyncio.create_task(workload.feed(every=0.2))
        await eventually(lambda: len(workload.effects.ended()) > 10)
        coordinator = await cluster.coordinator_of(workload.group)

        await asyncio.to_thread(cluster.brokers[coordinator].kill)
        await wait_for_progress(workload)
        feeding.cancel()
        await asyncio.wait({feeding})
        await workload.all_settled()

        assert await cluster.coordinator_of(workload.group) != coordinator
        assert (await workload.judge())["fenced_repeats"] == 0
