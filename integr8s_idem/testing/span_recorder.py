"""Assert which spans the workers of a `WorkerHarness` have recorded.

    async def test_a_duplicate_links_to_the_run(harness: WorkerHarness) -> None:
        await harness.publish(OrderPlaced(order_id="1"))
        await harness.redeliver_all()

        spans = recorded_spans(harness)
        assert [span.outcome for span in spans.named("process order_placed")] == ["executed", "duplicate"]
        assert spans.one("idempotency.replay").links == {"run": spans.named("process order_placed")[0]}

The text of `RecordedSpans.tree()` shows each trace with its spans, attempts and outcomes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from integr8s_idem.telemetry import Observer, conventions
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver

PRODUCER: str = "producer"
"""Relation of the link from a delivery to the span of its producer."""


@dataclass(eq=False, repr=False)
class RecordedSpan:
    """A span that has ended."""

    name: str
    kind: str
    """`consumer`, `producer`, `internal`, …"""
    attributes: Mapping[str, Any]
    failed: bool
    """Whether its status is an error."""
    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    start: int
    """Nanoseconds since the Unix epoch."""
    end: int
    parent: RecordedSpan | None = None
    """`None` if it is the first of its trace, or its parent was not recorded here."""
    children: list[RecordedSpan] = field(default_factory=list)
    """In the order in which they began."""
    links: dict[str, RecordedSpan] = field(default_factory=dict)
    """Linked spans that were recorded here, by relation: `producer`, `run`, `previous_attempt`, `member 1`, …"""

    @property
    def outcome(self) -> str:
        """How a delivery ended; empty for other spans."""
        return str(self.attributes.get(conventions.OUTCOME, ""))

    @property
    def attempt(self) -> int:
        """The attempt, or that of the last run of a delivery; 0 if there was none."""
        return int(self.attributes.get(conventions.ATTEMPT, 0))

    @property
    def error_type(self) -> str:
        """Class of the error, or reason; empty if it has not failed."""
        return str(self.attributes.get(conventions.ERROR_TYPE, ""))

    def child(self, name: str) -> RecordedSpan:
        """Return the only child with a name.

        Raises:
            AssertionError: There is none, or more than one.
        """
        return _only([each for each in self.children if each.name == name], name, self.children)

    def __str__(self) -> str:
        names = (conventions.VERDICT, conventions.PREVIOUS, conventions.ANSWER)
        answers = (str(self.attributes.get(name, "")) for name in names)
        facts = [self.outcome, *answers, f"attempt {self.attempt}" if self.attempt else "", self.error_type]
        facts += [f"{relation} → {other.name}" for relation, other in self.links.items() if relation != PRODUCER]
        described = ", ".join(filter(None, facts))
        return f"{self.name} ({described})" if described else self.name

    __repr__ = __str__


class RecordedSpans(Sequence[RecordedSpan]):
    """Spans that have ended, in the order in which they began."""

    def __init__(self, spans: Iterable[ReadableSpan]) -> None:
        """Connect spans of the OpenTelemetry SDK, in the order in which they began, with their parents and links."""
        ended = list(spans)
        by_id = {span.context.span_id: _span_of(span) for span in ended if span.context is not None}
        self._spans = list(by_id.values())
        for span, made in zip(ended, self._spans, strict=True):
            if span.parent is not None and (parent := by_id.get(span.parent.span_id)) is not None:
                made.parent = parent
                parent.children.append(made)
            members = 0
            for link in span.links:
                relation = str((link.attributes or {}).get(conventions.RELATION, PRODUCER))
                if relation == "member":
                    members += 1
                    relation = f"member {members}"
                if (other := by_id.get(link.context.span_id)) is not None:
                    made.links[relation] = other

    def named(self, name: str) -> list[RecordedSpan]:
        """Return all spans with a name, in the order in which they began."""
        return [span for span in self._spans if span.name == name]

    def one(self, name: str) -> RecordedSpan:
        """Return the only span with a name.

        Raises:
            AssertionError: There is none, or more than one.
        """
        return _only(self.named(name), name, self._spans)

    def __repr__(self) -> str:
        return self.tree()

    def tree(self) -> str:
        """Return all traces as indented text, one line for each span."""
        return "\n".join(line for span in self._spans if span.parent is None for line in _lines(span, 0))

    @overload
    def __getitem__(self, index: int) -> RecordedSpan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RecordedSpan]: ...
    def __getitem__(self, index: int | slice) -> RecordedSpan | Sequence[RecordedSpan]:
        return self._spans[index]

    def __len__(self) -> int:
        return len(self._spans)


class SpanRecorder:
    """Records all spans of the services of a harness."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._order = _StartOrder()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(self._order)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def observer(self, service: str, *, group: str | None = None, span_keys: bool = False) -> Observer:
        """Return an observer whose spans are recorded."""
        return OpenTelemetryObserver(service, tracer_provider=self.provider, group=group, span_keys=span_keys)

    def spans(self) -> RecordedSpans:
        """Return the spans that have ended so far."""
        return RecordedSpans(sorted(self._exporter.get_finished_spans(), key=self._order.of))


class _StartOrder(SpanProcessor):
    """Counts spans as they begin, since the clock of their start times can be set back."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self._numbers[span.get_span_context().span_id] = len(self._numbers)

    def of(self, span: ReadableSpan) -> int:
        """Return the number of a span of this recorder."""
        context = span.get_span_context()
        assert context is not None
        return self._numbers[context.span_id]


def _span_of(span: ReadableSpan) -> RecordedSpan:
    context = span.get_span_context()
    assert context is not None
    return RecordedSpan(
        span.name,
        span.kind.name.lower(),
        dict(span.attributes or {}),
        span.status.status_code is StatusCode.ERROR,
        format_trace_id(context.trace_id),
        format_span_id(context.span_id),
        span.start_time or 0,
        span.end_time or 0,
    )


def _only(found: Sequence[RecordedSpan], name: str, among: Sequence[RecordedSpan]) -> RecordedSpan:
    if len(found) != 1:
        names = ", ".join(sorted({each.name for each in among})) or "none"
        raise AssertionError(f"{len(found)} spans are named {name!r}, expected 1; recorded: {names}")
    return found[0]


def _lines(span: RecordedSpan, depth: int) -> Iterator[str]:
    yield "    " * depth + str(span)
    for child in span.children:
        yield from _lines(child, depth + 1)
