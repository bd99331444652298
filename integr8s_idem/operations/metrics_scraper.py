"""One look at one worker: `/metrics` and `/readyz`, over HTTP, and the numbers in them."""

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

MOST_BYTES: Final = 64 * 1024 * 1024
"""Of one page: some thousand event types with all their histograms."""
_CHUNK: Final = 64 * 1024
_HEADERS: Final = [("accept", "text/plain;version=0.0.4"), ("user-agent", "integr8s-idem"), ("connection", "close")]
_BEGAN: Final = "process_start_time_seconds"
_COUNTERS: Final = {f"{signal.value}_total": signal for signal in Signal}
_GAUGES: Final = {gauge.value: gauge for gauge in Gauge}
_OURS: Final = frozenset({*_COUNTERS, *_GAUGES, _BEGAN})
_LONGEST_REASON: Final = 200


class NoAnswerError(Exception):
    """A worker, or what is in its place, gave no answer that could be used; the text says why."""


@dataclass
class Numbers:
    """Those of one service, added up over event types, topics and reasons."""

    counts: dict[Signal, float] = field(default_factory=dict)
    levels: dict[Gauge, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Readiness:
    """What a worker says of one of its services."""

    live: bool
    ready: bool
    reason: str


@dataclass(frozen=True)
class Scrape:
    """What a worker said at one moment."""

    at: float
    """Seconds of our monotonic clock at which its answer began to come."""
    began: float | None
    """Seconds since 1970, by its own clock, at which the process began; `None` if it does not say."""
    services: Mapping[str, Numbers]
    readiness: Mapping[str, Readiness]
    """Of each service that it told of; empty if it did not."""


async def scraped(endpoint: Endpoint, *, timeout: float) -> Scrape:
    """Ask a worker once.

    Raises:
        NoAnswerError: It did not answer within `timeout` seconds, or what answered is no worker.
    """
    try:
        async with asyncio.timeout(timeout):
            page, at = await _page(endpoint, "/metrics")
            readiness = await _readiness(endpoint)
    except TimeoutError:
        raise NoAnswerError(f"no answer within {timeout:g} s") from None
    # In a thread: a page of many event types takes longer than a table may stand.
    began, services = await asyncio.to_thread(numbers_in, page.decode(errors="replace"))
    if not services and not readiness:
        raise NoAnswerError("answers, but has no metrics of integr8s-idem")
    return Scrape(at, began, services, readiness)


def numbers_in(page: str) -> tuple[float | None, dict[str, Numbers]]:
    """When the process began, and the numbers of its services.

    Raises:
        NoAnswerError: The page is not in Prometheus' text format.
    """
    began: float | None = None
    services: dict[str, Numbers] = {}
    # Most of a page is histograms, and comments: what nobody asks for is not read.
    lines = [line for line in page.splitlines() if line.partition(" ")[0].partition("{")[0] in _OURS]
    for name, labels, value in _samples(lines):
        if name == _BEGAN:
            began = value
            continue
        numbers = services.setdefault(labels.get("service", ""), Numbers())
        if name in _COUNTERS:
            signal = _COUNTERS[name]
            numbers.counts[signal] = numbers.counts.get(signal, 0) + value
        else:
            gauge = _GAUGES[name]
            numbers.levels[gauge] = numbers.levels.get(gauge, 0) + value
    return began, services


def _samples(lines: Iterable[str]) -> Iterable[tuple[str, Mapping[str, str], float]]:
    try:
        for family in text_string_to_metric_families("".join(f"{line}\n" for line in lines)):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    yield sample.name, sample.labels, sample.value
    except (ValueError, LookupError) as error:
        raise NoAnswerError(f"answers with a page that cannot be read: {shown(str(error), _LONGEST_REASON)}") from error


async def _readiness(endpoint: Endpoint) -> dict[str, Readiness]:
    """By service; nothing from a worker that does not tell, since its numbers are worth a row."""
    with suppress(NoAnswerError, ValueError, LookupError, TypeError, AttributeError):
        body, _ = await _page(endpoint, "/readyz", good=(200, 503))
        services: list[dict[str, Any]] = json.loads(body)["services"]
        return {
            str(told["name"]): Readiness(
                told["live"] is True, told["ready"] is True, shown(str(told.get("reason", "")), _LONGEST_REASON)
            )
            for told in services
        }
    return {}


async def _page(endpoint: Endpoint, path: str, good: tuple[int, ...] = (200,)) -> tuple[bytes, float]:
    """The body of one page, and the time of our monotonic clock when its first byte came."""
    address = endpoint.address
    try:
        reader, writer = await asyncio.open_connection(
            endpoint.ip,
            address.port,
            ssl=ssl.create_default_context() if address.is_secure else None,
            server_hostname=address.host if address.is_secure else None,
        )
    except OSError as error:
        raise NoAnswerError(_why(error)) from error
    try:
        host = host_and_port(address.host, address.port)
        return await _asked(reader, writer, host, address.base + path, good)
    except OSError as error:
        raise NoAnswerError(_why(error)) from error
    except h11.RemoteProtocolError as error:
        raise NoAnswerError(f"what answers does not speak HTTP: {error}") from error
    finally:
        # Nothing is owed to it, and a farewell could take as long as it likes.
        writer.transport.abort()


async def _asked(
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
                    raise NoAnswerError(f"answers {status} for {target}")
            case h11.Data(data=data):
                size += len(data)
                if size > MOST_BYTES:
                    raise NoAnswerError(f"answers with more than {MOST_BYTES:,} bytes for {target}")
                parts.append(bytes(data))
            case h11.EndOfMessage():
                return b"".join(parts), at


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer: the connection timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    # An event loop puts words of its own, with the address again, in place of the system's.
    return os.strerror(error.errno).lower() if error.errno else str(error)
