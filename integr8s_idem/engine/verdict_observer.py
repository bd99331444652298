"""Observe what the store answers to reservations: one phase for each verdict that counts, and one for each wait.

While another run is in progress, a key is looked at again and again.  Only the first of these answers and the one that
ends the wait are observed, and the wait itself once, with the number of looks.  While the store does not answer,
requests are repeated, and only the first failure is observed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from integr8s_idem.engine.work import Work
from integr8s_idem.records import Pending, Previous, Reserved, Verdict
from integr8s_idem.telemetry import Observer, Past, Phase, Relation, Span, conventions

P = ParamSpec("P")
T = TypeVar("T")


class VerdictObserver:
    """Observes reservations for one manager."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def observe(self, work: Work, verdict: Verdict, since: float) -> None:
        """Observe an answer that has arrived now to a request made at `since`, by `time.perf_counter`."""
        if not (work.looks and isinstance(verdict, Pending)):
            self.end_wait(work)
            work.unanswered = False
            _in_context(work, self._verdict, work, verdict, since)

    def observe_all(self, works: Sequence[Work], verdicts: Sequence[Verdict], since: float) -> None:
        """Observe the answers to a request for several works, like `observe`."""
        usual = [each.event_type for each in works if each.context is None and not (each.looks or each.unanswered)]
        if usual:
            self._observer.shared(Phase.RESERVE, usual, since=since)
        if len(usual) < len(works):
            for work, verdict in zip(works, verdicts, strict=True):
                if work.context is not None or work.looks or work.unanswered:
                    self.observe(work, verdict, since)

    def observe_failure(self, works: Sequence[Work], error: BaseException, since: float) -> None:
        """Observe that the store did not answer, once for each work until it answers."""
        new = [work for work in works if not work.unanswered]
        usual = [work.event_type for work in new if work.context is None]
        if usual:
            self._observer.shared(Phase.RESERVE, usual, since=since)
        for work in new:
            work.unanswered = True
            if work.context is not None:
                _in_context(work, self._failed, work, error, since)

    def end_wait(self, work: Work) -> None:
        """Observe the wait of `work` for another run, which is over; without a wait, do nothing."""
        if work.looks:
            _in_context(work, self._waited, work)
            work.looks = 0

    def observe_completions(self, works: Sequence[Work], written: Sequence[bool], since: float) -> None:
        """Observe that outcomes of `works` were written; those that were not are observed when they are written."""
        usual = [work.event_type for work in works if work.context is None]
        if usual:
            self._observer.shared(Phase.COMPLETE, usual, since=since)
        if len(usual) < len(works):
            for work, is_written in zip(works, written, strict=True):
                if work.context is not None and is_written:
                    _in_context(work, self._completed, work, since)

    def _verdict(self, work: Work, verdict: Verdict, since: float) -> None:
        facts = None if work.trace is None else _facts_of(work, verdict)
        with self._observer.phase(
            Phase.RESERVE, work.event_type, handler=work.handler, past=Past(since, facts)
        ) as span:
            link_to_previous(span, work, verdict)

    def _failed(self, work: Work, error: BaseException, since: float) -> None:
        with self._observer.phase(Phase.RESERVE, work.event_type, handler=work.handler, past=Past(since)) as span:
            span.fail(error)

    def _completed(self, work: Work, since: float) -> None:
        with self._observer.phase(Phase.COMPLETE, work.event_type, handler=work.handler, past=Past(since)):
            pass

    def _waited(self, work: Work) -> None:
        waited = Past(work.waiting_since, {conventions.LOOKS: work.looks})
        with self._observer.phase(Phase.WAIT, work.event_type, handler=work.handler, past=waited):
            pass


def describe(span: Span, work: Work, verdict: Verdict) -> None:
    """Describe `verdict` in the span of its reservation."""
    for name, value in _facts_of(work, verdict).items():
        span.annotate(name, value)
    link_to_previous(span, work, verdict)


def link_to_previous(span: Span, work: Work, verdict: Verdict) -> None:
    """Link the span of a reservation to the previous attempt, unless that belongs to the same delivery."""
    if isinstance(verdict, Reserved) and verdict.trace is not None and verdict.trace != work.trace:
        span.link(verdict.trace, Relation.PREVIOUS_ATTEMPT)


def _facts_of(work: Work, verdict: Verdict) -> dict[str, str | int]:
    facts: dict[str, str | int] = {conventions.KEY: work.key.label, conventions.VERDICT: type(verdict).__name__}
    if isinstance(verdict, Reserved):
        facts[conventions.ATTEMPT] = verdict.attempt
        if verdict.previous is not Previous.NONE:
            facts[conventions.PREVIOUS] = verdict.previous.value
    return facts


def _in_context(work: Work, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function` in the context of the span that `work` belongs to."""
    # In a copy, since the context may be in use.
    return function(*args, **kwargs) if work.context is None else work.context.copy().run(function, *args, **kwargs)
