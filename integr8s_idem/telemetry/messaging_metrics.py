"""Metrics of sent and received messages by OpenTelemetry's semantic conventions for messaging."""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType
from typing import TypeAlias

from prometheus_client import REGISTRY, CollectorRegistry

from integr8s_idem.records import TraceLink
from integr8s_idem.telemetry import Headers, ReceivedMessage, Relation, SilentObserver, Span
from integr8s_idem.telemetry.convention_metrics import (
    MESSAGES_CONSUMED,
    MESSAGES_SENT,
    MESSAGING_OPERATIONS,
    MESSAGING_PROCESSING,
    ConventionSeries,
)
from integr8s_idem.telemetry.conventions import error_type_of, first_server
from integr8s_idem.telemetry.metrics_collector import series_of

_SYSTEM = "kafka"
_Error: TypeAlias = BaseException | str | None


class MessagingMetricsObserver(SilentObserver):
    """Exports the `messaging_*` metrics of one service, in addition to `PrometheusObserver`.  Thread-safe.

    Args:
        service: Name of the service.
        registry: Where `/metrics` finds them.
        group: Consumer group; by default, the service's name.
        servers: Addresses of the brokers, as `host:port`, separated by commas.  Metrics name the first one.
    """

    def __init__(
        self, service: str, registry: CollectorRegistry = REGISTRY, *, group: str | None = None, servers: str = ""
    ) -> None:
        series, _ = series_of(service, registry)
        self._series = series.conventions
        self._group = group or service
        address, port = first_server(servers) or ("", "")
        self._server = (address, str(port))
        self._topics: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        """Labels of a consumed message, and of its processing without an error, by topic."""

    def processing(self, message: ReceivedMessage, event_type: str, event_id: str) -> AbstractContextManager[Span]:
        """Count a message that was received, and measure its processing."""
        consumed, processed = self._topics.get(message.topic) or self._labels_of(message.topic)
        self._series.count(MESSAGES_CONSUMED, consumed)
        return _Processing(self._series, processed)

    def sending(
        self, topic: str, event_id: str = "", headers: Headers | None = None, *, in_current: bool = False
    ) -> AbstractContextManager[Span]:
        """Count a message that is sent, and measure how long the broker takes to confirm it."""
        return _Sending(self._series, self._server, self._series.names(topic))

    def offsets_committed(self, *, since: float, topic: str = "", error: BaseException | None = None) -> None:
        """Measure a commit."""
        label, failed = self._series.names(topic), _error_label(self._series, error)
        values = (_SYSTEM, "commit", *self._server, "settle", label, self._group, failed)
        self._series.observe(MESSAGING_OPERATIONS, values, perf_counter() - since)

    def _labels_of(self, topic: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        label = self._series.names(topic)
        server, group = self._server, self._group
        found = (_SYSTEM, "poll", *server, label, group), (_SYSTEM, "process", *server, label, group, "")
        if label == topic:  # the labels of others are not kept, since their number is not bounded
            self._topics[topic] = found
        return found


def _error_label(series: ConventionSeries, error: _Error) -> str:
    if error is None:
        return ""
    return series.error_types(error_type_of(error) if isinstance(error, BaseException) else error)


class _Operation:
    """An operation that takes time, as a context manager and as a span; the last error that was reported counts."""

    __slots__ = ("_error", "_series", "_since", "_trace")

    def __init__(self, series: ConventionSeries) -> None:
        self._series = series
        self._error: _Error = None
        self._trace: TraceLink | None = None
        self._since = perf_counter()

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error if error is not None else self._error, perf_counter() - self._since)

    def _end(self, error: _Error, seconds: float) -> None:
        raise NotImplementedError

    def link(self, trace: TraceLink, relation: Relation = Relation.RUN) -> None:
        """Do nothing."""

    def annotate(self, name: str, value: str | int) -> None:
        """Do nothing."""

    def fail(self, error: BaseException | str) -> None:
        self._error = error

    def trace(self) -> TraceLink | None:
        return None

    def note_trace(self, trace: TraceLink) -> None:
        """Let the span that records this operation be an exemplar of its duration."""
        self._trace = trace


class _Processing(_Operation):
    __slots__ = ("_values",)

    def __init__(self, series: ConventionSeries, values: tuple[str, ...]) -> None:
        super().__init__(series)
        self._values = values
        """Labels without an error, which is the last one."""

    def _end(self, error: _Error, seconds: float) -> None:
        values = self._values if error is None else (*self._values[:-1], _error_label(self._series, error))
        self._series.observe(MESSAGING_PROCESSING, values, seconds, self._trace)


class _Sending(_Operation):
    __slots__ = ("_server", "_topic")

    def __init__(self, series: ConventionSeries, server: tuple[str, str], topic: str) -> None:
        super().__init__(series)
        self._server = server
        self._topic = topic

    def _end(self, error: _Error, seconds: float) -> None:
        label = _error_label(self._series, error)
        common = (_SYSTEM, "send", *self._server)
        self._series.count(MESSAGES_SENT, (*common, self._topic, label))
        values = (*common, "send", self._topic, "", label)
        self._series.observe(MESSAGING_OPERATIONS, values, seconds, self._trace)
