"""The Kafka broker for tests: it starts, keeps its data after a kill, and reports missing tools."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from tests.support.kafka import Kafka, KafkaBroker, ToolsMissingError, broker
from tests.support.kafka.fixtures import skip_or_fail


async def publish(kafka: Kafka, topic: str, value: bytes) -> None:
    producer: Any = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap, acks="all", enable_idempotence=True)
    async with producer:
        await producer.send_and_wait(topic, value)


async def first_value(kafka: Kafka, topic: str, group: str) -> bytes:
    consumer: Any = AIOKafkaConsumer(
        topic, bootstrap_servers=kafka.bootstrap, group_id=group, auto_offset_reset="earliest"
    )
    async with consumer, asyncio.timeout(30):
        record = await consumer.getone()
    value: bytes = record.value
    return value


@pytest.mark.kafka
async def test_an_event_is_read_from_a_topic_with_the_requested_partitions(kafka: Kafka, topic_prefix: str) -> None:
    topic = f"{topic_prefix}orders"
    await kafka.create_topics({topic: 3})

    await publish(kafka, topic, b"1")

    assert await first_value(kafka, topic, topic_prefix) == b"1"
    consumer: Any = AIOKafkaConsumer(topic, bootstrap_servers=kafka.bootstrap)
    async with consumer:
        assert consumer.assignment() == {TopicPartition(topic, number) for number in range(3)}


@pytest.mark.kafka
def test_a_killed_and_a_restarted_broker_keep_their_events(own_kafka: KafkaBroker) -> None:
    asyncio.run(publish(own_kafka, "orders", b"1"))
    pid, address = own_kafka.pid, own_kafka.bootstrap

    own_kafka.kill()
    assert not psutil.pid_exists(pid)
    own_kafka.start()
    own_kafka.restart()

    assert own_kafka.bootstrap == address
    assert asyncio.run(first_value(own_kafka, "orders", "g")) == b"1"


def test_missing_jars_are_reported_with_the_command_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(broker, "JARS", tmp_path)

    with pytest.raises(ToolsMissingError, match="make kafka"):
        broker.find_jars()


def test_missing_java_is_reported_with_the_version_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    with pytest.raises(ToolsMissingError, match="Java 17 or newer"):
        broker.find_java()


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_missing_tools_skip_a_test_but_fail_it_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)

    with pytest.raises(outcome, match="what to do"):
        skip_or_fail("what to do")
