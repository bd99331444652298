"""Fields of log records: the delivery, request or run in which a record is made, and the current span.

    handler.addFilter(ContextFilter())      # with the standard library's logging
    event_dict |= context_fields()          # in a processor of structlog

A context variable holds an object that knows the fields.  They are read only when something is logged.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Protocol

from integr8s_idem._util.context_vars import RUN

__all__ = ["ContextFilter", "context_fields"]

FIELDS: Final = (
    "trace_id",
    "span_id",
    "service",
    "topic",
    "partition",
    "offset",
    "event_id",
    "event_type",
    "handler",
    "attempt",
    "record_key",
    "message_key",
)
"""Names of all fields, in the order in which they are written."""
KEY_FIELDS: Final = frozenset({"record_key", "message_key"})
"""Fields that may contain personal data."""


_UNKNOWN: Final = (None, "")


class LogSource(Protocol):
    """Knows the fields of a delivery, or of a part of the program."""

    def log_fields(self) -> Mapping[str, object]:
        """Return the fields that are known, also those with keys.  Empty values count as unknown."""
        ...


SOURCE: Final[ContextVar[LogSource | None]] = ContextVar("integr8s_idem_log_source", default=None)
"""The source of the current code; inherited by tasks."""


class ContextFilter(logging.Filter):
    """Adds the fields of the current context to log records, as attributes.  Lets every record pass.

    Add it to a handler.  On a logger, it would miss the records of the loggers below it.  With a `QueueHandler`, add it
    to that one, since the handlers behind the queue run in another thread.  Attributes that were passed as `extra` are
    kept.

    Args:
        keys: Whether to add `record_key` and `message_key`, which may contain personal data.
    """

    def __init__(self, *, keys: bool = False) -> None:
        super().__init__()
        self._keys = keys

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields, and return `True`."""
        attributes = vars(record)
        for name, value in context_fields(keys=self._keys).items():
            attributes.setdefault(name, value)
        return True


def context_fields(*, keys: bool = False) -> dict[str, object]:
    """Return the fields of the current context that are known, by name; see docs/how-to/read-logs.md.

    Args:
        keys: Whether to include `record_key` and `message_key`, which may contain personal data.
    """
    source, run = SOURCE.get(), RUN.get()
    known: dict[str, object] = {} if source is None else {**source.log_fields()}
    known.update(_span_fields())
    if run is not None:
        # The innermost run: that of a decorated function within a handler, for example.
        known.setdefault("service", run.among.service)
        known["attempt"] = run.attempt.number
        if run.lease is not None or run.commits_itself:  # otherwise, there is no record
            known["record_key"] = run.attempt.key
    return {
        name: known[name] for name in FIELDS if known.get(name) not in _UNKNOWN and (keys or name not in KEY_FIELDS)
    }


def _span_fields() -> dict[str, object]:
    # Before the API is imported, there is no current span; importing it here would cost 20 ms.
    otel: Any = sys.modules.get("opentelemetry.trace")
    try:
        current_span, trace_id, span_id = otel.get_current_span, otel.format_trace_id, otel.format_span_id
    except AttributeError:  # not imported, or another thread is importing it
        return {}
    span = current_span().get_span_context()
    return {"trace_id": trace_id(span.trace_id), "span_id": span_id(span.span_id)} if span.is_valid else {}


class ServiceSource:
    """The source of a service, outside of deliveries."""

    __slots__ = ("_service",)

    def __init__(self, service: str) -> None:
        self._service = service

    def log_fields(self) -> Mapping[str, object]:
        """Return the name of the service."""
        return {"service": self._service}


class MessageSource:
    """The source of a message that is not a delivery of the library's worker, or not decoded."""

    __slots__ = ("_handler", "_record", "_service")

    def __init__(self, service: str, record: Any, handler: str = "") -> None:
        """`record` has topic, partition, offset and headers, and may have a key."""
        self._service = service
        self._record = record
        self._handler = handler

    def log_fields(self) -> Mapping[str, object]:
        """Return the place of the message, and what its headers state."""
        record = self._record
        headers = dict(record.headers or ())
        return {
            "service": self._service,
            "topic": record.topic,
            "partition": record.partition,
            "offset": record.offset,
            "event_id": key_text(headers.get("event_id")),
            "event_type": key_text(headers.get("event_type")),
            "handler": self._handler,
            "message_key": key_text(getattr(record, "key", None)),
        }


class CommonSource:
    """The source of a batch: the fields that have the same value for all of its members."""

    __slots__ = ("_members",)

    def __init__(self, members: Sequence[LogSource]) -> None:
        self._members = members

    def log_fields(self) -> Mapping[str, object]:
        """Return the common fields."""
        first, *others = [member.log_fields() for member in self._members]
        return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


@contextmanager
def logging_as(source: LogSource) -> Iterator[None]:
    """Add the fields of `source` to the records of the block."""
    outer = SOURCE.get()
    SOURCE.set(source if outer is None else _Nested(outer, source))
    try:
        yield
    finally:
        # Not `reset`, which fails if the block ends in a copy of the context.
        SOURCE.set(outer)


@contextmanager
def logging_with(source: LogSource | None = None, **fields: object) -> Iterator[None]:
    """Add `fields` to the records of the block, for records about a run that are made outside of it.

    Not with `extra`: a record factory of the application may set the same names, and then `logging` raises an error.

    Args:
        source: Added before `fields`.
        fields: Empty values and zeros are ignored.
    """
    known = context_fields(keys=True)
    stated = source.log_fields() if source is not None else {}
    known.update({name: value for name, value in stated.items() if value not in _UNKNOWN})
    known.update({name: value for name, value in fields.items() if value})
    run = RUN.get()
    RUN.set(None)
    try:
        with logging_as(_Known(known)):
            yield
    finally:
        RUN.set(run)


class _Nested:
    __slots__ = ("_inner", "_outer")

    def __init__(self, outer: LogSource, inner: LogSource) -> None:
        self._outer = outer
        self._inner = inner

    def log_fields(self) -> Mapping[str, object]:
        inner = {name: value for name, value in self._inner.log_fields().items() if value not in _UNKNOWN}
        return {**self._outer.log_fields(), **inner}


class _Known:
    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def log_fields(self) -> Mapping[str, object]:
        return self._fields


def key_text(key: object) -> str:
    """Return a Kafka key or header as text; empty if there is none."""
    return key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else "" if key is None else str(key)
