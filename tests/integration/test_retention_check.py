"""A worker compares its settings with those of its topics at start, on real Kafka and on brokers that fail."""

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

UNAVAILABLE = "127.0.0.1:1"


async def topics_with_long_retention(kafka: Kafka, prefix: str) -> Reading:
    """Create a topic and its dead-letter topic with longer retention than the default TTL."""
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
    records = [record for record in caplog.records if record.name.startswith("integr8s_idem")]
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def retention_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in warnings_of(caplog) if "it keeps events for 2 hours" in line]


async def test_topic_settings_are_read_from_the_broker(kafka: Kafka, topic_prefix: str) -> None:
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
async def test_each_finding_is_logged_in_one_line(
    kafka: Kafka, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    reading = await topics_with_long_retention(kafka, topic_prefix)

    await check_retention("billing", KafkaSettings(bootstrap_servers=kafka.bootstrap), reading)

    (line,) = warnings_of(caplog)
    assert line.startswith(f"billing: topic {reading.topics[0]}: it keeps events for 2 hours (retention.ms = 7200000)")


@pytest.mark.scenario(98)
async def test_a_service_can_refuse_to_start(kafka: Kafka, topic_prefix: str) -> None:
    reading = await topics_with_long_retention(kafka, topic_prefix)
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap, retention_check="refuse")

    with pytest.raises(SettingsError) as caught:
        await check_retention("billing", settings, reading)

    message = " ".join(str(caught.value).split())
    assert 'service billing does not start (kafka.retention_check = "refuse")' in message
    assert "set idempotency.default_ttl_seconds above 7200, or retention.ms of the topic below 3600000" in message


async def test_off_disables_the_check(caplog: pytest.LogCaptureFixture) -> None:
    await check_retention(
        "billing", KafkaSettings(bootstrap_servers=UNAVAILABLE, retention_check="off"), Reading(("a",), 1)
    )

    assert warnings_of(caplog) == []


async def test_unavailable_brokers_do_not_prevent_the_start(caplog: pytest.LogCaptureFixture) -> None:
    settings = KafkaSettings(bootstrap_servers=UNAVAILABLE, retention_check="refuse")

    await check_retention("billing", settings, Reading(("a",), 1))

    (line,) = warnings_of(caplog)
    assert "cannot compare the settings of its topics with the ttl and limits: no answer from 127.0.0.1:1" in line


async def test_brokers_that_never_respond_do_not_prevent_the_start(caplog: pytest.LogCaptureFixture) -> None:
    # It accepts connections, but never reads from them.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        settings = KafkaSettings(bootstrap_servers=address, request_timeout_seconds=0.3)
        start = time.monotonic()
        await check_retention("billing", settings, Reading(("a",), 1))

    assert time.monotonic() - start < 10
    assert "cannot compare the settings of its topics" in warnings_of(caplog)[0]


async def test_brokers_without_describe_configs_are_reported() -> None:
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


async def test_a_group_that_refuses_to_start_exits_with_status_1(
    kafka: Kafka, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    await topics_with_long_retention(kafka, topic_prefix)

    status = await ServiceGroup(platform.choose(), settings_of(kafka, topic_prefix, "refuse")).run()

    assert status == 1
    (line,) = [line for line in warnings_of(caplog) if "failed" in line]
    assert "it keeps events for 2 hours" in " ".join(line.split())


@pytest.mark.parametrize("check", ["warn", "off"])
async def test_a_group_that_warns_keeps_running(
    kafka: Kafka, topic_prefix: str, check: str, caplog: pytest.LogCaptureFixture
) -> None:
    await topics_with_long_retention(kafka, topic_prefix)
    group = ServiceGroup(platform.choose(), settings_of(kafka, topic_prefix, check))
    running = asyncio.get_running_loop().create_task(group.run())

    await eventually(lambda: group.reports()[0].state == "running")
    if check == "warn":
        await eventually(lambda: retention_warnings(caplog))
    group.stop()

    assert await running == 0
    assert len(retention_warnings(caplog)) == (check == "warn")
