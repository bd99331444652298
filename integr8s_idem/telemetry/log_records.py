"""Parts of log records for formatters and exporters."""

from __future__ import annotations

import logging
from typing import Any, Final

from integr8s_idem.config.message_text import text_of
from integr8s_idem.config.urls import redacted

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}
"""Attributes of every record, and uvicorn's copy of the message; all others were passed as `extra` or by a filter."""
_FORMATTER: Final = logging.Formatter()


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the attributes that were passed as `extra`, or set by a filter."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def exception_fields(record: logging.LogRecord) -> dict[str, str]:
    """Return the exception of `record`, with OpenTelemetry's names and without passwords in URLs; empty without one."""
    if not record.exc_info:
        return {}
    kind, error, _ = record.exc_info
    fields = {"exception.stacktrace": redacted(_FORMATTER.formatException(record.exc_info))}
    if kind is None or error is None:
        return fields
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return {"exception.type": name, "exception.message": redacted(text_of(error)), **fields}
