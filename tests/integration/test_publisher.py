"""Guarantees of the publisher on real Kafka."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator

import pytest

from integr8s_idem import EventPublisher
from integr8s_idem.errors import EventTooLargeError, PublishError
from integr8s_idem.operations.dead_letter_reader import open_dead_letter_reader
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.kafka.broker import Kafka
from tests.support.workers import OrderPlaced, kafka_settings, open_shop

pytestmark = pytest.mark.kafka


@pytest.mark.parametrize("number", range(5))
async def test_events_of_one_aggregate_that_are_published_together_keep_their_order(
    kafka: Kafka, topic_prefix: str, redis_url: str, number: int
) -> None:
    """Also while the publisher still connects and later events catch up; a race, so repeated several times."""
    events = [OrderPlaced(order_id=f"{key}{n}", aggregate_id=key) for n, key in itertools.product(range(10), "abcdef")]
    async with open_shop(kafka, topic_prefix, redis_url, partitions=2) as shop:
        await shop.publisher.publish(*events)
        messages = await shop.messages(shop.topic, len(events))

    sent = [json.loads(message.value)["order_id"] for message in messages]

    for key in "abcdef":
        assert [name for name in sent if name[0] == key] == [f"{key}{n}" for n in range(10)]


async def test_messages_keep_their_order_if_others_are_too_large(kafka: Kafka, topic_prefix: str) -> None:
    """Message 3 is too large for its topic, message 7 for the client."""
    publisher = EventPublisher(kafka_settings(kafka, topic_prefix, max_event_bytes=100_000))
    topic = f"{topic_prefix}orders"
    await kafka.create_topics({topic: 2}, {"max.message.bytes": "20000"})
    bodies = [str(number).encode() for number in range(300)]
    bodies[3], bodies[7] = b"3" * 30_000, b"7" * 200_000

    outcomes = await publisher.send_all([(topic, f"key-{n % 3}".encode(), body, []) for n, body in enumerate(bodies)])
    await publisher.close()

    assert {n: type(outcome) for n, outcome in enumerate(outcomes) if outcome} == dict.fromkeys(
        (3, 7), EventTooLargeError
    )
    messages = [message async for message in messages_in(kafka, topic_prefix, topic)]
    for key in range(3):
        arrived = [int(value or b"") for each_key, value in messages if each_key == f"key-{key}".encode()]
        assert list(dict.fromkeys(arrived)) == [n for n in range(key, 300, 3) if n not in (3, 7)]


async def test_other_messages_in_the_batch_of_a_too_large_one_arrive(kafka: Kafka, topic_prefix: str) -> None:
    publisher, topic = EventPublisher(kafka_settings(kafka, topic_prefix)), f"{topic_prefix}orders"
    await kafka.create_topics({topic: 1}, {"max.message.bytes": "5000"})
    bodies = [b"1", b"2", b"x" * 8_000, b"3"]

    outcomes = await publisher.send_all([(topic, b"k", body, []) for body in bodies])
    await publisher.close()

    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), EventTooLargeError, type(None)]
    assert [value async for _, value in messages_in(kafka, topic_prefix, topic)] == [b"1", b"2", b"3"]


async def test_a_message_refused_by_the_client_does_not_duplicate_the_others(kafka: Kafka, topic_prefix: str) -> None:
    publisher = EventPublisher(kafka_settings(kafka, topic_prefix, max_event_bytes=2_000))
    topic = f"{topic_prefix}orders"
    await kafka.create_topics({topic: 1})

    outcomes = await publisher.send_all([(topic, b"k", body, []) for body in (b"1", b"x" * 8_000, b"2")])
    await publisher.close()

    assert [type(outcome) for outcome in outcomes] == [type(None), EventTooLargeError, type(None)]
    assert [value async for _, value in messages_in(kafka, topic_prefix, topic)] == [b"1", b"2"]


async def test_a_failing_topic_is_not_tried_again_and_other_topics_get_their_messages(
    kafka: Kafka, topic_prefix: str
) -> None:
    settings = kafka_settings(kafka, topic_prefix, request_timeout_seconds=2)
    publisher, good = EventPublisher(settings), f"{topic_prefix}good"
    bad = f"{topic_prefix}no topic at all"
    await kafka.create_topics({good: 1})

    outcomes = await publisher.send_all(
        [(topic, b"k", str(n).encode(), []) for n, topic in enumerate([good, bad, good, bad, good])]
    )
    await publisher.close()

    assert [type(outcome) for outcome in outcomes] == [type(None), PublishError] * 2 + [type(None)]
    assert outcomes[1] is outcomes[3]
    assert [value async for _, value in messages_in(kafka, topic_prefix, good)] == [b"0", b"2", b"4"]


async def messages_in(kafka: Kafka, prefix: str, topic: str) -> AsyncIterator[tuple[bytes | None, bytes | None]]:
    """Yield keys and values of all messages in `topic`."""
    async with open_dead_letter_reader(kafka_settings(kafka, prefix)) as reader:
        partitions = [Partition(topic, number) for number in (await reader.partitions())[topic]]
        async for page in reader.pages(await reader.offset_ranges(partitions)):
            for dead_letter in page.dead_letters:
                yield dead_letter.record.key, dead_letter.record.value
