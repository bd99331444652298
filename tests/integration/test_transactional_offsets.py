"""Why offsets are not committed in Kafka transactions: with aiokafka, a member that was replaced is not fenced.

If this fails, the client can fence stale members: reconsider decision 87.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import CommitFailedError

from tests.support.conditions import eventually
from tests.support.kafka.broker import Kafka

pytestmark = pytest.mark.kafka


async def eventually_committed(kafka: Kafka, group: str, at: TopicPartition, offset: int) -> None:
    """Wait until the broker returns `offset`."""
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        async with asyncio.timeout(30):
            while (await admin.list_consumer_group_offsets(group))[at].offset != offset:  # noqa: ASYNC110  # no event
                await asyncio.sleep(0.1)
    finally:
        await admin.close()


async def test_a_transaction_commits_offsets_of_a_partition_that_another_member_has(
    kafka: Kafka, topic_prefix: str
) -> None:
    topic, group = f"{topic_prefix}orders", f"{topic_prefix}billing"
    await kafka.create_topics({topic: 1})
    at = TopicPartition(topic, 0)
    options = {"bootstrap_servers": kafka.bootstrap, "group_id": group, "enable_auto_commit": False}
    stale = AIOKafkaConsumer(topic, session_timeout_ms=6000, heartbeat_interval_ms=500, **options)
    producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=f"{topic_prefix}stale")
    await stale.start()
    await producer.start()
    owner: Any = None
    try:
        assert stale.assignment() == {at}
        # Its membership ends without its knowledge, as after a long pause of the process.
        coordinator: Any = stale._coordinator
        await coordinator._stop_heartbeat_task()
        async with producer.transaction():
            await producer.send_offsets_to_transaction({at: 1}, group)
        owner = AIOKafkaConsumer(topic, session_timeout_ms=6000, heartbeat_interval_ms=500, **options)
        await owner.start()
        await eventually(lambda: owner.assignment() == {at})
        await owner.commit({at: 50})

        with pytest.raises(CommitFailedError):
            await stale.commit({at: 10})
        async with producer.transaction():
            await producer.send_offsets_to_transaction({at: 10}, group)

        # The broker applies the offsets of a transaction some time after it has committed it.
        await eventually_committed(kafka, group, at, 10)
    finally:
        clients: tuple[Any, ...] = (owner, stale, producer)
        for client in clients:
            if client is not None:
                await client.stop()
