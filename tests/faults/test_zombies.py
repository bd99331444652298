"""Workers that stall and resume: their late writes are rejected."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.group import LeaveGroupRequest

from integr8s_idem.telemetry import Signal
from tests.kafka_faults import servers, store_zombies
from tests.kafka_faults.application import TaskGiven
from tests.kafka_faults.tools import need_kafka
from tests.kafka_faults.workload import open_workload
from tests.kafka_faults.zombies import CAMPAIGN, LEASE, SESSION, open_pair
from tests.support.conditions import eventually
from tests.support.counting import CountingObserver

pytestmark = pytest.mark.kafka


@pytest.fixture(autouse=True)
def _require_kafka() -> None:
    need_kafka()


@pytest.mark.scenario(33, 35, 36)
def test_writes_of_a_zombie_after_its_lease_are_rejected() -> None:
    figures = CAMPAIGN.run(0, CAMPAIGN.in_test)

    assert figures["zombies"] == CAMPAIGN.in_test
    assert (figures["lost"], figures["fenced_repeats"]) == (0, 0)
    assert figures["refused_by_sink"] >= 1


@pytest.mark.timeout(300)
def test_writes_of_a_zombie_after_its_lease_are_rejected_in_other_stores() -> None:
    figures = store_zombies.CAMPAIGN.run(0, store_zombies.CAMPAIGN.in_test)

    of_each = store_zombies.CAMPAIGN.in_test / len(store_zombies.KINDS)
    assert {figures[f"zombies:{kind}"] for kind in store_zombies.KINDS} == {of_each}
    assert (figures["lost"], figures["fenced_repeats"]) == (0, 0)


@pytest.mark.scenario(34, 37)
async def test_only_a_stall_longer_than_the_lease_causes_a_takeover() -> None:
    async with open_pair() as pair:
        await pair.give(TaskGiven(work="short", before=1.0))
        holder, other = pair.of_process(await pair.until("begin", "short", 1))
        holder.stop_signal()
        await asyncio.sleep(LEASE / 3)
        holder.continue_signal()
        await pair.settled(0)

        blocked = TaskGiven(work="blocked", blocks=LEASE + 2 * SESSION)
        await pair.give(blocked)
        holder, other = pair.of_process(await pair.until("begin", "blocked", 1))
        await pair.until("end", "blocked", 2)
        await pair.until("applied", "blocked", 1)
        await pair.settled(1)

        ends = {(line.work, line.attempt, line.pid) for line in pair.effects.lines() if line.what == "end"}
        assert {(work, attempt) for work, attempt, _ in ends if work == "short"} == {("short", 1)}
        assert ("blocked", 2, other.pid) in ends
        assert await pair.result(blocked) == ("completed", 2, pair.receipt("blocked", 2))
        assert pair.effects.refused() == 1
        assert pair.effects.judge(pair.given)["repeats"] == 1


@pytest.mark.scenario(39, 68)
async def test_an_evicted_member_continues_after_its_commit_is_rejected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    observer = CountingObserver()
    async with open_workload(servers.kafka(), heartbeat_interval_seconds=2) as workload:
        member = await workload.join()
        member.worker.observer = member.worker._offsets._observer = observer
        await eventually(lambda: member.worker.health().ready)
        await workload.publish_round()
        await workload.all_settled()

        # A heartbeat may notice the eviction before the commit does.
        async with asyncio.timeout(60):
            while not observer.counts[Signal.COMMIT_FAILED]:
                await evict(workload.settings.bootstrap_servers, workload.group)
                await workload.publish_round()
                await workload.all_settled()

        assert (await workload.judge())["repeats"] == 0
        assert not member.task.done()
    assert {record.levelname for record in caplog.records if "commit failed" in record.message} == {"WARNING"}


async def evict(bootstrap: str, group: str) -> None:
    """Send a leave request to the coordinator in the name of the group's only member, once it has joined."""
    admin: Any = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        member_id = await only_member(admin, group)
        answer = await admin._send_request(LeaveGroupRequest(group, member_id))
        assert answer.error_code == 0
    finally:
        await admin.close()


async def only_member(admin: Any, group: str) -> str:
    """Wait until the group has a member, which may have to join again, and return its id."""
    while True:
        [description] = await admin.describe_consumer_groups([group])
        [(_, _, _, _, _, members, *_)] = description.groups
        if members:
            [(member_id, *_)] = members
            return str(member_id)
        await asyncio.sleep(0.1)
