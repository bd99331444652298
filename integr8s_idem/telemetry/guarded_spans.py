"""Start and end spans, also if a span processor or sampler of the application raises an error.

The OpenTelemetry SDK passes such an error on to the code that starts or ends a span.  There, it would fail a handler
that has succeeded, so that it would run again, or stop the worker.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from opentelemetry import trace as otel

logger = logging.getLogger(__name__)

_LOGGED: Final[set[type[Exception]]] = set()


def start_span(tracer: otel.Tracer, name: str, **options: Any) -> otel.Span:
    """Start a span; if that fails, return one that is not recorded, with the identity of its parent."""
    try:
        return tracer.start_span(name, **options)
    except Exception as error:  # noqa: BLE001  # code of the application may raise anything
        _log(name, error)
        return otel.NonRecordingSpan(otel.get_current_span(options.get("context")).get_span_context())


def end_span(span: otel.Span) -> None:
    """End a span; if that fails, it may not be exported."""
    try:
        span.end()
    except Exception as error:  # noqa: BLE001  # code of the application may raise anything
        _log(getattr(span, "name", ""), error)


def _log(name: str, error: Exception) -> None:
    """Log the first error of each class; there may be several for each event."""
    level = logging.DEBUG if type(error) in _LOGGED else logging.ERROR
    _LOGGED.add(type(error))
    logger.log(level, "a span processor or sampler failed at the span %s, which may be missing", name, exc_info=error)
