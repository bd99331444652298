"""A real Prometheus scrapes exemplars from a worker's endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from integr8s_idem.runtime.endpoints import Endpoints
from integr8s_idem.telemetry import Past, Phase
from integr8s_idem.telemetry.composite import combined
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from integr8s_idem.worker.health import Health
from tests.support.conditions import wait_until
from tests.support.prometheus import Prometheus, missing_program


async def test_prometheus_stores_the_trace_of_a_slow_handler() -> None:
    if why := missing_program("prometheus"):
        pytest.skip(why)
    registry = CollectorRegistry()
    spans = OpenTelemetryObserver("billing", tracer_provider=TracerProvider(shutdown_on_exit=False))
    observer = combined(spans, PrometheusObserver("billing", registry))
    with observer.phase(Phase.HANDLE, "order_placed", past=Past(-1_000)) as span:
        trace = span.trace()
    assert trace is not None

    async with Endpoints("127.0.0.1", 0, health=lambda: Health(services=()), registry=registry) as endpoints:
        (found,) = await asyncio.to_thread(_exemplars_of, f"127.0.0.1:{endpoints.port}")

    assert found["seriesLabels"]["phase"] == "handle"
    assert [exemplar["labels"]["trace_id"] for exemplar in found["exemplars"]] == [trace.trace_id.hex()]


def _exemplars_of(target: str) -> list[dict[str, Any]]:
    """Return the exemplars that a Prometheus has scraped from `target`."""
    with Prometheus([target], []) as prometheus:
        wait_until(lambda: prometheus.exemplars("idempotency_phase_seconds_bucket"), state=lambda: prometheus.log)
        return prometheus.exemplars("idempotency_phase_seconds_bucket")
