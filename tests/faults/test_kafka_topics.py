"""Topics that lose their messages, are made anew, grow, and hold what is no event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from aiokafka.errors import NoOffsetForPartitionError, OffsetOutOfRangeError

from tests.kafka_faults import servers
from tests.kafka_faults.tools import need_kafka
from tests.kafka_faults.workload import KEYS, Workload, open_workload
from tests.support.conditions import eventually

pytestmark = pytest.mark.kafka


@pytest.fixture(autouse=True)
def _kafka_is_there() -> None:
    need_kafka()


@pytest.fixture
async def admin() -> AsyncIterator[Any]:
    need_kafka()
    client: Any = AIOKafkaAdminClient(bootstrap_servers=servers.kafka().bootstrap)
    await client.start()
    yield client
    await client.close()


@pytest.mark.scenario(69)
async def test_a_group_without_offsets_stops_loudly_where_nobody_said_where_to_begin() -> None:
    async with open_workload(servers.kafka(), auto_offset_reset="none") as workload:
        await workload.publish_round()
        member = await workload.join()
        workload.members.remove(member)

        with pytest.raises(NoOffsetForPartitionError):
            await asyncio.wait_for(member.task, 90)

    assert not member.worker.health().live
    assert not workload.effects.done()


@pytest.mark.scenario(69)
@pytest.mark.parametrize("policy", ["none", "earliest"])
async def test_offsets_that_are_gone_are_refused_or_begin_at_the_first_message_by_policy(policy: str) -> None:
    async with open_workload(servers.kafka(), partitions=1, auto_offset_reset=policy) as workload:
        await workload.publish_round()
        await commit(workload, 1_000)
        member = await workload.join()

        if policy == "none":
            workload.members.remove(member)
            with pytest.raises(OffsetOutOfRangeError):
                await asyncio.wait_for(member.task, 90)
            assert not workload.effects.done()
        else:
            await workload.all_settled()


async def commit(workload: Workload, offset: int) -> None:
    """As if the group had been there."""
    client: Any = AIOKafkaConsumer(
        bootstrap_servers=workload.settings.bootstrap_servers, group_id=workload.group, enable_auto_commit=False
    )
    await client.start()
    partition = TopicPartition(workload.topic, 0)
    client.assign([partition])
    await client.commit({partition: offset})
    await client.stop()


@pytest.mark.scenario(70)
@pytest.mark.parametrize("metadata_age", [1, 20], ids=["noticed", "unnoticed"])
async def test_what_comes_in_a_topic_made_anew_is_handled(admin: Any, metadata_age: int) -> None:
    # Should a fetch fail between the two topics, the client sees that there is none, and looks again at that age.
    async with open_workload(servers.kafka(), partitions=1, metadata_max_age_seconds=metadata_age) as workload:
        await workload.join()
        for _ in range(2):
            await workload.publish_round()
        await workload.all_settled()

        await admin.delete_topics([workload.topic])
        await made_anew(workload)
        await workload.publish_round()
        await workload.all_settled()

        assert len(workload.effects.done()) == 3 * KEYS
        assert workload.effects.judge(workload.published)["repeats"] == 0


async def made_anew(workload: Workload) -> None:
    """The topic is deleted a moment after the broker has said so."""
    for _ in range(100):
        try:
            await servers.kafka().create_topics({workload.topic: 1})
            return
        except AssertionError:  # it exists already: the worker has asked for it, or it is still being deleted
            await asyncio.sleep(0.05)


@pytest.mark.scenario(71)
async def test_partitions_that_are_added_are_consumed(admin: Any) -> None:
    async with open_workload(servers.kafka(), partitions=1) as workload:
        member = await workload.join()
        await workload.publish_round()
        await workload.all_settled()

        await admin.create_partitions({workload.topic: NewPartitions(total_count=4)})
        await eventually(lambda: member.worker.report().partitions == 4)
        await workload.publish_round()
        await workload.all_settled()

        await workload.judge()


@pytest.mark.scenario(72)
async def test_a_null_value_is_dead_lettered_and_the_offset_moves_on() -> None:
    async with open_workload(servers.kafka(), partitions=1) as workload:
        member = await workload.join()
        await workload.publisher.send(workload.topic, b"key", None, [])
        await workload.publish_round()
        await workload.all_settled()
        await eventually(lambda: member.tally.dead_letters == 1)
        await eventually(lambda: member.worker.report().lag == 0)

        assert len(workload.effects.done()) == KEYS
