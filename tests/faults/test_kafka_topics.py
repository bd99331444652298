"""Topics that lose messages, are recreated or grow, or contain messages that are not events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.errors import NoOffsetForPartitionError, OffsetOutOfRangeError

from tests.kafka_faults import servers
from tests.kafka_faults.tools import need_kafka
from tests.kafka_faults.workload import KEYS, Workload, open_workload
from tests.support.conditions import eventually

pytestmark = pytest.mark.kafka


@pytest.fixture(autouse=True)
def _require_kafka() -> None:
    need_kafka()


@pytest.fixture
async def admin() -> AsyncIterator[Any]:
    need_kafka()
    client: Any = AIOKafkaAdminClient(bootstrap_servers=servers.kafka().bootstrap)
    await client.start()
    yield client
    await client.close()


@pytest.mark.scenario(69)
async def test_a_group_without_offsets_fails_if_the_reset_policy_is_none() -> None:
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
async def test_the_reset_policy_decides_what_happens_to_offsets_out_of_range(policy: str) -> None:
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
    """Commit an offset in the name of the group."""
    client: Any = AIOKafkaConsumer(
        bootstrap_servers=workload.settings.bootstrap_servers, group_id=workload.group, enable_auto_commit=False
    )
    await client.start()
    partition = TopicPartition(workload.topic, 0)
    client.assign([partition])
    await client.commit({partition: offset})
    await client.stop()


@pytest.mark.scenario(70)
@pytest.mark.parametrize("metadata_age", [1, 20], ids=["detected", "undetected"])
async def test_messages_in_a_recreated_topic_are_handled(admin: Any, metadata_age: int) -> None:
    # If a fetch fails between the two topics, the client sees that the topic is missing, and refreshes at that age.
    async with open_workload(servers.kafka(), partitions=1, metadata_max_age_seconds=metadata_age) as workload:
        await workload.join()
        for _ in range(2):
            await workload.publish_round()
        await workload.all_settled()

        await admin.delete_topics([workload.topic])
        await recreate_topic(workload)
        await workload.publish_round()
        await workload.all_settled()

        assert len(workload.effects.done()) == 3 * KEYS
        assert workload.effects.judge(workload.published)["repeats"] == 0


async def recreate_topic(workload: Workload) -> None:
    """Create the topic again, with retries: the broker deletes it a moment after its response."""
    for _ in range(100):
        try:
            await servers.kafka().create_topics({workload.topic: 1})
            return
        except AssertionError:  # the topic exists: the worker has requested it, or it is still being deleted
            await asyncio.sleep(0.05)


@pytest.mark.scenario(71)
async def test_added_partitions_are_consumed(admin: Any) -> None:
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
@pytest.mark.parametrize("key", [b"key", None])
async def test_a_null_value_is_dead_lettered_and_the_offset_moves_on(key: bytes | None) -> None:
    async with open_workload(servers.kafka(), partitions=1) as workload:
        member = await workload.join()
        await send_null(workload, key)
        await workload.publish_round()
        await workload.all_settled()
        await eventually(lambda: member.tally.dead_letters == 1)
        await eventually(lambda: member.worker.report().lag == 0)

        assert len(workload.effects.done()) == KEYS


async def send_null(workload: Workload, key: bytes | None) -> None:
    """Send a message as a batch: `send` of aiokafka rejects messages without key and value."""
    producer: Any = AIOKafkaProducer(bootstrap_servers=workload.settings.bootstrap_servers)
    await producer.start()
    batch = producer.create_batch()
    batch.append(timestamp=None, key=key, value=None)
    await (await producer.send_batch(batch, workload.topic, partition=0))
    await producer.stop()


@pytest.mark.scenario(73)
async def test_a_partition_waits_for_a_missing_dead_letter_topic_and_others_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    need_kafka(own=True)
    broker = await asyncio.to_thread(servers.own_broker, {"auto.create.topics.enable": "false"})
    try:
        async with open_workload(broker, request_timeout_seconds=2) as workload:
            member = await workload.join()
            await workload.publisher.send(workload.topic, f"{workload.group}-0".encode(), b"no json", [])
            await workload.publish_round()
            await eventually(lambda: len(workload.effects.ended()) == KEYS - 1)
            await eventually(
                lambda: sum("cannot publish to dead-letter topic" in line for line in caplog.messages) >= 2
            )
            committed = await servers.committed(broker.bootstrap, workload.group)
            assert committed.get(TopicPartition(workload.topic, workload.partition_of("0-0")), 0) == 0
            assert "0-0" not in workload.effects.done()

            await broker.create_topics({f"{workload.topic}.dlq": 1})
            await workload.all_settled()
            await eventually(lambda: member.worker.report().lag == 0)

            assert member.tally.dead_letters == 1
            assert sum((await servers.committed(broker.bootstrap, workload.group)).values()) == KEYS + 1
    finally:
        await asyncio.to_thread(broker.kill)


@pytest.mark.scenario(73)
async def test_a_dead_letter_that_is_too_large_drops_value_then_headers_then_key(admin: Any) -> None:
    small: Any = NewTopic
    large, headers = b"x" * 30_000, [("large", b"h" * 30_000)]  # several small messages would share a batch of 16 KiB
    async with open_workload(servers.kafka(), partitions=1) as workload:
        dead = f"{workload.topic}.dlq"
        await admin.create_topics([small(dead, 1, 1, topic_configs={"max.message.bytes": "20000"})])
        await workload.join()
        for key, own in ((b"key", []), (b"key", headers), (large, headers)):
            await workload.publisher.send(workload.topic, key, large, own)
        dead_letters = sorted(
            await read(workload, dead, 3), key=lambda message: dict(message.headers)["idempotency-dlq-offset"]
        )

    dropped = [
        [text for name, text in dead_letter.headers if name.endswith("-dropped")] for dead_letter in dead_letters
    ]
    assert dropped == [[b"value"], [b"value", b"headers"], [b"value", b"headers", b"key"]]
    assert [(dead_letter.key, dead_letter.value) for dead_letter in dead_letters] == [
        (b"key", None),
        (b"key", None),
        (None, b""),
    ]
    assert {dict(dead_letter.headers)["idempotency-dlq-body-bytes"] for dead_letter in dead_letters} == {b"30000"}


@pytest.mark.scenario(73)
async def test_concurrent_small_dead_letters_stay_whole_with_a_small_message_limit(admin: Any) -> None:
    small: Any = NewTopic
    async with open_workload(servers.kafka(), partitions=1) as workload:
        workload.service = workload.service.model_copy(update={"ordering": "none"})
        dead = f"{workload.topic}.dlq"
        await admin.create_topics([small(dead, 1, 1, topic_configs={"max.message.bytes": "2000"})])
        bodies = [b"no json %d" % number for number in range(20)]
        await asyncio.gather(*(workload.publisher.send(workload.topic, b"key", body, []) for body in bodies))
        await workload.join()
        dead_letters = await read(workload, dead, 20)

    assert sorted(dead_letter.value for dead_letter in dead_letters) == sorted(bodies)
    assert [name for dead_letter in dead_letters for name, _ in dead_letter.headers if name.endswith("-dropped")] == []


async def read(workload: Workload, topic: str, count: int) -> list[Any]:
    """Read the first `count` messages of a topic."""
    client: Any = AIOKafkaConsumer(
        topic, bootstrap_servers=workload.settings.bootstrap_servers, auto_offset_reset="earliest"
    )
    await client.start()
    try:
        async with asyncio.timeout(60):
            return [await client.getone() for _ in range(count)]
    finally:
        await client.stop()
