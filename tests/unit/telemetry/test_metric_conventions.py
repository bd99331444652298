"""Metrics have the names, types, units and labels of OpenTelemetry's semantic conventions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import pytest
from opentelemetry.semconv._incubating.attributes import messaging_attributes as messaging
from opentelemetry.semconv._incubating.metrics import db_metrics, messaging_metrics
from opentelemetry.semconv.attributes import db_attributes as db
from opentelemetry.semconv.attributes import error_attributes as errors
from opentelemetry.semconv.attributes import server_attributes as servers
from opentelemetry.semconv.metrics.db_metrics import DB_CLIENT_OPERATION_DURATION
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.samples import Sample

from integr8s_idem.records import Database
from integr8s_idem.telemetry import convention_metrics
from integr8s_idem.telemetry.convention_metrics import METRICS, ConventionMetric, DatabaseTimer
from integr8s_idem.telemetry.messaging_metrics import MessagingMetricsObserver
from integr8s_idem.telemetry.metrics_collector import MetricsCollector, series_of
from tests.support.received import received

SERVER: Final = (servers.SERVER_ADDRESS, servers.SERVER_PORT)
MESSAGING: Final = (messaging.MESSAGING_SYSTEM, messaging.MESSAGING_OPERATION_NAME, *SERVER)
TOPIC: Final = messaging.MESSAGING_DESTINATION_NAME
GROUP: Final = messaging.MESSAGING_CONSUMER_GROUP_NAME

REQUIRED: Final = {messaging.MESSAGING_SYSTEM, messaging.MESSAGING_OPERATION_NAME, db.DB_SYSTEM_NAME}
"""Attributes that the conventions require of each measurement of a metric that has them."""


class Defined(NamedTuple):
    """A metric by the conventions."""

    create: Callable[..., Any]
    """Creates the instrument."""
    attributes: tuple[str, ...]
    """Those that are required, or required if they are known and apply, and recommended ones that are used here."""


DEFINED: Final[Mapping[ConventionMetric, Defined]] = {
    convention_metrics.DATABASE_OPERATIONS: Defined(
        db_metrics.create_db_client_operation_duration,
        (db.DB_SYSTEM_NAME, db.DB_NAMESPACE, db.DB_QUERY_SUMMARY, errors.ERROR_TYPE, *SERVER),
    ),
    convention_metrics.MESSAGES_CONSUMED: Defined(
        messaging_metrics.create_messaging_client_consumed_messages, (*MESSAGING, TOPIC, GROUP)
    ),
    convention_metrics.MESSAGES_SENT: Defined(
        messaging_metrics.create_messaging_client_sent_messages, (*MESSAGING, TOPIC, errors.ERROR_TYPE)
    ),
    convention_metrics.MESSAGING_OPERATIONS: Defined(
        messaging_metrics.create_messaging_client_operation_duration,
        (*MESSAGING, messaging.MESSAGING_OPERATION_TYPE, TOPIC, GROUP, errors.ERROR_TYPE),
    ),
    convention_metrics.MESSAGING_PROCESSING: Defined(
        messaging_metrics.create_messaging_process_duration, (*MESSAGING, TOPIC, GROUP, errors.ERROR_TYPE)
    ),
}
UNITS: Final = {"s": "_seconds", "{message}": ""}
"""What OpenTelemetry's exporter for Prometheus appends to the name of a metric, by its unit."""


class Meter:
    """Returns the type, name and unit of the instrument that it is asked to create."""

    def create_counter(self, name: str, unit: str, description: str) -> tuple[str, str, str]:
        return "counter", name, unit

    def create_histogram(self, name: str, unit: str, description: str) -> tuple[str, str, str]:
        return "histogram", name, unit


def label_of(attribute: str) -> str:
    return attribute.replace(".", "_")


def measured() -> CollectorRegistry:
    """Return the metrics of a service after each operation has succeeded and failed."""
    registry = CollectorRegistry()
    observer = MessagingMetricsObserver("billing", registry, group="till", servers="kafka:9092,other:9092")
    for error in (None, OSError("down")):
        with observer.processing(received(topic="orders"), "order_placed", "event-1") as span:
            if error is not None:
                span.fail(error)
        with observer.sending("receipts") as span:
            if error is not None:
                span.fail(error)
        observer.offsets_committed(since=0, topic="orders", error=error)
    for database in (Database("redis"), Database("postgresql", "shop|public", "db", 5432)):
        timer = DatabaseTimer(series_of("billing", registry)[0].conventions, partial(_same, database))
        timer("reserve", 0)
        timer("reserve", 0, OSError("down"))
    return registry


def _same(database: Database) -> Database:
    return database


def samples(registry: CollectorRegistry, metric: ConventionMetric) -> list[Sample]:
    return [
        sample
        for family in registry.collect()
        if family.name == metric.name
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


def test_every_metric_is_compared() -> None:
    assert DEFINED.keys() == set(METRICS)


def test_the_database_metric_is_a_stable_one() -> None:
    assert convention_metrics.DATABASE_OPERATIONS.name.startswith(label_of(DB_CLIENT_OPERATION_DURATION))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_name_type_and_unit_are_those_of_the_conventions(metric: ConventionMetric) -> None:
    kind, name, unit = DEFINED[metric].create(Meter())
    families = {family.name: family.type for family in MetricsCollector().describe()}

    assert metric.name == label_of(name) + UNITS[unit]
    assert families[metric.name] == kind


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_labels_are_the_attributes_of_the_conventions(metric: ConventionMetric) -> None:
    assert set(metric.labels) == {label_of(attribute) for attribute in DEFINED[metric].attributes}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_required_labels_are_in_every_series_and_no_label_is_empty(metric: ConventionMetric) -> None:
    found = samples(measured(), metric)

    required = {label_of(attribute) for attribute in REQUIRED} & set(metric.labels)
    assert found
    assert [sample for sample in found if not required <= sample.labels.keys()] == []
    assert [sample for sample in found if "" in sample.labels.values()] == []
    assert {label for sample in found for label in sample.labels} >= set(metric.labels), "a label without any value"


def test_values_of_labels_are_those_of_the_conventions() -> None:
    systems = {each.value for each in messaging.MessagingSystemValues}
    types = {each.value for each in messaging.MessagingOperationTypeValues}

    for metric in METRICS[1:]:
        for sample in samples(measured(), metric):
            assert sample.labels["messaging_system"] in systems
            assert sample.labels.get("messaging_operation_type", "send") in types
            assert sample.labels["messaging_destination_name"] in {"orders", "receipts"}
            assert ("messaging_consumer_group_name" in sample.labels) is (
                sample.labels["messaging_operation_name"] != "send"
            )


def test_the_text_of_a_scrape_has_no_empty_label() -> None:
    lines = generate_latest(measured()).decode().splitlines()

    assert [line for line in lines if line.startswith(("db_", "messaging_")) and '=""' in line] == []
