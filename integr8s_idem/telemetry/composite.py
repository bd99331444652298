"""Combine several observers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from types import TracebackType
from typing import Final, Protocol

from integr8s_idem.records import Database, TraceLink
from integr8s_idem.telemetry import (
    SILENT,
    SILENT_PHASE,
    Gauge,
    Headers,
    Observation,
    Observer,
    Past,
    Phase,
    ReceivedMessage,
    Relation,
    Signal,
    SilentObserver,
    Span,
    StoreTimer,
    is_recorded,
)

_SILENT_SPAN: Final = SILENT_PHASE.__enter__()


def combined(*observers: Observer) -> Observer:
    """Return an observer that calls all of `observers`; a single observer is not wrapped.

    List observers of spans before those of metrics, whose histograms then have exemplars with the ids of the spans.
    """
    active = [observer for observer in observers if observer is not SILENT]
    if not active:
        return SILENT
    return active[0] if len(active) == 1 else CompositeObserver(*active)


class _Count(Protocol):
    """Signature of `Observer.count`."""

    def __call__(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None: ...


class CompositeObserver:
    """Calls all of `observers`, in their order."""

    count: _Count
    """Count a signal."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers
        self._counting = [observer.count for observer in observers if _overrides_count(observer)]
        # `count` is called several times per event, and usually one observer counts: call it directly.
        self.count = self._counting[0] if len(self._counting) == 1 else self._count

    def processing(self, message: ReceivedMessage, event_type: str, event_id: str) -> AbstractContextManager[Span]:
        """Observe a delivery."""
        result = SILENT_PHASE
        for observer in self._observers:
            result = _paired(result, observer.processing(message, event_type, event_id))
        return result

    def phase(
        self, phase: Phase, event_type: str = "", *, attempt: int = 0, handler: str = "", past: Past | None = None
    ) -> AbstractContextManager[Span]:
        """Observe a phase."""
        result = SILENT_PHASE
        for observer in self._observers:
            result = _paired(result, observer.phase(phase, event_type, attempt=attempt, handler=handler, past=past))
        return result

    def shared(self, phase: Phase, event_types: Sequence[str], *, since: float) -> None:
        """Observe a phase that several deliveries have shared."""
        for observer in self._observers:
            observer.shared(phase, event_types, since=since)

    def batch(self, event_type: str, members: Sequence[Context], handler: str) -> AbstractContextManager[Span]:
        """Observe a call of a batch handler."""
        result = SILENT_PHASE
        for observer in self._observers:
            result = _paired(result, observer.batch(event_type, members, handler))
        return result

    def sending(
        self, topic: str, event_id: str = "", headers: Headers | None = None, *, in_current: bool = False
    ) -> AbstractContextManager[Span]:
        """Observe that a message is sent."""
        result = SILENT_PHASE
        for observer in self._observers:
            result = _paired(result, observer.sending(topic, event_id, headers, in_current=in_current))
        return result

    def _count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        for count in self._counting:
            count(signal, event_type, amount, reason=reason)

    def measure(self, gauge: Gauge, value: float, part: str = "") -> None:
        """Set a gauge."""
        for observer in self._observers:
            observer.measure(gauge, value, part)

    def observed(self, event_type: str, observation: Observation) -> None:
        """Count an observed delivery."""
        for observer in self._observers:
            observer.observed(event_type, observation)

    def offsets_committed(self, *, since: float, topic: str = "", error: BaseException | None = None) -> None:
        """Observe a commit of offsets."""
        for observer in self._observers:
            observer.offsets_committed(since=since, topic=topic, error=error)

    def store_timer(self, database: Callable[[], Database]) -> StoreTimer | None:
        """Return what passes the durations of calls to all observers that measure them."""
        timers = [timer for observer in self._observers if (timer := observer.store_timer(database)) is not None]
        if len(timers) < 2:
            return timers[0] if timers else None

        def all_timers(operation: str, since: float, error: BaseException | None = None) -> None:
            for timer in timers:
                timer(operation, since, error)

        return all_timers

    def inject(self, headers: list[tuple[str, bytes]]) -> None:
        """Let each observer add its trace context."""
        for observer in self._observers:
            observer.inject(headers)


def _paired(result: AbstractContextManager[Span], opened: AbstractContextManager[Span]) -> AbstractContextManager[Span]:
    # Usually no span is recorded: then silent observers need no call when the phase ends.
    if opened is SILENT_PHASE:
        return result
    return opened if result is SILENT_PHASE else _PairOfPhases(result, opened)


def _overrides_count(observer: Observer) -> bool:
    return getattr(type(observer), "count", None) is not SilentObserver.count


class _PairOfPhases:
    __slots__ = ("_first", "_second")

    @property
    def recorded(self) -> bool:
        return is_recorded(self._first) or is_recorded(self._second)

    def __init__(self, first: AbstractContextManager[Span], second: AbstractContextManager[Span]) -> None:
        self._first = first
        self._second = second

    def __enter__(self) -> Span:
        first = self._first.__enter__()
        try:
            second = self._second.__enter__()
        except BaseException:
            self._first.__exit__(*sys.exc_info())
            raise
        if first is _SILENT_SPAN:
            return second
        self._note_trace(first)
        return first if second is _SILENT_SPAN else _PairOfSpans(first, second)

    def _note_trace(self, span: Span) -> None:
        """Let the second phase, if it is a measurement, name the recorded span of the first one as an exemplar."""
        note = getattr(self._second, "note_trace", None)
        if note is not None and (trace := span.trace()) is not None:
            note(trace)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._second.__exit__(kind, error, traceback)
        finally:
            self._first.__exit__(kind, error, traceback)


class _PairOfSpans:
    __slots__ = ("_first", "_second")

    def __init__(self, first: Span, second: Span) -> None:
        self._first = first
        self._second = second

    def link(self, trace: TraceLink, relation: Relation = Relation.RUN) -> None:
        self._first.link(trace, relation)
        self._second.link(trace, relation)

    def annotate(self, name: str, value: str | int) -> None:
        self._first.annotate(name, value)
        self._second.annotate(name, value)

    def fail(self, error: BaseException | str) -> None:
        self._first.fail(error)
        self._second.fail(error)

    def trace(self) -> TraceLink | None:
        return self._first.trace() or self._second.trace()
