"""Counters, levels and durations for Prometheus.

Every label comes from a closed set: services and phases by nature, event types, topics and reasons
because a set that grows is cut off and everything beyond it is counted as `other`.

Events are many and scrapes are few: an event adds to plain numbers, and a scrape makes a page of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from threading import Lock
from time import perf_counter, time
from types import TracebackType
from typing import Final, TypeAlias
from weakref import WeakKeyDictionary

import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from integr8s_idem.telemetry import SILENT, Gauge, Headers, Phase, Signal, SilentObserver, Span
from integr8s_idem.telemetry.tallies import Tallies

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
    Signal.ISOLATED: "Runs that had the process for themselves, since earlier attempts at their event had lapsed.",
    Signal.STALE_START_PREVENTED: (
        "Handlers that were not started because their lease had ended or was about to; their work was reserved again."
    ),
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
    Signal.REPLAY_REFUSED: "Messages whose replay headers were not honored, by reason; handled as if they had none.",
    Signal.REPLAY_FOR_OTHERS: "Replays for another consumer group, which this one passes by.",
    Signal.PUBLISHED: "Outgoing events confirmed by the broker.",
    Signal.COMMIT_FAILED: "Offset commits that failed.",
    Signal.REBALANCE: "Changes of the assignment of partitions.",
    Signal.PARTITION_DAMAGED: "Partitions set aside because a batch in them cannot be read.",
    Signal.STALE_COMPLETION: "Outcomes of deliveries whose partition had been given up.",
    Signal.STEP_ORPHANED: "Steps that a run has done, and that its last run did not ask for.",
    Gauge.KEYS_ACTIVE: "Active keys, counted in the store from time to time.",
    Gauge.IN_FLIGHT: "Deliveries taken from the broker and not settled.",
    Gauge.CONSUMER_LAG: "Messages between the committed offsets and the end of a topic, 0 once all are settled.",
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
        Signal.REPLAY_REFUSED,
        Signal.REPLAY_FOR_OTHERS,
        Signal.COMMIT_FAILED,
        Signal.REBALANCE,
    }
)
"""Signals that have no event type."""

_UNREADABLE: Final = ("empty", "malformed", "missing_id", "unknown_type", "unsupported_version", "invalid")
_GIVEN_UP: Final = ("handler_failed", "previously_failed", "key_reused", "corrupt_record", "no_key", "no_handler")
_NOT_HONORED: Final = ("unsigned", "bad_signature", "malformed", "other_event", "not_failed")
_WITH_REASON: Final = frozenset({Signal.DEAD_LETTER, Signal.UNDECODABLE, Signal.REPLAY_REFUSED})
"""Signals whose family has a label `reason`."""

_SILENT_SPAN: Final = SILENT.phase(Phase.HANDLE).__enter__()


_Counted: TypeAlias = Signal | tuple[Signal, str]
"""What is counted for an event type; with its reason where it has one."""
_Took: TypeAlias = Phase | None
"""What takes time for an event type; `None` is the delivery as a whole."""

_BOUNDS: Final = [*map(floatToGoString, BUCKETS), "+Inf"]
_NONE_YET: Final = (0.0,) * (len(_BOUNDS) + 1)


def _counter_labels(signal: Signal) -> list[str]:
    return ["service", "event_type", "reason"] if signal in _WITH_REASON else ["service", "event_type"]


def _reasons_of(signal: Signal, event_type: str) -> tuple[str, ...]:
    """The reasons to start with; a message that could not be read has no event type."""
    if signal not in _WITH_REASON:
        return ("",)
    if signal is Signal.REPLAY_REFUSED:
        return _NOT_HONORED
    return _GIVEN_UP if event_type else _UNREADABLE


def _counted(signal: Signal, reason: str) -> _Counted:
    return (signal, reason) if signal in _WITH_REASON else signal


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


class _Service:
    """The series of one service, and its numbers."""

    def __init__(self) -> None:
        self.tallies: Tallies[_Counted, _Took] = Tallies()
        self.counters: dict[tuple[Signal, str, str], float] = {}
        """By signal, event type and reason: seconds since 1970 at which each began."""
        self.histograms: dict[tuple[_Took, str], float] = {}
        """By phase and event type: the same."""
        self._event_types = _BoundedLabels()
        self._topics = _BoundedLabels()
        self._reasons = _BoundedLabels(MAX_REASONS, known=(*_UNREADABLE, *_GIVEN_UP))
        self._admitting = Lock()
        for signal in Signal:
            self._start_counters(signal, "")

    def count(self, signal: Signal, event_type: str, amount: int, reason: str) -> None:
        """Add `amount` to the counter with labels that are fit; begin it where it is new, in this thread or at all."""
        label, why = self._event_type(event_type), ""
        if signal in _WITH_REASON:
            with self._admitting:
                why = self._reasons.label(reason)
        self.counters.setdefault((signal, label, why), time())
        counts = self.tallies.here.counts.setdefault(label, {})
        counted = _counted(signal, why)
        counts[counted] = counts.get(counted, 0) + amount

    def times(self, took: _Took, event_type: str) -> list[float]:
        """The row of this thread for the label that is fit; begin it where it is new, in this thread or at all."""
        label = self._event_type(event_type)
        self.histograms.setdefault((took, label), time())
        return self.tallies.here.times.setdefault(label, {}).setdefault(took, [*_NONE_YET])

    def took(self, took: _Took, event_type: str, seconds: float, times: int = 1) -> None:
        """It took so long, so many times."""
        try:
            row = self.tallies.here.times[event_type][took]
        except KeyError:
            row = self.times(took, event_type)
        row[bisect_left(BUCKETS, seconds)] += times
        row[-1] += seconds * times

    def topic(self, name: str) -> str:
        """The label for a topic."""
        with self._admitting:
            return self._topics.label(name)

    def _event_type(self, event_type: str) -> str:
        with self._admitting:
            is_new = event_type not in self._event_types
            label = self._event_types.label(event_type)
        if is_new and (Signal.DELIVERED, label, "") not in self.counters:
            for signal in Signal:
                if signal not in _OF_THE_SERVICE:
                    self._start_counters(signal, label)
        return label

    def _start_counters(self, signal: Signal, label: str) -> None:
        for reason in _reasons_of(signal, label):
            self.counters.setdefault((signal, label, reason), time())


class _Page:
    """The metrics of one registry, for all services of the process: what a scrape gets."""

    def __init__(self) -> None:
        self.services: dict[str, _Service] = {}
        self.gauges = {
            gauge: prometheus_client.Gauge(gauge.value, HELP.get(gauge, ""), _gauge_labels(gauge), registry=None)
            for gauge in Gauge
        }

    def describe(self) -> Iterable[Metric]:
        """The metrics without a series, so that a registry knows their names."""
        return self._metrics({})

    def collect(self) -> Iterable[Metric]:
        """The metrics as they stand now."""
        return self._metrics(self.services.copy())

    def _metrics(self, services: Mapping[str, _Service]) -> Iterable[Metric]:
        families = _Families()
        for name, service in services.items():
            families.add(name, service)
        yield from families.counters.values()
        for gauge in self.gauges.values():
            yield from gauge.collect()
        yield families.phases
        yield families.processing


class _Families:
    """The counters and histograms of one scrape."""

    def __init__(self) -> None:
        self.counters = {
            signal: CounterMetricFamily(signal.value, HELP.get(signal, ""), labels=_counter_labels(signal))
            for signal in Signal
        }
        self.phases = HistogramMetricFamily(
            "idempotency_phase_seconds", "Seconds of one phase.", labels=["service", "phase", "event_type"]
        )
        self.processing = HistogramMetricFamily(
            "idempotency_processing_seconds",
            "Seconds of one delivery, from decoding until it is settled or released.",
            labels=["service", "event_type"],
        )
        self._dated = _series_are_dated()

    def add(self, name: str, service: _Service) -> None:
        """Add the series of one service."""
        totals = service.tallies.totals()
        for (signal, event_type, reason), began in service.counters.copy().items():
            values = [name, event_type, reason] if signal in _WITH_REASON else [name, event_type]
            count = totals.counts.get(event_type, {}).get(_counted(signal, reason), 0)
            self.counters[signal].add_metric(values, count, began if self._dated else None)
        for (phase, event_type), began in service.histograms.copy().items():
            row = totals.times.get(event_type, {}).get(phase, _NONE_YET)
            if phase is None:
                self._add_histogram(self.processing, [name, event_type], row, began)
            else:
                self._add_histogram(self.phases, [name, phase.name.lower(), event_type], row, began)

    def _add_histogram(
        self, family: HistogramMetricFamily, values: Sequence[str], row: Sequence[float], began: float
    ) -> None:
        *counts, seconds = row
        family.add_metric(values, list(zip(_BOUNDS, accumulate(counts), strict=True)), seconds)
        if self._dated:
            # The last sample is the sum, which has the labels of the histogram alone.
            family.samples.append(Sample(f"{family.name}_created", family.samples[-1].labels, began))


def _series_are_dated() -> bool:
    """Whether series tell when they began, which whoever runs the process may have forbidden to prometheus_client."""
    (family,) = Counter("any", "Any.", registry=None).collect()
    return len(family.samples) > 1


_made: WeakKeyDictionary[CollectorRegistry, _Page] = WeakKeyDictionary()
_making = Lock()


def _service_of(name: str, registry: CollectorRegistry) -> tuple[_Service, _Page]:
    with _making:
        page = _made.get(registry)
        if page is None:
            page = _Page()
            registry.register(page)
            _made[registry] = page
        if name not in page.services:
            page.services[name] = _Service()
        return page.services[name], page


class PrometheusObserver(SilentObserver):
    """Counts and measures one service into `registry`.  Safe to use from several threads.

    Counters of the service start at 0 at once, those of an event type as soon as the type is seen, for
    each reason there is, so that the first dead letter is an increase.  A gauge is absent until it is measured.
    Several observers of one service add to the same series.
    """

    def __init__(self, service: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._name = service
        self._service, self._page = _service_of(service, registry)
        self._here = self._service.tallies.here
        self._gauges: dict[tuple[Gauge, str], prometheus_client.Gauge] = {}

    def processing(self, event_type: str, topic: str, headers: Headers) -> AbstractContextManager[Span]:
        """Measure one delivery, by the monotonic clock."""
        return _Timed(self._service, None, event_type)

    def phase(self, phase: Phase, event_type: str = "") -> AbstractContextManager[Span]:
        """Measure one phase, failed or not, by the monotonic clock."""
        return _Timed(self._service, phase, event_type)

    def together(self, phase: Phase, event_types: Sequence[str]) -> AbstractContextManager[object]:
        """Measure one phase of many deliveries: to each of them it took as long."""
        return _TimedTogether(self._service, phase, event_types)

    def count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        """Add `amount` to the counter of `signal`; `reason` is a label where the signal has reasons."""
        try:
            self._here.counts[event_type][signal] += amount
        except KeyError:
            self._service.count(signal, event_type, amount, reason)

    def measure(self, gauge: Gauge, value: float, part: str = "") -> None:
        """Set the level of `gauge`."""
        child = self._gauges.get((gauge, part))
        (child or self._gauge(gauge, part)).set(value)

    def _gauge(self, gauge: Gauge, part: str) -> prometheus_client.Gauge:
        topic = self._service.topic(part)
        labels = (self._name, topic) if gauge is Gauge.CONSUMER_LAG else (self._name,)
        child = self._page.gauges[gauge].labels(*labels)
        self._gauges[gauge, topic] = child
        return child


class _Timed:
    __slots__ = ("_began", "_event_type", "_service", "_took")

    def __init__(self, service: _Service, took: _Took, event_type: str) -> None:
        self._service = service
        self._took = took
        self._event_type = event_type
        # A delivery that waits for others of its wave is in our hands already.
        self._began = perf_counter()

    def __enter__(self) -> Span:
        return _SILENT_SPAN

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._service.took(self._took, self._event_type, perf_counter() - self._began)


class _TimedTogether:
    __slots__ = ("_began", "_event_types", "_service", "_took")

    def __init__(self, service: _Service, took: _Took, event_types: Sequence[str]) -> None:
        self._service = service
        self._took = took
        self._event_types = event_types

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        seconds = perf_counter() - self._began
        for event_type in set(self._event_types):
            self._service.took(self._took, event_type, seconds, self._event_types.count(event_type))
