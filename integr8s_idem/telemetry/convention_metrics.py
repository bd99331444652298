"""Metrics that OpenTelemetry's semantic conventions define, under the names that its Prometheus exporter gives them.

Names and labels are those of version 1.44.0, in which the database metric is stable and the messaging metrics are in
development.  A label that is unknown or does not apply has an empty value here, and is not exported.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from threading import Lock
from time import perf_counter, time
from typing import Final, NamedTuple

from integr8s_idem.records import Database, TraceLink
from integr8s_idem.telemetry.conventions import error_type_of
from integr8s_idem.telemetry.exemplars import Exemplars
from integr8s_idem.telemetry.metric_labels import MAX_LABELS, MAX_REASONS, BoundedLabels
from integr8s_idem.telemetry.tallies import Tallies


class ConventionMetric(NamedTuple):
    """A counter, or a histogram if it has buckets."""

    name: str
    """The Prometheus name, of a counter without `_total`."""
    help: str
    labels: tuple[str, ...]
    """In addition to `service`."""
    buckets: tuple[float, ...] = ()
    """Upper bounds in seconds, as the conventions recommend them."""


DATABASE_OPERATIONS: Final = ConventionMetric(
    "db_client_operation_duration_seconds",
    "Duration of a call to the store in seconds; a batch is one call.",
    ("db_system_name", "db_namespace", "db_query_summary", "error_type", "server_address", "server_port"),
    (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10),
)

_MESSAGING_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_COMMON: Final = ("messaging_system", "messaging_operation_name", "server_address", "server_port")
_TOPIC: Final = "messaging_destination_name"
_GROUP: Final = "messaging_consumer_group_name"
MESSAGES_CONSUMED: Final = ConventionMetric(
    "messaging_client_consumed_messages", "Messages received.", (*_COMMON, _TOPIC, _GROUP)
)
MESSAGES_SENT: Final = ConventionMetric(
    "messaging_client_sent_messages",
    "Messages sent, whether or not the broker confirmed them.",
    (*_COMMON, _TOPIC, "error_type"),
)
MESSAGING_OPERATIONS: Final = ConventionMetric(
    "messaging_client_operation_duration_seconds",
    "Duration of sending a message, until the broker confirms it, or of committing offsets, in seconds.",
    (*_COMMON, "messaging_operation_type", _TOPIC, _GROUP, "error_type"),
    _MESSAGING_BUCKETS,
)
MESSAGING_PROCESSING: Final = ConventionMetric(
    "messaging_process_duration_seconds",
    "Duration of a delivery in seconds, from decoding until it is settled or released.",
    (*_COMMON, _TOPIC, _GROUP, "error_type"),
    _MESSAGING_BUCKETS,
)

METRICS: Final = (
    DATABASE_OPERATIONS,
    MESSAGES_CONSUMED,
    MESSAGES_SENT,
    MESSAGING_OPERATIONS,
    MESSAGING_PROCESSING,
)


class ConventionSeries:
    """The series of one service and their values, as plain numbers."""

    def __init__(self) -> None:
        # By the name of the metric, then by the values of its labels.
        self.tallies: Tallies[tuple[str, ...], tuple[str, ...]] = Tallies()
        self.created: dict[tuple[ConventionMetric, tuple[str, ...]], float] = {}
        """Creation time of each series, by metric and values of its labels."""
        self.exemplars: Exemplars[tuple[str, tuple[str, ...]]] = Exemplars()
        """By the name of the metric and the values of its labels."""
        self.error_types = SharedLabels(MAX_REASONS)
        self.names = SharedLabels(MAX_LABELS)
        """Names of topics."""

    def count(self, metric: ConventionMetric, values: tuple[str, ...]) -> None:
        """Add 1 to a counter."""
        counts = self.tallies.here.counts.setdefault(metric.name, {})
        if values not in counts:
            self.created.setdefault((metric, values), time())
            counts[values] = 0
        counts[values] += 1

    def observe(
        self, metric: ConventionMetric, values: tuple[str, ...], seconds: float, trace: TraceLink | None = None
    ) -> None:
        """Add a duration to a histogram; `trace`: the recorded span that has it."""
        try:
            row = self.tallies.here.times[metric.name][values]
        except KeyError:
            self.created.setdefault((metric, values), time())
            rows = self.tallies.here.times.setdefault(metric.name, {})
            row = rows[values] = [0.0] * (len(metric.buckets) + 2)
        bucket = bisect_left(metric.buckets, seconds)
        row[bucket] += 1
        row[-1] += seconds
        if trace is not None:
            self.exemplars.keep((metric.name, values), bucket, len(metric.buckets) + 1, seconds, trace)


class SharedLabels:
    """Bounded labels for several threads."""

    def __init__(self, most: int) -> None:
        self._labels = BoundedLabels(most)
        self._lock = Lock()

    def __call__(self, value: str) -> str:
        """Return the label of `value`."""
        with self._lock:
            return self._labels.label(value)


class DatabaseTimer:
    """Measures the calls to one store."""

    __slots__ = ("_database", "_series", "_succeeded")

    def __init__(self, series: ConventionSeries, database: Callable[[], Database]) -> None:
        self._series = series
        self._database = database
        self._succeeded: dict[str, tuple[str, ...]] = {}
        """Labels of the operations that have succeeded."""

    def __call__(self, operation: str, since: float, error: BaseException | None = None) -> None:
        """Measure a call that ends now; see `StoreTimer`."""
        seconds = perf_counter() - since
        values = self._succeeded.get(operation) if error is None else None
        self._series.observe(DATABASE_OPERATIONS, values or self._values(operation, error), seconds)

    def _values(self, operation: str, error: BaseException | None) -> tuple[str, ...]:
        # After a call that has succeeded, the driver knows which database it is connected to.
        database = self._database()
        port = "" if database.port is None else str(database.port)
        kind = "" if error is None else self._series.error_types(error_type_of(error))
        values = (database.system, database.namespace, operation, kind, database.address, port)
        if error is None:
            self._succeeded[operation] = values
        return values
