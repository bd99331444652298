"""A worker compares its settings with those of its topics at start: on a real Kafka, and on silent brokers."""

from __future__ import annotations

import asyncio
import logging
import socket
import time

import pytest

from integr8s_idem.config import KafkaSettings, MemoryStoreSettings, Settings, TelemetrySettings
from integr8s_idem.diagnostics import Code, Severity
from integr8s_idem.doctor.broker_checks import check_brokers
from integr8s_idem.embedded import EmbeddedKafka, embedded
from integr8s_idem.errors import SettingsError
from integr8s_idem.runtime import ServiceGroup
from integr8s_idem.worker.broker_facts import BrokerMetadataError, read_facts
from integr8s_idem.worker.retention import Reading
from integr8s_idem.worker.retention_check import check_retention
from tests.support.conditions import eventually
from tests.support.kafka import Kafka
from tests.support.shop import platform

AWAY = "127.0.0.1:1"


async def topics_that_outlive(kafka: Kafka, prefix: str) -> Reading:
    """A topic and its dead letters that are kept for longer than the default ttl."""
    name = f"{prefix}order_placed"
    await kafka.create_topics({name: 1, f"{name}.dlq": 1}, {"retention.ms": "7200000"})
    return Reading((name,), 3600)


def settings_of(kafka: Kafka, prefix: str, check: str) -> Settings:
    return Settings.model_validate(
        {
            "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": prefix, "retention_check": check},
            "store": MemoryStoreSettings(kind="memory"),
            "telemetry": TelemetrySettings(metrics_enabled=False),
            "services": {"billing": {"group_id": f"{prefix}billing"}},
        }
    )


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("integr8s_idem")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def outliving(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in warnings_of(caplog) if "it keeps events for 2 hours" in line]


async def test_a_broker_tells_what_its_topics_are_set_to(kafka: Kafka, topic_prefix: str) -> None:
    name = f"{topic_prefix}orders"
    await kafka.create_topics({name: 1}, {"cleanup.policy": "compact,delete", "max.message.bytes": "2000"})

    facts = await read_facts(KafkaSettings(bootstrap_servers=kafka.bootstrap), [name, f"{name}.dlq"])

    topic = facts.topics[name]
    assert (topic.retention_seconds, topic.max_message_bytes) == (7 * 86_400, 2000)
    assert topic.compacts
    assert topic.deletes
    assert facts.missing == {f"{name}.dlq"}
    assert (facts.creates_topics, facts.session_bounds) == (True, (1.0, 1800.0))


@pytest.mark.scenario(98)
async def test_one_line_warns_of_each_finding(
    kafka: Kafka, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    reading = await topics_that_outlive(kafka, topic_prefix)

    await check_retention("billing", KafkaSettings(bootstrap_servers=kafka.bootstrap), reading)

    (line,) = warnings_of(caplog)
    assert line.startswith(f"billing: topic {reading.topics[0]}: it keeps events for 2 hours (retention.ms = 7200000)")


@pytest.mark.scenario(98)
async def test_a_service_may_refuse_to_start(kafka: Kafka, topic_prefix: str) -> None:
    reading = await topics_that_outlive(kafka, topic_prefix)
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap, retention_check="refuse")

    with pytest.raises(SettingsError) as caught:
        await check_retention("billing", settings, reading)

    told = " ".join(str(caught.value).split())
    assert 'service billing does not start (kafka.retention_check = "refuse")' in told
    assert "set idempotency.default_ttl_seconds above 7200, or retention.ms of the topic below 3600000" in told


async def test_off_asks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    await check_retention("billing", KafkaSettings(bootstrap_servers=AWAY, retention_check="off"), Reading(("a",), 1))

    assert warnings_of(caplog) == []


async def test_brokers_that_are_away_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    settings = KafkaSettings(bootstrap_servers=AWAY, retention_check="refuse")

    await check_retention("billing", settings, Reading(("a",), 1))

    (line,) = warnings_of(caplog)
    assert "cannot compare the settings of its topics with the ttl and limits: no answer from 127.0.0.1:1" in line


async def test_brokers_that_accept_and_say_nothing_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    # A connection to it stands, and nobody ever reads from it.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        settings = KafkaSettings(bootstrap_servers=address, request_timeout_seconds=0.3)
        start = time.monotonic()
        await check_retention("billing", settings, Reading(("a",), 1))

    assert time.monotonic() - start < 10
    assert "cannot compare the settings of its topics" in warnings_of(caplog)[0]


async def test_brokers_that_know_no_such_question_stop_nothing() -> None:
    async with embedded() as servers:
        kafka = KafkaSettings(bootstrap_servers=servers.settings()["kafka"]["bootstrap_servers"])

        with pytest.raises(BrokerMetadataError, match="do not support DescribeConfigs"):
            await read_facts(kafka, ["orders"])


async def test_brokers_without_metadata_support_are_not_reported_as_unavailable() -> None:
    async with EmbeddedKafka() as kafka:
        settings = Settings(kafka=KafkaSettings(bootstrap_servers=kafka.bootstrap_servers))
        report = await check_brokers(settings, [Reading(("orders",), 1)])

    (only,) = report.findings
    assert (only.code, only.severity) == (Code.BROKER_UNSEEN, Severity.WARNING)
    assert not report.checked


async def test_a_group_that_refuses_ends_with_status_1(
    kafka: Kafka, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    await topics_that_outlive(kafka, topic_prefix)

    status = await ServiceGroup(platform.choose(), settings_of(kafka, topic_prefix, "refuse")).run()

    assert status == 1
    (line,) = [line for line in warnings_of(caplog) if "failed" in line]
    assert "it keeps events for 2 hours" in " ".join(line.split())


@pytest.mark.parametrize("check", ["warn", "off"])
async def test_a_group_that_warns_works_on(
    kafka: Kafka, topic_prefix: str, check: str, caplog: pytest.LogCaptureFixture
) -> None:
    await topics_that_outlive(kafka, topic_prefix)
    group = ServiceGroup(platform.choose(), settings_of(kafka, topic_prefix, check))
    running = asyncio.get_running_loop().create_task(group.run())

    await eventually(lambda: group.reports()[0].state == "running")
    if check == "warn":
        await eventually(lambda: outliving(caplog))
    group.stop()

    assert await running == 0
    assert len(outliving(caplog)) == (check == "warn")
