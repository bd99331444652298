"""Metrics by the messaging conventions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from aiokafka.errors import CommitFailedError
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import REGISTRY, CollectorRegistry

from integr8s_idem.config import TelemetrySettings
from integr8s_idem.errors import PermanentError, PublishError
from integr8s_idem.telemetry import Observer
from integr8s_idem.telemetry.composite import combined
from integr8s_idem.telemetry.messaging_metrics import MessagingMetricsObserver
from integr8s_idem.telemetry.metric_labels import MAX_LABELS
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from integr8s_idem.telemetry.setup import observer_for
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.fake_consumer import FakeConsumer
from tests.support.fake_worker import running
from tests.support.guarded import guarded
from tests.support.pipelines import Depot, ParcelSent, all_committed, dispatcher_of, sent
from tests.support.received import received

SYSTEM = {"service": "billing", "messaging_system": "kafka"}
GROUP = {"messaging_consumer_group_name": "billing-group"}
PROCESSED = "messaging_process_duration_seconds_count"
OPERATIONS = "messaging_client_operation_duration_seconds_count"


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def messaging(registry: CollectorRegistry) -> Observer:
    return MessagingMetricsObserver("billing", registry, group="billing-group")


def values(registry: CollectorRegistry, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the values of a metric, by `labels`."""
    return {
        tuple(sample.labels.get(label, "") for label in labels): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_a_received_message_is_counted_and_its_processing_measured(registry: CollectorRegistry) -> None:
    with messaging(registry).processing(received(topic="orders"), "order_placed", "event-1"):
        pass

    topic = {"messaging_destination_name": "orders"}
    consumed = SYSTEM | GROUP | topic | {"messaging_operation_name": "poll"}
    processed = SYSTEM | GROUP | topic | {"messaging_operation_name": "process"}
    assert registry.get_sample_value("messaging_client_consumed_messages_total", consumed) == 1
    assert registry.get_sample_value(PROCESSED, processed) == 1


def test_a_sent_message_is_counted_and_its_confirmation_measured(registry: CollectorRegistry) -> None:
    with messaging(registry).sending("receipts"):
        pass

    labels = SYSTEM | {
        "messaging_operation_name": "send",
        "messaging_destination_name": "receipts",
    }
    duration = labels | {"messaging_operation_type": "send"}
    assert registry.get_sample_value("messaging_client_sent_messages_total", labels) == 1
    assert registry.get_sample_value(OPERATIONS, duration) == 1


def test_a_message_that_is_not_confirmed_has_an_error_type(registry: CollectorRegistry) -> None:
    with pytest.raises(PublishError), messaging(registry).sending("receipts"):
        raise PublishError("receipts", "no answer")

    error = "integr8s_idem.errors.PublishError"
    assert values(registry, "messaging_client_sent_messages_total", "error_type") == {(error,): 1}
    assert values(registry, OPERATIONS, "error_type") == {(error,): 1}


def test_commits_are_measured(registry: CollectorRegistry) -> None:
    observer = messaging(registry)

    observer.offsets_committed(since=0, topic="orders")
    observer.offsets_committed(since=0, error=CommitFailedError())

    group, topic = "messaging_consumer_group_name", "messaging_destination_name"
    labels = ("messaging_operation_name", "messaging_operation_type", group, topic, "error_type")
    assert values(registry, OPERATIONS, *labels) == {
        ("commit", "settle", "billing-group", "orders", ""): 1,
        ("commit", "settle", "billing-group", "", "aiokafka.errors.CommitFailedError"): 1,
    }


@virtual_time
async def test_a_worker_reports_messages_and_commits(registry: CollectorRegistry) -> None:
    depot, broker = Depot(), sent(5)

    async with running(dispatcher_of(depot.handle, guarded(observer=messaging(registry))), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    topic = "messaging_destination_name"
    assert values(registry, "messaging_client_consumed_messages_total", topic) == {("parcel_sent",): 5}
    assert values(registry, PROCESSED, topic, "error_type") == {("parcel_sent", ""): 5}
    assert values(registry, OPERATIONS, "messaging_operation_name", topic)[("commit", "parcel_sent")] >= 1


@virtual_time
async def test_a_failed_commit_of_a_worker_has_an_error_type(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, depot, broker, commit = CollectorRegistry(), Depot(), sent(1), FakeConsumer.commit
    errors = [CommitFailedError()]

    async def failing_once(consumer: FakeConsumer, offsets: Mapping[Any, int]) -> None:
        if errors:
            raise errors.pop()
        await commit(consumer, offsets)

    monkeypatch.setattr(FakeConsumer, "commit", failing_once)

    async with running(dispatcher_of(depot.handle, guarded(observer=messaging(registry))), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    found = values(registry, OPERATIONS, "messaging_operation_name", "error_type")
    assert found[("commit", "aiokafka.errors.CommitFailedError")] == 1
    assert found[("commit", "")] >= 1


@pytest.mark.parametrize("is_recorded", [False, True])
@virtual_time
async def test_processing_that_fails_has_the_same_error_type_with_and_without_a_span(is_recorded: bool) -> None:
    registry, broker = CollectorRegistry(), sent(2)
    spans = OpenTelemetryObserver("billing", tracer_provider=TracerProvider(shutdown_on_exit=False))
    observer = combined(*([spans] if is_recorded else []), PrometheusObserver("billing", registry), messaging(registry))
    broker.put("parcel_sent", b"no json")

    flaky = [KeyError("no such address yet")]

    async def handle(event: ParcelSent) -> None:
        if event.number == 0:
            raise PermanentError("no such address")
        if flaky:
            raise flaky.pop()

    async with running(dispatcher_of(handle, guarded(observer=observer)), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert values(registry, PROCESSED, "error_type") == {
        ("KeyError",): 1,
        ("integr8s_idem.errors.PermanentError",): 1,
        ("integr8s_idem.errors.UndecodableEventError",): 1,
    }


def test_the_number_of_topics_is_bounded(registry: CollectorRegistry) -> None:
    observer = messaging(registry)

    for number in range(MAX_LABELS + 300):
        with observer.processing(received(topic=f"topic-{number}"), "order_placed", "event-1"):
            pass

    found = values(registry, PROCESSED, "messaging_destination_name")
    assert len(found) <= MAX_LABELS + 1
    assert found[("other",)] >= 300


def test_without_messages_there_are_no_messaging_metrics(registry: CollectorRegistry) -> None:
    PrometheusObserver("billing", registry)

    assert not [family.name for family in registry.collect() if family.name.startswith("messaging_")]


@pytest.mark.parametrize(("settings", "expected"), [({}, False), ({"messaging_metrics": True}, True)])
def test_the_observer_of_a_service_has_them_if_the_setting_is_true(settings: Any, expected: bool) -> None:
    service = f"messaging-{expected}"
    observer = observer_for(TelemetrySettings(**settings), service)

    with observer.processing(received(topic="orders"), "order_placed", "event-1"):
        pass

    found = {
        sample.labels["service"]
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == PROCESSED
    }
    assert (service in found) is expected


def test_they_are_disabled_together_with_metrics() -> None:
    settings = TelemetrySettings(metrics_enabled=False, messaging_metrics=True)

    assert isinstance(observer_for(settings, "messaging-without-metrics"), OpenTelemetryObserver)
