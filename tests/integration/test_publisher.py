"""What a publisher promises, on a real Kafka."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.support.kafka.broker import Kafka
from tests.support.workers import OrderPlaced, open_shop

pytestmark = pytest.mark.kafka


@pytest.mark.parametrize("number", range(5))
async def test_events_of_one_aggregate_that_are_published_together_keep_their_order(
    kafka: Kafka, topic_prefix: str, redis_url: str, number: int
) -> None:
    """Even by a publisher that has to connect first, while those behind catch up: then and again, so several times."""
    events = [OrderPlaced(order_id=f"{key}{n}", aggregate_id=key) for n, key in itertools.product(range(10), "abcdef")]
    async with open_shop(kafka, topic_prefix, redis_url, partitions=2) as shop:
        await shop.publisher.publish(*events)
        messages = await shop.messages(shop.topic, len(events))

    sent = [json.loads(message.value)["order_id"] for message in messages]

    for key in "abcdef":
        assert [name for name in sent if name[0] == key] == [f"{key}{n}" for n in range(10)]
