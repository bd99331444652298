"""Values of spans: attributes as an exporter accepts them, and contexts from headers and records."""

from __future__ import annotations

from typing import Final

from opentelemetry import trace as otel

from integr8s_idem.records import TraceLink
from integr8s_idem.telemetry import Headers
from integr8s_idem.telemetry import conventions as names

MAX_TEXT: Final = 1024
"""Maximum characters of an attribute; longer values are truncated."""

W3C_HEADERS: Final = frozenset({"traceparent", "tracestate"})


def client_attributes(client_id: str, servers: str) -> dict[str, str | int]:
    """Return the attributes of a Kafka client; the first of `servers` counts."""
    attributes: dict[str, str | int] = {}
    if client_id:
        attributes[names.CLIENT_ID] = text(client_id)
    if (server := names.first_server(servers)) is not None:
        attributes[names.SERVER_ADDRESS], attributes[names.SERVER_PORT] = text(server[0]), server[1]
    return attributes


def context_of(trace: TraceLink) -> otel.SpanContext:
    """Return the context of a recorded span."""
    return otel.SpanContext(
        trace_id=int.from_bytes(trace.trace_id),
        span_id=int.from_bytes(trace.span_id),
        is_remote=True,
        # Only recorded spans have trace links.
        trace_flags=otel.TraceFlags(otel.TraceFlags.SAMPLED),
    )


def carrier_of(headers: Headers) -> dict[str, str]:
    """Return the W3C headers; if a name is repeated, the last one, which the nearest hop added."""
    # Kafka allows headers without a value, although the type does not.
    return {name: value.decode("latin-1") for name, value in headers if name in W3C_HEADERS and value}


def text(value: str) -> str:
    """Truncate `value` and replace lone surrogates, which would make an exporter drop the whole batch of spans."""
    value = value[:MAX_TEXT]
    return value if value.isascii() else value.encode("utf-8", "replace").decode()
