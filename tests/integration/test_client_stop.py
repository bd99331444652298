"""A consumer of aiokafka whose `stop` fails neither remains connected nor continues to work."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from aiokafka.errors import KafkaError

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


async def stopped(consumer: Any, error: type[Exception], seconds: float) -> None:
    """Stop a consumer whose `stop` fails, and wait until nothing of it is left."""
    opened = list(connections(consumer))
    assert any(connection.connected() for connection in opened)
    with pytest.raises(error):
        await bounded_stop(consumer, seconds)
    assert not any(connection.connected() for connection in (*opened, *connections(consumer)))
    await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_a_consumer_whose_fetching_task_has_died_is_disconnected(kafka: Kafka, topic_prefix: str) -> None:
    consumer = await joined(kafka, topic_prefix)

    async def die(*_: object) -> None:
        raise KeyError("a connection that was closed meanwhile")  # as aiokafka's after a timeout

    consumer._fetcher._proc_fetch_request = die
    await eventually(lambda: consumer._fetcher._fetch_task.done())

    await stopped(consumer, KafkaError, seconds=10)


async def test_a_consumer_that_cannot_leave_its_group_sends_no_more_heartbeats(
    own_kafka: KafkaBroker, topic_prefix: str
) -> None:
    consumer = await joined(own_kafka, topic_prefix)

    os.kill(own_kafka.pid, signal.SIGSTOP)
    try:
        await stopped(consumer, TimeoutError, seconds=0.5)
    finally:
        os.kill(own_kafka.pid, signal.SIGCONT)
