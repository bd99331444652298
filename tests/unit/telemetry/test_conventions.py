"""Attributes have the names and types of OpenTelemetry's semantic conventions."""

from __future__ import annotations

from contextvars import copy_context
from typing import Any, Final

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes as messaging
from opentelemetry.semconv.attributes import error_attributes, exception_attributes, server_attributes
from opentelemetry.semconv.schemas import Schemas

from integr8s_idem.telemetry import Phase, conventions
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver
from integr8s_idem.telemetry.span_help import SPANS
from tests.support.received import received

NAMES: Final[dict[str, str]] = {
    conventions.SYSTEM: messaging.MESSAGING_SYSTEM,
    conventions.OPERATION_NAME: messaging.MESSAGING_OPERATION_NAME,
    conventions.OPERATION_TYPE: messaging.MESSAGING_OPERATION_TYPE,
    conventions.DESTINATION: messaging.MESSAGING_DESTINATION_NAME,
    conventions.PARTITION: messaging.MESSAGING_DESTINATION_PARTITION_ID,
    conventions.OFFSET: messaging.MESSAGING_KAFKA_OFFSET,
    conventions.MESSAGE_ID: messaging.MESSAGING_MESSAGE_ID,
    conventions.GROUP: messaging.MESSAGING_CONSUMER_GROUP_NAME,
    conventions.CLIENT_ID: messaging.MESSAGING_CLIENT_ID,
    conventions.BATCH_SIZE: messaging.MESSAGING_BATCH_MESSAGE_COUNT,
    conventions.SERVER_ADDRESS: server_attributes.SERVER_ADDRESS,
    conventions.SERVER_PORT: server_attributes.SERVER_PORT,
    conventions.ERROR_TYPE: error_attributes.ERROR_TYPE,
    conventions.EXCEPTION_TYPE: exception_attributes.EXCEPTION_TYPE,
    conventions.EXCEPTION_MESSAGE: exception_attributes.EXCEPTION_MESSAGE,
}
INTEGERS: Final = {conventions.OFFSET, conventions.BATCH_SIZE, conventions.SERVER_PORT}
"""Attributes that the conventions define as int; the others here are strings."""


def recorded() -> list[Any]:
    """Return one span of each kind that has messaging attributes."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    observer = OpenTelemetryObserver("billing", tracer_provider=provider, client_id="till", servers="kafka:9092")
    with observer.processing(received(), "order_placed", "event-1"):
        batch = observer.batch("order_placed", [copy_context()], "index")
    with batch:
        pass
    with observer.sending("shipments", "event-2") as sent:
        sent.annotate(conventions.PARTITION, "0")
        sent.annotate(conventions.OFFSET, 7)
    with pytest.raises(LookupError), observer.phase(Phase.HANDLE):
        raise LookupError
    return list(exporter.get_finished_spans())


def test_names_are_those_of_the_conventions_and_all_others_have_the_prefix_of_the_library() -> None:
    used = {name for span in SPANS for name in (*span.always, *span.sometimes)}

    assert {used: defined for used, defined in NAMES.items() if used != defined} == {}
    assert {name for name in used - NAMES.keys() if not name.startswith("idempotency.")} == set()


def test_types_are_those_of_the_conventions() -> None:
    wrong = {
        (span.name, name, value)
        for span in recorded()
        for name, value in span.attributes.items()
        if name in NAMES and type(value) is not (int if name in INTEGERS else str)
    }

    assert wrong == set()


def test_values_are_those_of_the_conventions() -> None:
    types = {each.value for each in messaging.MessagingOperationTypeValues}
    systems = {each.value for each in messaging.MessagingSystemValues}

    for span in recorded():
        attributes = span.attributes
        assert attributes.get(conventions.SYSTEM, "kafka") in systems
        assert attributes.get(conventions.OPERATION_TYPE, "process") in types


def test_the_installed_conventions_are_not_newer_than_the_schema() -> None:
    """If this fails, compare the names with the newer version, then change `SCHEMA_URL`."""
    newest = max(version_of(each.value) for each in Schemas)

    assert newest <= version_of(conventions.SCHEMA_URL)


def version_of(url: str) -> tuple[int, ...]:
    return tuple(map(int, url.rpartition("/")[2].split(".")))
