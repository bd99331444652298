"""Telemetry of the library, through the `Observer` protocol; disabled by default.

Observers receive event types, reasons, and the names of services and handlers, which are suitable for metric labels.
They never receive keys or payloads, so that they cannot leak them or create a series for each.  A key reaches a span
only through `Span.annotate`, and only if a setting allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from types import TracebackType
from typing import Final, Protocol

from msgspec import Struct

from integr8s_idem.records import Database, TraceLink

__all__ = [
    "SILENT",
    "SILENT_PHASE",
    "DeliveryOutcome",
    "Gauge",
    "Headers",
    "Observation",
    "Observed",
    "Observer",
    "Past",
    "Phase",
    "ReceivedMessage",
    "Relation",
    "Signal",
    "SilentObserver",
    "Span",
    "StoreTimer",
    "is_recorded",
]

Headers = Sequence[tuple[str, bytes]]
"""Kafka headers."""


class ReceivedMessage(Protocol):
    """A message as the broker delivered it."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def headers(self) -> Headers: ...


class Phase(str, Enum):
    """A phase in the processing of a delivery.  The value is the name of the span."""

    RESERVE = "idempotency.reserve"
    HANDLE = "idempotency.handle"
    RECONCILE = "idempotency.reconcile"
    COMPLETE = "idempotency.complete"
    FAIL = "idempotency.fail"
    RELEASE = "idempotency.release"
    WAIT = "idempotency.wait"
    REPLAY = "idempotency.replay"


class DeliveryOutcome(str, Enum):
    """How a delivery ended.  The value is the attribute `idempotency.outcome` of its span.

    Of several handlers, the one that ended worst counts: the later in this list, the worse.
    """

    IGNORED = "ignored"
    """No handler of this service was to run."""
    DUPLICATE = "duplicate"
    """An earlier run had completed; its result was used."""
    EXECUTED = "executed"
    IN_PROGRESS = "in_progress"
    """Another run was in progress, and the policy is to skip the event then."""
    RETRY_LATER = "retry_later"
    """A run had failed, and its retry waits in a retry topic."""
    DISCARDED = "discarded"
    """A run had failed with an error that a rule discards."""
    RELEASED = "released"
    """Not settled, and will be redelivered: its partition was revoked, or the worker stopped."""
    LOST_LEASE = "lost_lease"
    """As released, after a run had lost its lease."""
    RETRIED = "retried"
    """As released, after a run had failed."""
    DEAD_LETTERED = "dead_lettered"
    UNDECODABLE = "undecodable"
    """Dead-lettered, because the message is not a valid event."""


class Relation(str, Enum):
    """Why a span is linked to another one.  The value is the attribute `idempotency.relation` of the link."""

    RUN = "run"
    """The other span is of the run that did the work, whose result a duplicate got."""
    PREVIOUS_ATTEMPT = "previous_attempt"
    """The other span is of an earlier attempt at the same work, which ended without an outcome."""
    MEMBER = "member"
    """The other span is of a delivery that is a member of this batch."""


class Past(Struct, frozen=True):
    """A phase that is over when it is observed."""

    since: float
    """When it began, in seconds of `time.perf_counter`."""
    attributes: Mapping[str, str | int] | None = None
    """Attributes of its span.  They never become metric labels."""


class Signal(str, Enum):
    """An event that is counted.  The value is the Prometheus name without `_total`."""

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
    RECONCILED = "idempotency_reconciliations"
    RETRY = "idempotency_retries"
    RETRY_COPY = "idempotency_retry_copies"
    DEAD_LETTER = "idempotency_dead_letters"
    DISCARDED = "idempotency_events_discarded"
    UNDECODABLE = "idempotency_undecodable_messages"
    REPLAY_REFUSED = "idempotency_replays_refused"
    REPLAY_FOR_OTHERS = "idempotency_replays_for_other_groups"
    PUBLISHED = "idempotency_events_published"
    COMMIT_FAILED = "idempotency_commit_failures"
    REBALANCE = "idempotency_rebalances"
    PARTITION_DAMAGED = "idempotency_damaged_partitions"
    SERVICE_STOPPED = "idempotency_services_stopped"
    STALE_COMPLETION = "idempotency_stale_completions"
    STEP_ORPHANED = "idempotency_steps_orphaned"
    OUTBOX_FAILURE = "idempotency_outbox_failures"


class Gauge(str, Enum):
    """A value that is measured periodically.  The value is the Prometheus name."""

    KEYS_ACTIVE = "idempotency_keys_active"
    IN_FLIGHT = "idempotency_in_flight"
    CONSUMER_LAG = "idempotency_consumer_lag"
    STORE_UP = "idempotency_store_up"
    OUTBOX_WAITING = "idempotency_outbox_waiting"
    OUTBOX_AGE = "idempotency_outbox_age_seconds"
    EVENT_LOOP_LAG = "idempotency_event_loop_lag_seconds"
    NATIVE_CODE = "idempotency_native_code"
    OBSERVE_TTL = "idempotency_observe_ttl_seconds"
    LIMIT_WAITING = "idempotency_limit_waiting"


class Observed(str, Enum):
    """What a service in observe mode found out about a delivery.  The value is the label `result`."""

    FIRST = "first"
    """The key was free."""
    RETRIED = "retried"
    """An earlier attempt failed or crashed.  A guard runs it again, too."""
    REDELIVERED = "redelivered"
    """A duplicate: the same message, again."""
    REPUBLISHED = "republished"
    """A duplicate: another message with the same key."""
    CONCURRENT = "concurrent"
    """A duplicate, while the handler of the first was running."""
    UNKNOWN = "unknown"
    """A duplicate of an event whose record does not say in which message it was."""
    FAILED = "failed"
    """The store did not answer, or there is no key."""
    UNRECORDED = "unrecorded"
    """The handler has succeeded, but that is not recorded: later duplicates of the delivery are not found.

    Counted in addition to the result of the delivery."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a service in observe mode found out about a delivery."""

    result: Observed
    gap: timedelta | None = None
    """Of a duplicate: the time since the first was settled, by the store's clock; `None` if it is unknown."""
    has_other_payload: bool = False
    """Whether a duplicate has another payload than the first."""


class Span(Protocol):
    """A running phase."""

    def link(self, trace: TraceLink, relation: Relation = Relation.RUN) -> None:
        """Link the span to another one."""
        ...

    def annotate(self, name: str, value: str | int) -> None:
        """Set an attribute of the span.  Never becomes a metric label."""
        ...

    def fail(self, error: BaseException | str) -> None:
        """Mark the span as failed; `error` is an exception, or a low-cardinality reason.  The last call counts."""
        ...

    def trace(self) -> TraceLink | None:
        """Return a link to this span, or `None` if it is not recorded."""
        ...


class StoreTimer(Protocol):
    """Receives the durations of calls to a store.  Must not raise and must not block."""

    def __call__(self, operation: str, since: float, error: BaseException | None = None) -> None:
        """Observe a call that ends now.

        Args:
            operation: The name of the store's method, such as `reserve`.
            since: When it began, in seconds of `time.perf_counter`.
            error: The exception that it raised.
        """
        ...


class Observer(Protocol):
    """Receives telemetry.  Its methods must not raise and must not block."""

    def processing(self, message: ReceivedMessage, event_type: str, event_id: str) -> AbstractContextManager[Span]:
        """Observe a delivery, from decoding until it is settled or released.

        Args:
            message: Its headers may name the producer's span.
            event_type: Empty if the message cannot be decoded.
            event_id: If the message cannot be decoded, the one in its headers; empty if there is none.
        """
        ...

    def phase(
        self, phase: Phase, event_type: str = "", *, attempt: int = 0, handler: str = "", past: Past | None = None
    ) -> AbstractContextManager[Span]:
        """Observe a phase and its duration; an exception marks it as failed.

        Args:
            event_type: Empty if it is unknown.
            attempt: Number of the attempt; 0 if there is none.
            handler: Name of the handler; empty if it is unknown.  It is only for spans.
            past: Set if the phase is over, except for links and errors that are noted in the block.
        """
        ...

    def shared(self, phase: Phase, event_types: Sequence[str], *, since: float) -> None:
        """Observe a phase that several deliveries have shared, and that ends now.  None is recorded in a span.

        Args:
            event_types: The event type of each delivery.
            since: When it began, in seconds of `time.perf_counter`.
        """
        ...

    def batch(self, event_type: str, members: Sequence[Context], handler: str) -> AbstractContextManager[Span]:
        """Observe a call of the batch handler `handler`; its events are handled in the contexts `members`."""
        ...

    def sending(
        self, topic: str, event_id: str = "", headers: Headers | None = None, *, in_current: bool = False
    ) -> AbstractContextManager[Span]:
        """Observe that a message is sent to `topic`, until the broker has confirmed it.

        Args:
            event_id: Empty if the message is not an event.
            headers: Those of a message that keeps the context in them; `None` if it gets that of this span.
            in_current: Whether the span is a child of the current one, rather than of the span in `headers`.
        """
        ...

    def count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        """Count a signal.

        Args:
            event_type: Empty if it is unknown.
            reason: Why a message was not handled as requested, from a closed set.  Only `Signal.DEAD_LETTER`,
                `Signal.UNDECODABLE` and `Signal.REPLAY_REFUSED` have reasons.  For `Signal.RECONCILED`, the answer.
        """
        ...

    def measure(self, gauge: Gauge, value: float, part: str = "") -> None:
        """Set a gauge to a count, or to seconds if its name ends in `_seconds`; `part` is the topic of a lag."""
        ...

    def observed(self, event_type: str, observation: Observation) -> None:
        """Count a delivery of a service in observe mode, and measure the gap of a duplicate."""
        ...

    def offsets_committed(self, *, since: float, topic: str = "", error: BaseException | None = None) -> None:
        """Observe a commit of offsets that ends now.

        Args:
            since: When it began, in seconds of `time.perf_counter`.
            topic: The topic, if it concerns only one.
            error: Why it failed.
        """
        ...

    def store_timer(self, database: Callable[[], Database]) -> StoreTimer | None:
        """Return what receives the durations of the calls to a store, or `None` to not measure them.

        Args:
            database: Returns the store's database; the details may be known only after a call that succeeded.
        """
        ...

    def inject(self, headers: list[tuple[str, bytes]]) -> None:
        """Add the current trace context to the headers of an outgoing message."""
        ...


class _SilentSpan:
    """A phase, and its span, of which nothing is kept."""

    __slots__ = ()

    # `contextlib.nullcontext` takes twice as long.

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def link(self, trace: TraceLink, relation: Relation = Relation.RUN) -> None:
        """Do nothing."""

    def annotate(self, name: str, value: str | int) -> None:
        """Do nothing."""

    def fail(self, error: BaseException | str) -> None:
        """Do nothing."""

    def trace(self) -> TraceLink | None:
        return None


SILENT_PHASE: Final[AbstractContextManager[Span]] = _SilentSpan()
"""The phase of a silent observer: it may be entered any number of times, also within itself."""


class SilentObserver:
    """An observer that does nothing; a single object is used for all spans, so that disabled telemetry costs little.

    Observers inherit the methods that they do not need from this class, so that `combined` does not call them.
    """

    def processing(self, message: ReceivedMessage, event_type: str, event_id: str) -> AbstractContextManager[Span]:
        return SILENT_PHASE

    def phase(
        self, phase: Phase, event_type: str = "", *, attempt: int = 0, handler: str = "", past: Past | None = None
    ) -> AbstractContextManager[Span]:
        return SILENT_PHASE

    def shared(self, phase: Phase, event_types: Sequence[str], *, since: float) -> None:
        """Do nothing; `since` is in seconds."""

    def batch(self, event_type: str, members: Sequence[Context], handler: str) -> AbstractContextManager[Span]:
        return SILENT_PHASE

    def sending(
        self, topic: str, event_id: str = "", headers: Headers | None = None, *, in_current: bool = False
    ) -> AbstractContextManager[Span]:
        return SILENT_PHASE

    def count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        """Do nothing."""

    def measure(self, gauge: Gauge, value: float, part: str = "") -> None:
        """Do nothing."""

    def observed(self, event_type: str, observation: Observation) -> None:
        """Do nothing."""

    def offsets_committed(self, *, since: float, topic: str = "", error: BaseException | None = None) -> None:
        """Do nothing; `since` is in seconds."""

    def store_timer(self, database: Callable[[], Database]) -> StoreTimer | None:
        return None

    def inject(self, headers: list[tuple[str, bytes]]) -> None:
        """Do nothing."""


SILENT: Final[Observer] = SilentObserver()


def is_recorded(phase: AbstractContextManager[Span]) -> bool:
    """Whether a phase that an observer returned is recorded in a span."""
    return bool(getattr(phase, "recorded", False))
