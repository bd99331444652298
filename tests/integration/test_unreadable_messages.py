"""A message that the Kafka client cannot read pauses its partition until the group is moved past it."""

from __future__ import annotations

import logging
import struct
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.record.util import calc_crc32c

from integr8s_idem.events import encode_event
from tests.integration.test_worker_redelivery import charging
from tests.support.conditions import eventually
from tests.support.kafka import Kafka
from tests.support.workers import OrderPlaced, Shop, WorkerInTest, open_shop

pytestmark = pytest.mark.kafka

NAME, NOT_UTF8 = b"bad name", b"bad n\xffm\xfe"


@pytest.fixture
async def shop(kafka: Kafka, topic_prefix: str, redis_url: str) -> AsyncIterator[Shop]:
    async with open_shop(kafka, topic_prefix, redis_url, partitions=2) as shop:
        yield shop


async def send_batch(shop: Shop, *names: str, unreadable: Sequence[str] = ()) -> None:
    """Send orders to the first partition in one batch; those in `unreadable` get a header name that is not UTF-8."""
    producer: Any = AIOKafkaProducer(bootstrap_servers=shop.kafka.bootstrap)
    async with producer:
        batch = producer.create_batch()
        for name in names:
            headers = [(NAME.decode(), b"")] if name in unreadable else []
            body = encode_event(OrderPlaced(order_id=name))
            batch.append(timestamp=None, key=None, value=body, headers=headers)
        encoded = bytearray(batch._build()).replace(NAME, NOT_UTF8)
        encoded[17:21] = struct.pack(">I", calc_crc32c(encoded[21:]))
        batch._buffer = encoded
        await (await producer.send_batch(batch, shop.topic, partition=0))


async def move_group(shop: Shop, offset: int) -> None:
    """Move a group without members, like `kafka-consumer-groups.sh --reset-offsets --to-offset`."""
    at = TopicPartition(shop.topic, 0)
    consumer: Any = AIOKafkaConsumer(
        bootstrap_servers=shop.kafka.bootstrap,
        group_id=shop.settings.topic_prefix + shop.group,
        enable_auto_commit=False,
    )
    async with consumer:
        consumer.assign([at])
        await consumer.commit({at: offset})


async def until_damaged(worker: WorkerInTest) -> None:
    held = worker.worker._partitions.assignments
    await eventually(lambda: any(assignment.damaged for assignment in held.values()), state=worker.worker.report)


async def test_a_header_name_that_is_not_utf8_pauses_its_partition_until_the_group_is_moved_past_its_batch(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    await send_batch(shop, "before", "first", "bad", "after", unreadable=["bad"])
    await send_batch(shop, "next")
    caplog.set_level(logging.ERROR)

    # Everything before the message is handled, and its offset is logged.
    worker = await shop.worker(charging(shop))
    await until_damaged(worker)
    await eventually(lambda: len(shop.charged) == 2, state=worker.worker.report)
    assert f"{shop.topic}[0] cannot be read from offset 2 on" in caplog.text
    # Other partitions are still handled.
    await shop.deliver(OrderPlaced(order_id="elsewhere"), partition=1)
    await eventually(lambda: "elsewhere" in shop.charged)
    await worker.stop()
    assert await shop.committed() == 2

    # The client decodes a batch from its beginning: the next offset of the same batch is not enough.
    await move_group(shop, 3)
    worker = await shop.worker(charging(shop))
    await until_damaged(worker)
    await worker.stop()
    assert f"{shop.topic}[0] cannot be read from offset 3 on" in caplog.text

    await move_group(shop, 4)
    worker = await shop.worker(charging(shop))
    await worker.idle(settled=1)
    assert shop.charged == ["before", "first", "elsewhere", "next"]
    assert await shop.committed() == 5


async def test_batches_before_an_unreadable_message_are_handled(shop: Shop) -> None:
    for number in range(50):
        await send_batch(shop, str(number))
    await send_batch(shop, "bad", unreadable=["bad"])

    worker = await shop.worker(charging(shop))
    await until_damaged(worker)
    await eventually(lambda: len(shop.charged) == 50, state=worker.worker.report)
    await worker.stop()

    assert shop.charged == [str(number) for number in range(50)]
    assert await shop.committed() == 50
