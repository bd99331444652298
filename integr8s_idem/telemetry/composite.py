"""Several observers as one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Final, Protocol

from integr8s_idem.records import TraceLink
from integr8s_idem.telemetry import (
    SILENT,
    Gauge,
    Headers,
    Observer,
    Phase,
    Signal,
    SilentObserver,
    Span,
    is_recorded,
)

_SILENT_PHASE: Final = SILENT.phase(Phase.HANDLE)
_SILENT_SPAN: Final = _SILENT_PHASE.__enter__()


def combined(*observers: Observer) -> Observer:
    """One observer that tells all of `observers`; no wrapper where one is enough."""
    heard = [observer for observer in observers if observer is not SILENT]
    if not heard:
        return SILENT
    return heard[0] if len(heard) == 1 else CompositeObserver(*heard)


class _Count(Protocol):
    """`Observer.count`."""

    def __call__(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None: ...


class CompositeObserver:
    """Tells every one of `observers`, in their order."""

    count: _Count
    """Something happened."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers
        self._counting = [observer.count for observer in observers if _cares_for_counts(observer)]
        # Several times an event, and mostly for one listener: the call goes to that one without us.
        self.count = self._counting[0] if len(self._counting) == 1 else self._count

    def processing(self, event_type: str, topic: str, headers: Headers) -> AbstractContextManager[Span]:
        """One delivery, in all of them."""
        heard = _SILENT_PHASE
        for observer in self._observers:
            begun = observer.processing(event_type, topic, headers)
            # Spans that nobody records are the usual case: who is silent is not asked a second time.
            if begun is not _SILENT_PHASE:
                heard = begun if heard is _SILENT_PHASE else _PairOfPhases(heard, begun)
        return heard

    def phase(self, phase: Phase, event_type: str = "") -> AbstractContextManager[Span]:
        """One phase, in all of them."""
        heard = _SILENT_PHASE
        for observer in self._observers:
            begun = observer.phase(phase, event_type)
            if begun is not _SILENT_PHASE:
                heard = begun if heard is _SILENT_PHASE else _PairOfPhases(heard, begun)
        return heard

    def together(self, phase: Phase, event_types: Sequence[str]) -> AbstractContextManager[object]:
        """One phase of many deliveries, in all of them."""
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.together(phase, event_types))
            return stack.pop_all()

    def _count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        for count in self._counting:
            count(signal, event_type, amount, reason=reason)

    def measure(self, gauge: Gauge, value: float, part: str = "") -> None:
        """A level."""
        for observer in self._observers:
            observer.measure(gauge, value, part)

    def inject(self, headers: list[tuple[str, bytes]]) -> None:
        """Let each add its trace context."""
        for observer in self._observers:
            observer.inject(headers)


def _cares_for_counts(observer: Observer) -> bool:
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
        return first if second is _SILENT_SPAN else _PairOfSpans(first, second)

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

    def link(self, trace: TraceLink) -> None:
        self._first.link(trace)
        self._second.link(trace)

    def annotate(self, name: str, value: str | int) -> None:
        self._first.annotate(name, value)
        self._second.annotate(name, value)

    def trace(self) -> TraceLink | None:
        return self._first.trace() or self._second.trace()
