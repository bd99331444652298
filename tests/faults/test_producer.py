"""A producer that the broker refuses, on a real Kafka."""

from __future__ import annotations

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
            numbers[partition] += 100  # as if batches in between had been lost

        with pytest.raises(PublishError, match="OutOfOrder"):
            await shop.publisher.publish(second)
        await shop.publisher.publish(second, third)

        assert shop.publisher._producer is not refused
        assert [message.offset for message in await shop.messages(shop.topic, 3)] == [0, 1, 2]
