"""The HTTP endpoints `/metrics`, `/healthz` and `/readyz`."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from time import monotonic

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import get_current_span
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from integr8s_idem.errors import SettingsError
from integr8s_idem.runtime.endpoints import CLOSE_SECONDS, Endpoints
from integr8s_idem.telemetry import Phase, Signal
from integr8s_idem.telemetry.composite import combined
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from integr8s_idem.worker.health import Health, ServiceHealth
from tests.support.received import received

GOOD = ServiceHealth("billing", live=True, ready=True)
STARTING = ServiceHealth("audit", live=True, ready=False, reason="has no partitions yet")
DEAD = ServiceHealth("audit", live=False, ready=False, reason="no poll has finished for 40 s")


class Process:
    """Health and metrics that the endpoints serve."""

    def __init__(self) -> None:
        self.health = Health((GOOD,))
        self.registry = CollectorRegistry()

    def endpoints(self, port: int = 0, host: str = "127.0.0.1") -> Endpoints:
        return Endpoints(host, port, health=lambda: self.health, registry=self.registry)


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
async def client(process: Process) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        process.endpoints() as endpoints,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{endpoints.port}", trust_env=False) as client,
    ):
        yield client


async def test_a_scrape_returns_counters(process: Process, client: httpx.AsyncClient) -> None:
    observer = PrometheusObserver("billing", process.registry)
    observer.count(Signal.DUPLICATE_BLOCKED, "order_placed")
    with observer.processing(received(), "order_placed", "event-1"):
        pass

    page = await client.get("/metrics")

    labels = '{event_type="order_placed",service="billing"}'
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert f"idempotency_duplicates_blocked_total{labels} 1.0" in page.text
    assert f"idempotency_processing_seconds_count{labels} 1.0" in page.text


async def test_openmetrics_is_returned_if_the_client_accepts_it(process: Process, client: httpx.AsyncClient) -> None:
    PrometheusObserver("billing", process.registry)
    as_prometheus_asks = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"

    page = await client.get("/metrics", headers={"accept": as_prometheus_asks})

    assert page.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name for family in text_string_to_metric_families(page.text)}  # type: ignore[no-untyped-call]
    assert {"idempotency_cache_hits", "idempotency_cache_misses", "idempotency_duplicates_blocked"} <= families


async def test_only_openmetrics_has_the_trace_ids_of_exemplars(process: Process, client: httpx.AsyncClient) -> None:
    spans = OpenTelemetryObserver("billing", tracer_provider=TracerProvider(shutdown_on_exit=False))
    with combined(spans, PrometheusObserver("billing", process.registry)).phase(Phase.HANDLE, "order_placed"):
        trace_id = f"{get_current_span().get_span_context().trace_id:032x}"

    openmetrics = await client.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"})
    plain = await client.get("/metrics", headers={"accept": "text/plain"})

    assert trace_id in openmetrics.text
    assert trace_id not in plain.text


@pytest.mark.parametrize(
    "accept", ["", ";;;,,", "application/openmetrics-text;version=x.y", "text/plain;version=", "\u00ff" * 500]
)
async def test_an_invalid_accept_header_is_ignored(client: httpx.AsyncClient, accept: str) -> None:
    page = await client.get("/metrics", headers={b"accept": accept.encode("latin-1")})

    assert page.status_code == 200


@pytest.mark.parametrize(
    ("services", "live", "ready"),
    [((GOOD,), 200, 200), ((GOOD, STARTING), 200, 503), ((GOOD, DEAD), 503, 503), ((), 200, 503)],
    ids=["healthy", "one starting", "one dead", "none started"],
)
async def test_probes_report_all_services_of_the_process(
    process: Process, client: httpx.AsyncClient, services: tuple[ServiceHealth, ...], live: int, ready: int
) -> None:
    process.health = Health(services)

    assert (await client.get("/healthz")).status_code == live
    assert (await client.get("/readyz")).status_code == ready


@pytest.mark.scenario(76)
async def test_a_probe_names_the_service_and_the_reason(process: Process, client: httpx.AsyncClient) -> None:
    process.health = Health((GOOD, STARTING))

    answer = await client.get("/readyz")

    assert answer.json() == {
        "live": True,
        "ready": False,
        "services": [
            {"name": "billing", "live": True, "ready": True, "reason": ""},
            {"name": "audit", "live": True, "ready": False, "reason": "has no partitions yet"},
        ],
    }


async def test_other_paths_and_methods_are_rejected(client: httpx.AsyncClient) -> None:
    assert (await client.get("/")).status_code == 404
    assert (await client.post("/metrics")).status_code == 405


async def test_a_slow_scrape_does_not_block_the_event_loop(process: Process, client: httpx.AsyncClient) -> None:
    probe_answered = asyncio.Event()
    loop = asyncio.get_running_loop()

    class SlowCollector:
        def collect(self) -> list[object]:
            asyncio.run_coroutine_threadsafe(probe_answered.wait(), loop).result(10)
            return []

    process.registry.register(SlowCollector())  # type: ignore[arg-type]
    scrape = asyncio.create_task(client.get("/metrics"))

    assert (await client.get("/healthz")).status_code == 200
    assert not scrape.done()
    probe_answered.set()
    assert (await scrape).status_code == 200


async def test_a_port_in_use_raises_an_error_that_names_its_setting(process: Process) -> None:
    async with process.endpoints() as first:
        with pytest.raises(
            SettingsError, match=rf"telemetry\.metrics_port  {first.port} on 127\.0\.0\.1 is already in use"
        ):
            await process.endpoints(first.port).__aenter__()


@pytest.mark.parametrize("host", ["203.0.113.1", "no such host"])
async def test_an_invalid_host_raises_an_error_that_names_its_setting(process: Process, host: str) -> None:
    with pytest.raises(SettingsError, match=rf'telemetry\.metrics_host  cannot listen on "{host}"'):
        await process.endpoints(host=host).__aenter__()


async def test_a_port_can_be_reused_immediately(process: Process) -> None:
    """Closed connections in the state TIME_WAIT do not block the port."""
    async with httpx.AsyncClient(trust_env=False) as client:
        async with process.endpoints() as first:
            await client.get(f"http://127.0.0.1:{first.port}/healthz")

        async with process.endpoints(first.port) as second:
            assert second.port == first.port


async def test_signal_handlers_are_not_changed(process: Process) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async with process.endpoints() as endpoints, httpx.AsyncClient(trust_env=False) as client:
        await client.get(f"http://127.0.0.1:{endpoints.port}/healthz")
        during = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    assert during == before


async def test_requests_are_not_logged_and_other_loggers_are_not_changed(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    access = logging.getLogger("uvicorn.access")
    handler = logging.NullHandler()
    access.addHandler(handler)
    caplog.set_level(logging.DEBUG)

    async with process.endpoints() as endpoints, httpx.AsyncClient(trust_env=False) as client:
        await client.get(f"http://127.0.0.1:{endpoints.port}/healthz")

    assert not [record for record in caplog.records if record.name == access.name]
    assert access.propagate
    assert access.handlers == [handler]
    access.removeHandler(handler)


async def test_an_empty_block_closes_the_socket(process: Process) -> None:
    async with process.endpoints() as endpoints:
        port = endpoints.port

    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_idle_connections_do_not_delay_closing(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.runtime.endpoints.CLOSE_SECONDS", 60)
    async with process.endpoints() as endpoints:
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoints.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /hea")
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        before = monotonic()

    assert monotonic() - before < 60 / 2
    writer.close()


async def test_the_connection_of_a_scraper_that_reads_nothing_is_aborted(process: Process) -> None:
    for number in range(30):
        PrometheusObserver(f"service-{number}-{'x' * 3_000}", process.registry)
    endpoints = await process.endpoints().__aenter__()
    loop = asyncio.get_running_loop()

    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        stalled.setblocking(False)
        await loop.sock_connect(stalled, ("127.0.0.1", endpoints.port))
        await loop.sock_sendall(stalled, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        read = await loop.sock_recv(stalled, 1)
        before = monotonic()
        await endpoints.__aexit__(None, None, None)
        took = monotonic() - before
        with suppress(ConnectionResetError):
            while more := await loop.sock_recv(stalled, 65_536):
                read += more

    assert took < CLOSE_SECONDS + 10
    assert len(read) < len(generate_latest(process.registry))


async def test_cancelled_closing_closes_the_socket(process: Process) -> None:
    endpoints = await process.endpoints().__aenter__()
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.get(f"http://127.0.0.1:{endpoints.port}/healthz")
    ending = asyncio.create_task(endpoints.__aexit__(None, None, None))
    await asyncio.sleep(0)

    ending.cancel()

    with pytest.raises(asyncio.CancelledError):
        await ending
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", endpoints.port)


async def test_endpoints_cancelled_before_they_started_close_the_socket(process: Process) -> None:
    endpoints = await process.endpoints().__aenter__()
    endpoints._serving.cancel()

    with pytest.raises(asyncio.CancelledError):
        await endpoints.__aexit__(None, None, None)

    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", endpoints.port)
