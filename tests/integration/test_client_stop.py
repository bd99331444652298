"""A client of aiokafka whose `stop` fails neither remains connected nor continues to work."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from integr8s_idem.worker.client_options import connection_options
from integr8s_idem.worker.client_stop import bounded_stop, connections
from integr8s_idem.worker.consumer import make_consumer
from tests.support.conditions import eventually
from tests.support.kafka.broker import Kafka, KafkaBroker
from tests.support.workers import kafka_settings

pytestmark = pytest.mark.kafka


async def joined(kafka: Kafka, topic_prefix: str) -> Any:
    """Return a consumer that has joined its group."""
    topic = f"{topic_prefix}orders"
    await kafka.create_topics({topic: 1})
    consumer: Any = make_consumer(kafka_settings(kafka, topic_prefix), f"{topic_prefix}group")
    consumer.subscribe([topic])
    await consumer.start()
    await eventually(lambda: consumer.assignment())
    return consumer


async def stopped(client: Any, error: type[Exception], seconds: float) -> None:
    """Stop a client whose `stop` fails, and check that its connections are closed."""
    opened = list(connections(client))
    assert any(connection.connected() for connection in opened)
    with pytest.raises(error):
        await bounded_stop(client, seconds)
    assert not any(connection.connected() for connection in (*opened, *connections(client)))


def no_other_task() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_consumer_whose_fetching_task_has_died_is_disconnected(kafka: Kafka, topic_prefix: str) -> None:
    consumer = await joined(kafka, topic_prefix)

    async def die(*_: object) -> None:
        raise KeyError("a connection that was closed meanwhile")  # as aiokafka's after a timeout

    consumer._fetcher._proc_fetch_request = die
    await eventually(lambda: consumer._fetcher._fetch_task.done())

    await stopped(consumer, KafkaError, seconds=10)
    await eventually(no_other_task)


async def test_a_consumer_that_cannot_leave_its_group_sends_no_more_heartbeats(
    own_kafka: KafkaBroker, topic_prefix: str
) -> None:
    consumer = await joined(own_kafka, topic_prefix)

    os.kill(own_kafka.pid, signal.SIGSTOP)
    try:
        await stopped(consumer, TimeoutError, seconds=0.5)
        await eventually(no_other_task)
    finally:
        os.kill(own_kafka.pid, signal.SIGCONT)


async def test_a_producer_that_cannot_send_its_messages_is_disconnected(
    own_kafka: KafkaBroker, topic_prefix: str
) -> None:
    await own_kafka.create_topics({f"{topic_prefix}orders": 1})
    producer: Any = AIOKafkaProducer(**connection_options(kafka_settings(own_kafka, topic_prefix)))
    await producer.start()

    await producer.send_and_wait(f"{topic_prefix}orders", b"1")
    os.kill(own_kafka.pid, signal.SIGSTOP)
    try:
        await producer.send(f"{topic_prefix}orders", b"2")
        await stopped(producer, TimeoutError, seconds=0.5)
    finally:
        os.kill(own_kafka.pid, signal.SIGCONT)
