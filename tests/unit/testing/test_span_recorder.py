"""Spans of a harness, in their order."""

from __future__ import annotations

from itertools import count

import pytest

from integr8s_idem.testing.span_recorder import SpanRecorder


def test_spans_are_in_the_order_in_which_they_began_although_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier_and_earlier = count(1_000_000, -1)
    monkeypatch.setattr("opentelemetry.sdk.trace.time_ns", lambda: next(earlier_and_earlier))
    recorder = SpanRecorder()
    tracer = recorder.provider.get_tracer("tests")

    with tracer.start_as_current_span("process"):
        for name in ("reserve", "handle", "complete"):
            tracer.start_span(name).end()

    spans = recorder.spans()
    assert [span.name for span in spans] == ["process", "reserve", "handle", "complete"]
    assert [child.name for child in spans.one("process").children] == ["reserve", "handle", "complete"]
