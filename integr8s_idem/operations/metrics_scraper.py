"""Scrape `/metrics` and `/readyz` of a worker, and parse them."""

from __future__ import annotations

import asyncio
import json
import math
import os
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import h11
from prometheus_client.parser import text_string_to_metric_families

from integr8s_idem._util.escaping import shown
from integr8s_idem.operations.worker_addresses import Endpoint, host_and_port
from integr8s_idem.telemetry import Gauge, Signal
from integr8s_idem.telemetry.merged_metrics import RESTARTS, WORKER_PROCESSES
from integr8s_idem.telemetry.observe_metrics import OBSERVATIONS, OBSERVED_GAP

MAX_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of a page: enough for some thousand event types with all their histograms."""
_CHUNK: Final = 64 * 1024
_HEADERS: Final = [("accept", "text/plain;version=0.0.4"), ("user-agent", "integr8s-idem"), ("connection", "close")]
_START_TIME: Final = "process_start_time_seconds"
_RESTARTS: Final = f"{RESTARTS}_total"
_OF_PROCESS: Final = frozenset({_START_TIME, WORKER_PROCESSES, _RESTARTS})
"""Metrics that belong to no service."""
_COUNTERS: Final = {f"{signal.value}_total": signal for signal in Signal}
_GAUGES: Final = {gauge.value: gauge for gauge in Gauge}
_OBSERVATIONS: Final = f"{OBSERVATIONS.name}_total"
_OBSERVED_GAP: Final = f"{OBSERVED_GAP.name}_bucket"
_OBSERVED: Final = frozenset({_OBSERVATIONS, _OBSERVED_GAP})
_METRICS: Final = frozenset({*_COUNTERS, *_GAUGES, *_OF_PROCESS, *_OBSERVED})
_MAX_REASON: Final = 200


class ScrapeError(Exception):
    """The endpoint gave no usable answer; the message says why."""


@dataclass
class ServiceMetrics:
    """The metrics of one service, summed over event types, topics and reasons."""

    counts: dict[Signal, float] = field(default_factory=dict)
    levels: dict[Gauge, float] = field(default_factory=dict)
    observations: dict[tuple[str, str], float] = field(default_factory=dict)
    """In observe mode: number of deliveries by result and payload."""
    gaps: dict[float, float] = field(default_factory=dict)
    """In observe mode: number of duplicates by the largest gap in seconds, cumulative; the last is infinite."""


@dataclass(frozen=True)
class Readiness:
    """Liveness and readiness of one service."""

    live: bool
    ready: bool
    reason: str


@dataclass(frozen=True)
class Scrape:
    """The answer of a worker at one moment."""

    at: float
    """When the first byte of the answer arrived, in seconds of this process' monotonic clock."""
    started_at: float | None
    """When the process was started, in seconds since 1970 by its own clock; `None` if unknown."""
    services: Mapping[str, ServiceMetrics]
    readiness: Mapping[str, Readiness]
    """Readiness by service; empty if it is not reported."""
    processes: int = 1
    """Number of running processes: more than one if a supervisor answers."""
    restarts: int = 0
    """How often the supervisor has restarted a process."""


async def scrape(endpoint: Endpoint, *, timeout: float) -> Scrape:
    """Scrape a worker once.

    Raises:
        ScrapeError: It did not answer within `timeout` seconds, or the endpoint is not a worker.
    """
    try:
        async with asyncio.timeout(timeout):
            page, at = await _page(endpoint, "/metrics")
            readiness = await _readiness(endpoint)
    except TimeoutError:
        raise ScrapeError(f"no answer within {timeout:g} s") from None
    # In a thread, since parsing a page with many event types would block the live table.
    of_process, services = await asyncio.to_thread(parse_metrics, page.decode(errors="replace"))
    if not services and not readiness:
        raise ScrapeError("the endpoint answers, but has no metrics of integr8s-idem")
    processes, restarts = int(of_process.get(WORKER_PROCESSES, 1)), int(of_process.get(_RESTARTS, 0))
    return Scrape(at, of_process.get(_START_TIME), services, readiness, processes, restarts)


def parse_metrics(page: str) -> tuple[dict[str, float], dict[str, ServiceMetrics]]:
    """Parse a page into the metrics of the process, by name, and those of its services.

    Raises:
        ScrapeError: The page is not in the Prometheus text format.
    """
    of_process: dict[str, float] = {}
    services: dict[str, ServiceMetrics] = {}
    # Parse only the relevant lines: most of a page is histograms and comments.
    lines = [line for line in page.splitlines() if line.partition(" ")[0].partition("{")[0] in _METRICS]
    for name, labels, value in _samples(lines):
        if name in _OF_PROCESS:
            of_process[name] = value
            continue
        metrics = services.setdefault(labels.get("service", ""), ServiceMetrics())
        if name in _COUNTERS:
            signal = _COUNTERS[name]
            metrics.counts[signal] = metrics.counts.get(signal, 0) + value
        elif name in _OBSERVED:
            _add_observed(metrics, name, labels, value)
        else:
            gauge = _GAUGES[name]
            metrics.levels[gauge] = metrics.levels.get(gauge, 0) + value
    return of_process, services


def _add_observed(metrics: ServiceMetrics, name: str, labels: Mapping[str, str], value: float) -> None:
    if name == _OBSERVED_GAP:
        bound = float(labels.get("le", "inf"))
        metrics.gaps[bound] = metrics.gaps.get(bound, 0) + value
    else:
        key = labels.get("result", ""), labels.get("payload", "")
        metrics.observations[key] = metrics.observations.get(key, 0) + value


def _samples(lines: Iterable[str]) -> Iterable[tuple[str, Mapping[str, str], float]]:
    try:
        for family in text_string_to_metric_families("".join(f"{line}\n" for line in lines)):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    yield sample.name, sample.labels, sample.value
    except (ValueError, LookupError) as error:
        raise ScrapeError(f"cannot parse the metrics: {shown(str(error), _MAX_REASON)}") from error


async def _readiness(endpoint: Endpoint) -> dict[str, Readiness]:
    """Return the readiness by service; empty if unavailable, since the metrics are useful without it."""
    with suppress(ScrapeError, ValueError, LookupError, TypeError, AttributeError):
        body, _ = await _page(endpoint, "/readyz", good=(200, 503))
        services: list[dict[str, Any]] = json.loads(body)["services"]
        return {
            str(service["name"]): Readiness(
                service["live"] is True,
                service["ready"] is True,
                shown(str(service.get("reason", "")), _MAX_REASON),
            )
            for service in services
        }
    return {}


async def _page(endpoint: Endpoint, path: str, good: tuple[int, ...] = (200,)) -> tuple[bytes, float]:
    """Return the body of a page, and the monotonic time at which its first byte arrived."""
    address = endpoint.address
    try:
        reader, writer = await asyncio.open_connection(
            endpoint.ip,
            address.port,
            ssl=ssl.create_default_context() if address.is_secure else None,
            server_hostname=address.host if address.is_secure else None,
        )
    except OSError as error:
        raise ScrapeError(_reason(error)) from error
    try:
        host = host_and_port(address.host, address.port)
        return await _request(reader, writer, host, address.base + path, good)
    except OSError as error:
        raise ScrapeError(_reason(error)) from error
    except h11.RemoteProtocolError as error:
        raise ScrapeError(f"the endpoint does not speak HTTP: {error}") from error
    finally:
        # Aborted, since a graceful close could take arbitrarily long.
        writer.transport.abort()


async def _request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, target: str, good: tuple[int, ...]
) -> tuple[bytes, float]:
    connection = h11.Connection(h11.CLIENT)
    request = h11.Request(method="GET", target=target or "/", headers=[("host", host), *_HEADERS])
    writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
    await writer.drain()
    parts, size, at = [], 0, math.nan
    while True:
        match connection.next_event():
            case h11.NEED_DATA:
                connection.receive_data(await reader.read(_CHUNK))
            case h11.Response(status_code=status):
                at = monotonic()
                if status not in good:
                    raise ScrapeError(f"HTTP status {status} for {target}")
            case h11.Data(data=data):
                size += len(data)
                if size > MAX_BYTES:
                    raise ScrapeError(f"more than {MAX_BYTES:,} bytes for {target}")
                parts.append(bytes(data))
            case h11.EndOfMessage():
                return b"".join(parts), at


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer: the connection timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    # The event loop's own message would repeat the address.
    return os.strerror(error.errno).lower() if error.errno else str(error)
