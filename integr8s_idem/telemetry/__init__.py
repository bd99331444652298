"""What the library tells about itself: one small Protocol, silent by default.

An observer sees event types, reasons, service and handler names: closed sets, fit for metric labels.
It never sees a key or a payload, so that no implementation can leak or explode on one; a key
reaches a span only through `Span.annotate`, and only where a setting says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Final, Protocol

from integr8s_idem.records import TraceLink

__all__ = ["SILENT", "Gauge", "Headers", "Observer", "Phase", "Signal", "SilentObserver", "Span", "is_recorded"]

Headers = Sequence[tuple[str, bytes]]
"""Kafka headers."""


class Phase(str, Enum):
    """A stretch of time in the life of a delivery.  The value is the span's name."""

    RESERVE = "idempotency.reserve"
    HANDLE = "idempotency.handle"
    COMPLETE = "idempotency.complete"
    FAIL = "idempotency.fail"
    RELEASE = "idempotency.release"
    WAIT = "idempotency.wait"
    REPLAY = "idempotency.replay"


class Signal(str, Enum):
    """Something that happened and is counted.  The value is the Prometheus name without `_total`."""

    CACHE_HIT = "idempotency_cache_hits"
    CACHE_MISS = "idempotency_cache_misses"
    DUPLICATE_BLOCKED = "idempotency_duplicates_blocked"
    TAKEOVER = "idempotency_takeovers"
    ISOLATED = "idempotency_isolated_runs"
    STALE_START_PREVENTED = "idempotency_stale_starts_prevented"
    RESERVATION_LOST = "idempotency_reservations_lost"
    RECORD_VANISHED = "idempotency_records_vanished"
    STORE_DATA_LOST = "idempotency_store_data_losses"
    STORE_FAILOVER = "idempotency_store_failovers"
    STORE_RESTART = "idempotency_store_restarts"
    WAITED = "idempotency_waits"
    KEY_REUSED = "idempotency_keys_reused"
    CORRUPT_RECORD = "idempotency_corrupt_records"
    RESULT_DROPPED = "idempotency_results_dropped"
    RESULT_BYTES = "idempotency_result_bytes"
    STORE_ERROR = "idempotency_store_errors"
    PURGED = "idempotency_records_purged"
    UNGUARDED = "idempotency_unguarded_runs"
    DELIVERED = "idempotency_deliveries"
    HANDLED = "idempotency_events_handled"
    HANDLER_FAILED = "idempotency_handler_failures"
    RETRY = "idempotency_retries"
    DEAD_LETTER = "idempotency_dead_letters"
    UNDECODABLE = "idempotency_undecodable_messages"
    REPLAY_REFUSED = "idempotency_replays_refused"
    REPLAY_FOR_OTHERS = "idempotency_replays_for_other_groups"
    PUBLISHED = "idempotency_events_published"
    COMMIT_FAILED = "idempotency_commit_failures"
    REBALANCE = "idempotency_rebalances"
    PARTITION_DAMAGED = "idempotency_damaged_partitions"
    STALE_COMPLETION = "idempotency_stale_completions"
    STEP_ORPHANED = "idempotency_steps_orphaned"


class Gauge(str, Enum):
    """A level that is measured from time to time.  The value is the Prometheus name."""

    KEYS_ACTIVE = "idempotency_keys_active"
    IN_FLIGHT = "idempotency_in_flight"
    CONSUMER_LAG = "idempotency_consumer_lag"
    STORE_UP = "idempotency_store_up"
    OUTBOX_WAITING = "idempotency_outbox_waiting"
    EVENT_LOOP_LAG = "idempotency_event_loop_lag_seconds"


class Span(Protocol):
    """A running phase."""

    def link(self, trace: TraceLink) -> None:
        """Point at the run that did the work."""
        ...

    def annotate(self, name: str, value: str | int) -> None:
        """Tell more about this span.  Never becomes a metric label."""
        ...

    def trace(self) -> TraceLink | None:
        """How others can point at this span; `None` if nobody records it."""
        ...


class Observer(Protocol):
    """Receives what happens.  Must not raise and must not block."""

    def processing(self, event_type: str, topic: str, headers: Headers) -> AbstractContextManager[Span]:
        """One delivery, from decoding until it is settled or released; linked to the producer in `headers`."""
        ...

    def phase(self, phase: Phase, event_type: str = "") -> AbstractContextManager[Span]:
        """One phase; its duration is measured, an exception marks it failed."""
        ...

    def together(self, phase: Phase, event_types: Sequence[str]) -> AbstractContextManager[object]:
        """One phase that many deliveries share, none of which is recorded in a span; the event type of each."""
        ...

    def count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        """Something happened; `reason`, of a closed set, says why a message was not or could not be handled as it asks.

        Only `Signal.DEAD_LETTER`, `Signal.UNDECODABLE` and `Signal.REPLAY_REFUSED` have one; `event_type` is empty
        where none is known.
        """
        ...

    def measure(self, gauge: Gauge, value: float, part: str = "") -> None:
        """A level: a count, or seconds where the gauge's name ends so.  `part`: the topic of a lag, otherwise empty."""
        ...

    def inject(self, headers: list[tuple[str, bytes]]) -> None:
        """Add the current trace context to the headers of an outgoing message."""
        ...


class _SilentSpan:
    __slots__ = ()

    def link(self, trace: TraceLink) -> None:
        """Nobody listens."""

    def annotate(self, name: str, value: str | int) -> None:
        """Nobody listens."""

    def trace(self) -> TraceLink | None:
        return None


_SILENT_PHASE: Final[AbstractContextManager[Span]] = nullcontext(_SilentSpan())


class SilentObserver:
    """Tells nobody.  One object serves every span, so that disabled telemetry costs next to nothing.

    An observer that cares for some of it inherits the rest from here; then `combined` does not ask it in vain.
    """

    def processing(self, event_type: str, topic: str, headers: Headers) -> AbstractContextManager[Span]:
        return _SILENT_PHASE

    def phase(self, phase: Phase, event_type: str = "") -> AbstractContextManager[Span]:
        return _SILENT_PHASE

    def together(self, phase: Phase, event_types: Sequence[str]) -> AbstractContextManager[object]:
        return _SILENT_PHASE

    def count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        """Nobody listens."""

    def measure(self, gauge: Gauge, value: float, part: str = "") -> None:
        """Nobody listens."""

    def inject(self, headers: list[tuple[str, bytes]]) -> None:
        """Nobody listens."""


SILENT: Final[Observer] = SilentObserver()


def is_recorded(phase: AbstractContextManager[Span]) -> bool:
    """Whether what an observer has begun goes into a span that somebody keeps."""
    return bool(getattr(phase, "recorded", False))
