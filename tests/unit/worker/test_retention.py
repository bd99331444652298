"""Comparison of the settings with those of topics, without a broker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem.config import IdempotencyConfig, KafkaSettings
from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.doctor.broker_checks import broker_findings
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.handlers.dispatcher import EventDispatcher, EventRouter, IdempotentEventDispatcher
from integr8s_idem.runtime.service_group import reading_of
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.worker.broker_facts import facts_of, topic_settings
from integr8s_idem.worker.retention import TTL, BrokerFacts, Reading, retention_findings

WEEK = 7 * 86_400
DEFAULTS = {"retention.ms": str(WEEK * 1000), "cleanup.policy": "delete", "max.message.bytes": "1048588"}
KAFKA = KafkaSettings()


def findings(
    topic: dict[str, str] | None = None,
    dead_letters: dict[str, str] | None = None,
    *,
    ttl: float | None = WEEK + 1,
    kafka: KafkaSettings = KAFKA,
) -> list[Finding]:
    """Return findings about `orders` and its dead-letter topic; the arguments override a broker's defaults."""
    facts = BrokerFacts(
        {
            "orders": topic_settings("orders", DEFAULTS | (topic or {})),
            "orders.dlq": topic_settings("orders.dlq", DEFAULTS | (dead_letters or {})),
        }
    )
    return retention_findings(kafka, [Reading(("orders",), ttl)], facts)


def codes(found: list[Finding]) -> list[str]:
    return [finding.code.value for finding in found]


def test_a_ttl_above_the_retention_matches_the_defaults_of_brokers() -> None:
    assert findings() == []


@pytest.mark.scenario(98)
@pytest.mark.parametrize("ttl", [3600, WEEK])
def test_a_ttl_that_does_not_exceed_the_retention_is_reported_with_both_numbers(ttl: float) -> None:
    (only,) = findings(ttl=ttl)

    assert only.code.value == "retention-longer-than-ttl"
    assert "7 days (retention.ms = 604800000)" in only.what
    assert f"idempotency.default_ttl_seconds = {ttl}" in only.what
    assert "above 604800" in only.remedy


def test_the_ttl_of_a_dispatcher_is_named_in_the_finding() -> None:
    facts = BrokerFacts({"orders": topic_settings("orders", DEFAULTS)})

    (only,) = retention_findings(KAFKA, [Reading(("orders",), 60, "the ttl of its dispatcher")], facts)

    assert "the ttl of its dispatcher = 60 keeps records for 1 minute" in only.what


def test_unguarded_handlers_have_no_ttl_to_compare() -> None:
    assert findings(ttl=None) == []


@pytest.mark.parametrize(
    ("topic", "dead_letters", "code"),
    [
        ({"retention.ms": "-1"}, {"retention.ms": "-1"}, "retention-endless"),
        ({"cleanup.policy": "compact"}, {}, "retention-endless"),
        ({"max.message.bytes": "1000"}, {}, "event-limit-above-topic"),
        ({"max.message.bytes": "2000000"}, {"max.message.bytes": "2000000"}, "event-limit-below-topic"),
        ({}, {"max.message.bytes": "1048576"}, "dead-letter-topic-smaller"),
        ({}, {"retention.ms": "3600000"}, "dead-letter-topic-shorter"),
        ({}, {"cleanup.policy": "compact"}, "dead-letter-topic-compacted"),
        ({}, {"cleanup.policy": "compact,delete"}, "dead-letter-topic-compacted"),
    ],
)
def test_a_mismatch_is_reported(topic: dict[str, str], dead_letters: dict[str, str], code: str) -> None:
    assert codes(findings(topic, dead_letters)) == [code]


def test_a_topic_that_compacts_and_deletes_does_not_keep_events_forever() -> None:
    assert findings({"cleanup.policy": "compact, delete"}) == []


def test_a_service_keeps_records_for_the_ttl_of_its_dispatcher() -> None:
    manager = IdempotencyManager(IdempotencyConfig(), MemoryIdempotencyRepository(), scope="billing")
    plain = EventDispatcher(EventRouter())
    guarded = IdempotentEventDispatcher(EventRouter(), manager)
    longer = IdempotentEventDispatcher(EventRouter(), manager, ttl=timedelta(days=8))

    readings = [reading_of(dispatcher, ["orders"]) for dispatcher in (plain, guarded, longer)]

    assert [reading.ttl_seconds for reading in readings] == [None, 3600, 691_200]
    assert [reading.ttl_setting for reading in readings[1:]] == [TTL, "the ttl of its dispatcher"]


def test_errors_of_describe_configs_are_reported() -> None:
    """Responses to DescribeConfigs contain code, message, kind (2: topic, 4: broker), name and settings."""
    facts = facts_of(
        [
            (29, None, 2, "orders", []),
            (31, "not yours", 4, "1", []),
            (3, None, 2, "orders.dlq", []),
            (0, None, 2, "bills", [("retention.ms", None)]),
        ]
    )

    assert facts.unseen == {
        "orders": "TopicAuthorizationFailedError",
        "": "not yours",
        "bills": "the broker does not return them",
    }
    assert facts.missing == {"orders.dlq"}
    assert (facts.creates_topics, facts.session_bounds) == (None, None)


def test_a_finding_about_a_topic_of_two_services_is_reported_once() -> None:
    facts = BrokerFacts({"orders": topic_settings("orders", DEFAULTS | {"max.message.bytes": "1000"})})

    found = retention_findings(KAFKA, [Reading(("orders",), None), Reading(("orders",), None)], facts)

    assert codes(found) == ["event-limit-above-topic"]


def test_a_topic_whose_settings_cannot_be_read_is_reported() -> None:
    facts = BrokerFacts(unseen={"orders": "TopicAuthorizationFailedError"})

    (only,) = retention_findings(KAFKA, [Reading(("orders",), 60)], facts)

    assert only.code.value == "broker-unseen"
    assert "TopicAuthorizationFailedError" in only.what


@pytest.mark.parametrize(("creates", "severity"), [(True, "warning"), (False, "error"), (None, "error")])
def test_a_missing_topic_is_an_error_if_brokers_do_not_create_it(creates: bool | None, severity: str) -> None:
    facts = BrokerFacts(missing=frozenset({"orders", "orders.dlq"}), creates_topics=creates)

    found = broker_findings(KAFKA, [Reading(("orders",), 60)], facts)

    severities = {finding.code.value: finding.severity.value for finding in found}
    assert severities["topic-missing"] == severities["dead-letter-topic-missing"] == severity


@pytest.mark.parametrize(("bounds", "found"), [((6.0, 30.0), True), ((46.0, 60.0), True), ((45.0, 45.0), False)])
def test_a_session_timeout_outside_the_brokers_bounds_is_reported(bounds: tuple[float, float], found: bool) -> None:
    reported = broker_findings(KAFKA, [], BrokerFacts(session_bounds=bounds))

    assert ("session-timeout-out-of-bounds" in codes(reported)) is found


def test_unreadable_broker_settings_are_not_a_warning() -> None:
    reported: list[Any] = broker_findings(KAFKA, [], BrokerFacts(unseen={"": "ClusterAuthorizationFailedError"}))

    assert {finding.severity.value for finding in reported} == {"info"}


def codec_findings(
    topic: str | None, dead_letters: str | None = "producer", *, unreadable: tuple[str, ...]
) -> list[Finding]:
    """Return findings about codecs of `orders` and its dead-letter topic for a client that cannot read `unreadable`."""
    facts = BrokerFacts(
        {
            name: topic_settings(name, DEFAULTS | ({"compression.type": codec} if codec else {}))
            for name, codec in (("orders", topic), ("orders.dlq", dead_letters))
        }
    )
    found = broker_findings(KAFKA, [Reading(("orders",), WEEK + 1)], facts, unreadable)
    return [finding for finding in found if finding.code is Code.CODEC_UNREADABLE]


@pytest.mark.parametrize("codec", ["producer", "uncompressed", "gzip", "snappy", "lz4", "zstd", None])
def test_codecs_that_the_client_can_read_cause_no_findings(codec: str | None) -> None:
    assert codec_findings(codec, codec, unreadable=()) == []


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", None])
def test_codecs_that_need_no_package_cause_no_findings(codec: str | None) -> None:
    found = codec_findings(codec, unreadable=("snappy", "lz4", "zstd"))

    # If a broker does not report the setting, producers choose the codec, which is Kafka's default.
    assert [one.severity for one in found] == ([] if codec else [Severity.WARNING])


def test_a_topic_whose_codec_the_client_cannot_read_is_an_error() -> None:
    (only,) = codec_findings("lz4", unreadable=("snappy", "lz4", "zstd"))

    assert (only.severity, only.where) == (Severity.ERROR, "topic orders")
    assert only.what == "compression.type = lz4, and the installed Kafka client cannot read lz4"


def test_a_topic_whose_producers_may_choose_an_unreadable_codec_is_a_warning() -> None:
    (only,) = codec_findings("producer", unreadable=("snappy", "lz4", "zstd"))

    assert (only.severity, only.where) == (Severity.WARNING, "topic orders")
    assert "producers choose" in only.what
    assert "snappy, lz4, zstd" in only.what


def test_an_unreadable_codec_of_a_dead_letter_topic_is_a_warning() -> None:
    (only,) = codec_findings("gzip", "zstd", unreadable=("zstd",))

    assert (only.severity, only.where) == (Severity.WARNING, "topic orders.dlq")
    assert "`integr8s-idem dlq`" in only.cost
