"""Counters, levels and durations for Prometheus.

Every label comes from a closed set: services and phases by nature, event types, topics and reasons
because a set that grows is cut off and everything beyond it is counted as `other`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from types import TracebackType
from typing import Final
from weakref import WeakKeyDictionary

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from integr8s_idem.telemetry import SILENT, Gauge, Headers, Phase, Signal, Span

MAX_LABELS: Final = 200
"""Distinct event types, and distinct topics, of one service; further ones share the label `other`."""
MAX_LABEL_LENGTH: Final = 128
"""Characters of a label; a longer one is `other`."""
MAX_REASONS: Final = 20
"""Distinct reasons of one service."""
OTHER: Final = "other"

BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds in seconds: from one round trip to a store up to a handler as long as the default lease."""

HELP: Final[Mapping[Signal | Gauge, str]] = {
    Signal.CACHE_HIT: "Work the store knew already, once per delivery and handler.",
    Signal.CACHE_MISS: "Work that was new to the store, once per delivery and handler.",
    Signal.DUPLICATE_BLOCKED: "Deliveries whose handler did not run: work done, given up, or skipped as under way.",
    Signal.TAKEOVER: "Reservations taken over from an owner whose lease ended without a word.",
    Signal.RESERVATION_LOST: "Runs whose reservation was gone before their end.",
    Signal.RECORD_VANISHED: "Records the store had lost when their run was settled.",
    Signal.STORE_DATA_LOST: "Times the store was found emptied or replaced while the service ran.",
    Signal.STORE_FAILOVER: "Times another primary was found to have taken over: its last records may be lost.",
    Signal.STORE_RESTART: "Times the store was started anew, not known to keep all: its last records may be lost.",
    Signal.WAITED: "Deliveries that waited for a run elsewhere.",
    Signal.KEY_REUSED: "Keys seen with another payload.",
    Signal.CORRUPT_RECORD: "Records that could not be read.",
    Signal.RESULT_DROPPED: "Results not kept: too large, or not encodable.",
    Signal.RESULT_BYTES: "Bytes of results kept.",
    Signal.STORE_ERROR: "Calls of the store without a usable answer.",
    Signal.PURGED: "Expired records taken away in the background.",
    Signal.UNGUARDED: "Handlers run without the guard.",
    Signal.DELIVERED: "Deliveries taken from the broker.",
    Signal.HANDLED: "Deliveries whose handler returned.",
    Signal.HANDLER_FAILED: "Runs of a handler that raised or took too long.",
    Signal.RETRY: "Deliveries to be tried again.",
    Signal.DEAD_LETTER: "Messages moved to a dead-letter topic, by reason.",
    Signal.UNDECODABLE: "Messages that are no event known here, by reason.",
    Signal.PUBLISHED: "Outgoing events confirmed by the broker.",
    Signal.COMMIT_FAILED: "Offset commits that failed.",
    Signal.REBALANCE: "Changes of the assignment of partitions.",
    Signal.PARTITION_DAMAGED: "Partitions set aside because a batch in them cannot be read.",
    Signal.STALE_COMPLETION: "Outcomes of deliveries whose partition had been given up.",
    Signal.STEP_ORPHANED: "Steps that a run has done, and that its last run did not ask for.",
    Gauge.KEYS_ACTIVE: "Active keys, counted in the store from time to time.",
    Gauge.IN_FLIGHT: "Deliveries taken from the broker and not settled.",
    Gauge.CONSUMER_LAG: "Messages between the committed offsets and the end of a topic.",
    Gauge.STORE_UP: "1 while the store answers, otherwise 0.",
    Gauge.OUTBOX_WAITING: "Events of committed transactions that wait to be published.",
    Gauge.EVENT_LOOP_LAG: "Seconds the event loop is late.",
}

_OF_THE_SERVICE: Final = frozenset(
    {
        Signal.STORE_DATA_LOST,
        Signal.STORE_FAILOVER,
        Signal.STORE_RESTART,
        Signal.STORE_ERROR,
        Signal.PURGED,
        Signal.UNDECODABLE,
        Signal.COMMIT_FAILED,
        Signal.REBALANCE,
    }
)
"""Signals that have no event type."""

_UNREADABLE: Final = ("empty", "malformed", "missing_id", "unknown_type", "unsupported_version", "invalid")
_GIVEN_UP: Final = ("handler_failed", "previously_failed", "key_reused", "corrupt_record", "no_key", "no_handler")
_WITH_REASON: Final = frozenset({Signal.DEAD_LETTER, Signal.UNDECODABLE})
"""Signals whose family has a label `reason`."""

_SILENT_SPAN: Final = SILENT.phase(Phase.HANDLE).__enter__()


@dataclass(frozen=True, slots=True)
class _Families:
    """The metrics of one registry, shared by all services of the process."""

    counters: Mapping[Signal, Counter]
    gauges: Mapping[Gauge, prometheus_client.Gauge]
    phases: Histogram
    processing: Histogram


_made: WeakKeyDictionary[CollectorRegistry, _Families] = WeakKeyDictionary()
_making = Lock()


def _families_of(registry: CollectorRegistry) -> _Families:
    with _making:
        if registry not in _made:
            _made[registry] = _make_families(registry)
        return _made[registry]


def _make_families(registry: CollectorRegistry) -> _Families:
    return _Families(
        counters={
            signal: Counter(signal.value, HELP.get(signal, ""), _counter_labels(signal), registry=registry)
            for signal in Signal
        },
        gauges={
            gauge: prometheus_client.Gauge(gauge.value, HELP.get(gauge, ""), _gauge_labels(gauge), registry=registry)
            for gauge in Gauge
        },
        phases=Histogram(
            "idempotency_phase_seconds",
            "Seconds of one phase.",
            ["service", "phase", "event_type"],
            buckets=BUCKETS,
            registry=registry,
        ),
        processing=Histogram(
            "idempotency_processing_seconds",
            "Seconds of one delivery, from decoding to settling.",
            ["service", "event_type"],
            buckets=BUCKETS,
            registry=registry,
        ),
    )


def _counter_labels(signal: Signal) -> list[str]:
    return ["service", "event_type", "reason"] if signal in _WITH_REASON else ["service", "event_type"]


def _reasons_of(signal: Signal, event_type: str) -> tuple[str, ...]:
    """The reasons to start with; a message that could not be read has no event type."""
    if signal not in _WITH_REASON:
        return ("",)
    return _GIVEN_UP if event_type else _UNREADABLE


def _gauge_labels(gauge: Gauge) -> list[str]:
    return ["service", "topic"] if gauge is Gauge.CONSUMER_LAG else ["service"]


class _BoundedLabels:
    """The label for a value: itself, or `other` where it is unfit or one too many."""

    def __init__(self, most: int = MAX_LABELS, known: Iterable[str] = ()) -> None:
        self._known = {"", OTHER, *known}
        self._most = most + 2

    def __contains__(self, value: str) -> bool:
        return value in self._known

    def label(self, value: str) -> str:
        if value in self._known:
            return value
        # A lone surrogate is not printable, and would spoil every scrape, since it has no UTF-8 form.
        if len(value) > MAX_LABEL_LENGTH or not value.isprintable() or len(self._known) >= self._most:
            return OTHER
        self._known.add(value)
        return value


class PrometheusObserver:
    """Counts and measures one service into `registry`.  Safe to use from several threads.

    Counters of the service start at 0 at once, those of an event type as soon as the type is seen, for
    each reason there is, so that the first dead letter is an increase.  A gauge is absent until it is measured.
    """

    def __init__(self, service: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._service = service
        self._families = _families_of(registry)
        self._event_types = _BoundedLabels()
        self._topics = _BoundedLabels()
        self._reasons = _BoundedLabels(MAX_REASONS, known=(*_UNREADABLE, *_GIVEN_UP))
        self._admitting = Lock()
        self._counters: dict[tuple[Signal, str, str], Counter] = {}
        self._gauges: dict[tuple[Gauge, str], prometheus_client.Gauge] = {}
        self._phases: dict[tuple[Phase, str], Histogram] = {}
        self._processing: dict[str, Histogram] = {}
        for signal in Signal:
            self._start_counters(signal, "")

    def processing(self, event_type: str, topic: str, headers: Headers) -> AbstractContextManager[Span]:
        """Measure one delivery, by the monotonic clock."""
        histogram = self._processing.get(event_type)
        return _Timed(histogram or self._processing_histogram(event_type))

    def phase(self, phase: Phase, event_type: str = "") -> AbstractContextManager[Span]:
        """Measure one phase, failed or not, by the monotonic clock."""
        histogram = self._phases.get((phase, event_type))
        return _Timed(histogram or self._phase_histogram(phase, event_type))

    def count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        """Add `amount` to the counter of `signal`; `reason` is a label of dead letters and undecodable messages."""
        counter = self._counters.get((signal, event_type, reason))
        (counter or self._counter(signal, event_type, reason)).inc(amount)

    def measure(self, gauge: Gauge, value: float, part: str = "") -> None:
        """Set the level of `gauge`."""
        child = self._gauges.get((gauge, part))
        (child or self._gauge(gauge, part)).set(value)

    def inject(self, headers: list[tuple[str, bytes]]) -> None:
        """Metrics do not travel."""

    def _counter(self, signal: Signal, event_type: str, reason: str) -> Counter:
        label = self._admit(event_type)
        why = ""
        if signal in _WITH_REASON:
            with self._admitting:
                why = self._reasons.label(reason)
        return self._counters.get((signal, label, why)) or self._start_counter(signal, label, why)

    def _start_counters(self, signal: Signal, label: str) -> None:
        for reason in _reasons_of(signal, label):
            self._start_counter(signal, label, reason)

    def _start_counter(self, signal: Signal, label: str, reason: str) -> Counter:
        labels = (label, reason) if signal in _WITH_REASON else (label,)
        counter = self._families.counters[signal].labels(self._service, *labels)
        self._counters[signal, label, reason] = counter
        return counter

    def _processing_histogram(self, event_type: str) -> Histogram:
        label = self._admit(event_type)
        histogram = self._families.processing.labels(self._service, label)
        self._processing[label] = histogram
        return histogram

    def _phase_histogram(self, phase: Phase, event_type: str) -> Histogram:
        label = self._admit(event_type)
        histogram = self._families.phases.labels(self._service, phase.name.lower(), label)
        self._phases[phase, label] = histogram
        return histogram

    def _gauge(self, gauge: Gauge, part: str) -> prometheus_client.Gauge:
        with self._admitting:
            topic = self._topics.label(part)
        labels = (self._service, topic) if gauge is Gauge.CONSUMER_LAG else (self._service,)
        child = self._families.gauges[gauge].labels(*labels)
        self._gauges[gauge, topic] = child
        return child

    def _admit(self, event_type: str) -> str:
        with self._admitting:
            is_new = event_type not in self._event_types
            label = self._event_types.label(event_type)
        if is_new and (Signal.DELIVERED, label, "") not in self._counters:
            for signal in Signal:
                if signal not in _OF_THE_SERVICE:
                    self._start_counters(signal, label)
        return label


class _Timed:
    __slots__ = ("_histogram", "_started")

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._started = 0.0

    def __enter__(self) -> Span:
        self._started = perf_counter()
        return _SILENT_SPAN

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._histogram.observe(perf_counter() - self._started)
