"""Fixtures shared by the fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from integr8s_idem.telemetry import Observer
from integr8s_idem.telemetry.composite import combined
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from tests.support.effects import Effects
from tests.support.redis import DURABLE, RedisServer


@pytest.fixture
def effects(tmp_path: Path) -> Effects:
    return Effects(tmp_path)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Metrics and spans of a service, with keys in its spans."""

    observer: Observer
    registry: CollectorRegistry
    exporter: InMemorySpanExporter

    def output(self) -> dict[str, str]:
        """Return all finished spans and all metrics as text."""
        return {
            "spans": "".join(span.to_json() for span in self.exporter.get_finished_spans()),
            "metrics": generate_latest(self.registry).decode(),
        }


@pytest.fixture
def telemetry() -> Telemetry:
    exporter, registry, tracing = InMemorySpanExporter(), CollectorRegistry(), TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(exporter))
    observer = combined(
        OpenTelemetryObserver("billing", tracer_provider=tracing, span_keys=True),
        PrometheusObserver("billing", registry),
    )
    return Telemetry(observer, registry, exporter)


@pytest.fixture(scope="module")
def lasting_server() -> Iterator[RedisServer]:
    with RedisServer(config=DURABLE) as server:
        yield server


@pytest.fixture
def server(lasting_server: RedisServer) -> RedisServer:
    """Provide an empty Redis that loses no data when it is killed."""
    if not lasting_server.running:  # an earlier test failed while it was down
        lasting_server.kill()
        lasting_server.start()
    lasting_server.flush()
    return lasting_server
