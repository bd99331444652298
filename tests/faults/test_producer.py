"""Producers that a real Kafka broker rejects."""

from __future__ import annotations

import json

import pytest

from integr8s_idem.errors import PublishError
from tests.support.kafka.broker import Kafka
from tests.support.workers import open_shop, orders

pytestmark = pytest.mark.kafka


@pytest.mark.scenario(74)
async def test_a_producer_out_of_order_is_replaced_and_its_event_can_be_published_again(
    kafka: Kafka, topic_prefix: str, redis_url: str
) -> None:
    first, second, third = orders(3)
    async with open_shop(kafka, topic_prefix, redis_url) as shop:
        await shop.publisher.publish(first)
        refused = shop.publisher._producer
        assert refused is not None
        numbers = refused._txn_manager._sequence_numbers
        for partition in list(numbers):
            numbers[partition] += 100  # as if the batches in between had been lost

        with pytest.raises(PublishError, match="OutOfOrder"):
            await shop.publisher.publish(second)
        await shop.publisher.publish(second, third)

        assert shop.publisher._producer is not refused
        assert [message.offset for message in await shop.messages(shop.topic, 3)] == [0, 1, 2]


@pytest.mark.scenario(74)
async def test_a_fenced_producer_is_replaced_and_its_event_can_be_published_again(
    kafka: Kafka, topic_prefix: str, redis_url: str
) -> None:
    first, second, third = orders(3)
    async with open_shop(kafka, topic_prefix, redis_url) as shop:
        await shop.publisher.publish(first)
        fenced = shop.publisher._producer
        assert fenced is not None
        known = fenced._txn_manager
        original = known._pid_and_epoch
        known._pid_and_epoch = original._replace(epoch=original.epoch + 1)  # publish as its successor ...
        known._sequence_numbers.clear()
        await shop.publisher.publish(second)
        known._pid_and_epoch = original  # ... and as the fenced producer

        with pytest.raises(PublishError, match=r"Fenced|ProducerEpoch"):
            await shop.publisher.publish(third)
        await shop.publisher.publish(third)

        assert shop.publisher._producer is not fenced
        messages = await shop.messages(shop.topic, 3)
        assert [json.loads(message.value)["order_id"] for message in messages] == ["0", "1", "2"]
