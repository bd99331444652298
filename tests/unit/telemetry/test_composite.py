"""Combined observers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Context, copy_context

import pytest

from integr8s_idem.records import Database, TraceLink
from integr8s_idem.telemetry import (
    SILENT,
    Gauge,
    Headers,
    Observation,
    Observed,
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
from integr8s_idem.telemetry.composite import CompositeObserver, combined
from tests.support.received import received

TRACE = TraceLink(b"\1" * 16, b"\2" * 8)


class Recorder:
    """Records all calls, as an observer and as a span."""

    def __init__(self, name: str, story: list[str], trace: TraceLink | None = None) -> None:
        self.name = name
        self.story = story
        self._trace = trace

    def _record(self, what: object) -> None:
        self.story.append(f"{self.name} {what}")

    @contextmanager
    def _span(self, what: str) -> Iterator[Span]:
        self._record(f"opens {what}")
        try:
            yield self
        except BaseException as error:
            self._record(f"sees {type(error).__name__}")
            raise
        finally:
            self._record(f"closes {what}")

    def processing(self, message: ReceivedMessage, event_type: str, event_id: str) -> AbstractContextManager[Span]:
        return self._span(f"{event_type} {event_id} {message.topic} {len(message.headers)}")

    def phase(
        self, phase: Phase, event_type: str = "", *, attempt: int = 0, handler: str = "", past: Past | None = None
    ) -> AbstractContextManager[Span]:
        return self._span(phase.name)

    def shared(self, phase: Phase, event_types: Sequence[str], *, since: float) -> None:
        self._record(f"{phase.name} of {len(event_types)} since {since}")

    def batch(self, event_type: str, members: Sequence[Context], handler: str) -> AbstractContextManager[Span]:
        return self._span(f"batch of {len(members)}")

    def sending(
        self, topic: str, event_id: str = "", headers: Headers | None = None, *, in_current: bool = False
    ) -> AbstractContextManager[Span]:
        return self._span(f"sending {topic} {event_id} {headers} {in_current}")

    def count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        self._record(f"{signal.name} {event_type} {amount} {reason}")

    def measure(self, gauge: Gauge, value: float, part: str = "") -> None:
        self._record(f"{gauge.name} {value} {part}")

    def observed(self, event_type: str, observation: Observation) -> None:
        self._record(f"{event_type} {observation.result.value}")

    def offsets_committed(self, *, since: float, topic: str = "", error: BaseException | None = None) -> None:
        self._record(f"commit of {topic} since {since} {error!r}")

    def store_timer(self, database: Callable[[], Database]) -> StoreTimer | None:
        def timer(operation: str, since: float, error: BaseException | None = None) -> None:
            self._record(f"{operation} of {database().system} since {since} {error!r}")

        return timer

    def inject(self, headers: list[tuple[str, bytes]]) -> None:
        headers.append((self.name, b""))

    def link(self, trace: TraceLink, relation: Relation = Relation.RUN) -> None:
        self._record(f"links {relation.value}")

    def fail(self, error: BaseException | str) -> None:
        self._record(f"fails {error}")

    def annotate(self, name: str, value: str | int) -> None:
        self._record(f"{name}={value}")

    def trace(self) -> TraceLink | None:
        return self._trace


class BrokenObserver(Recorder):
    def phase(
        self, phase: Phase, event_type: str = "", *, attempt: int = 0, handler: str = "", past: Past | None = None
    ) -> AbstractContextManager[Span]:
        return _Broken()


class _Broken:
    def __enter__(self) -> Span:
        raise RuntimeError("broken")

    def __exit__(self, *error: object) -> None:
        raise AssertionError("closed, and was never open")


def test_one_observer_needs_no_wrapper() -> None:
    alone = Recorder("a", [])

    assert combined(alone) is alone
    assert combined(SILENT, alone) is alone
    assert combined() is SILENT


def test_every_observer_is_called() -> None:
    story: list[str] = []
    both: Observer = combined(Recorder("a", story), Recorder("b", story))
    headers: list[tuple[str, bytes]] = []

    both.count(Signal.DEAD_LETTER, "order", 2, reason="no_key")
    both.measure(Gauge.CONSUMER_LAG, 1.5, "orders")
    both.inject(headers)

    assert story == [
        *("a DEAD_LETTER order 2 no_key", "b DEAD_LETTER order 2 no_key"),
        *("a CONSUMER_LAG 1.5 orders", "b CONSUMER_LAG 1.5 orders"),
    ]
    assert headers == [("a", b""), ("b", b"")]


def test_phases_are_nested_and_receive_the_exception() -> None:
    story: list[str] = []
    both = combined(Recorder("a", story), Recorder("b", story))

    with pytest.raises(ZeroDivisionError), both.phase(Phase.HANDLE):
        raise ZeroDivisionError

    assert story == [
        *("a opens HANDLE", "b opens HANDLE"),
        *("b sees ZeroDivisionError", "b closes HANDLE"),
        *("a sees ZeroDivisionError", "a closes HANDLE"),
    ]


def test_a_span_of_three_observers_reaches_all_of_them() -> None:
    story: list[str] = []
    three = combined(Recorder("a", story), Recorder("b", story, TRACE), Recorder("c", story))

    with three.processing(received([("x", b"")]), "order", "event-1") as span:
        span.link(TRACE, Relation.PREVIOUS_ATTEMPT)
        span.annotate("n", 1)
        span.fail("reason")
        trace = span.trace()

    assert trace == TRACE
    assert story[:3] == [f"{name} opens order event-1 orders 1" for name in "abc"]
    assert story[3:12] == [
        f"{name} {what}" for what in ("links previous_attempt", "n=1", "fails reason") for name in "abc"
    ]


def test_silent_observers_create_no_objects() -> None:
    silent = CompositeObserver(SILENT, SILENT)

    assert silent.phase(Phase.HANDLE) is SILENT.phase(Phase.HANDLE)


def test_a_silent_observer_is_not_called_when_a_phase_ends() -> None:
    talkative = Recorder("a", [])
    both = CompositeObserver(SILENT, talkative)

    with both.phase(Phase.HANDLE) as span:
        assert span is talkative


def test_the_first_phase_is_closed_if_the_second_fails_to_open() -> None:
    story: list[str] = []
    both = combined(Recorder("a", story), BrokenObserver("b", story))

    with pytest.raises(RuntimeError, match="broken"), both.phase(Phase.HANDLE):
        pass

    assert story == ["a opens HANDLE", "a sees RuntimeError", "a closes HANDLE"]


def test_a_shared_phase_is_one_phase_for_every_observer() -> None:
    story: list[str] = []

    combined(Recorder("a", story), Recorder("b", story)).shared(Phase.RESERVE, ["order", "parcel"], since=1.5)

    assert story == ["a RESERVE of 2 since 1.5", "b RESERVE of 2 since 1.5"]


def test_batches_and_sent_messages_are_phases_for_every_observer() -> None:
    story: list[str] = []
    both = combined(Recorder("a", story), Recorder("b", story))

    with both.batch("order", [copy_context()] * 3, "index"), both.sending("orders", "event-1", [], in_current=True):
        pass

    assert story[:2] == ["a opens batch of 3", "b opens batch of 3"]
    assert story[2:4] == ["a opens sending orders event-1 [] True", "b opens sending orders event-1 [] True"]


class RecordedPhase(_Broken):
    recorded = True


def test_a_phase_is_recorded_if_one_of_its_observers_records_it() -> None:
    class Recording(SilentObserver):
        def processing(self, message: ReceivedMessage, event_type: str, event_id: str) -> AbstractContextManager[Span]:
            return RecordedPhase()

    quiet = Recorder("a", [])

    assert is_recorded(combined(quiet, Recording()).processing(received(), "order", "event-1"))
    assert is_recorded(combined(Recording(), quiet).processing(received(), "order", "event-1"))
    assert not is_recorded(combined(quiet, quiet).processing(received(), "order", "event-1"))
    assert not is_recorded(SILENT.processing(received(), "order", "event-1"))


class Tracing(SilentObserver):
    """An observer without `count`."""


def test_only_observers_that_override_count_are_called() -> None:
    talkative = Recorder("a", [])
    both = combined(Tracing(), talkative)

    both.count(Signal.DEAD_LETTER, "order", 2, reason="no_key")

    assert talkative.story == ["a DEAD_LETTER order 2 no_key"]
    assert both.count == talkative.count


def test_observers_may_all_lack_count() -> None:
    combined(Tracing(), Tracing()).count(Signal.RETRY, "order")


def test_calls_to_a_store_are_timed_by_all_observers_that_measure_them() -> None:
    story: list[str] = []

    timer = combined(SilentObserver(), Recorder("a", story), Recorder("b", story)).store_timer(
        lambda: Database("redis")
    )

    assert timer is not None
    timer("reserve", 1.0)
    timer("reserve", 2.0, KeyError("k"))
    assert story == [
        "a reserve of redis since 1.0 None",
        "b reserve of redis since 1.0 None",
        "a reserve of redis since 2.0 KeyError('k')",
        "b reserve of redis since 2.0 KeyError('k')",
    ]


def test_without_an_observer_that_measures_calls_there_is_no_timer() -> None:
    assert combined(SilentObserver(), SilentObserver()).store_timer(lambda: Database("redis")) is None


def test_commits_are_observed_by_all_observers() -> None:
    story: list[str] = []

    both = combined(Recorder("a", story), Recorder("b", story))
    both.offsets_committed(since=1.0, topic="orders", error=KeyError("k"))

    assert story == ["a commit of orders since 1.0 KeyError('k')", "b commit of orders since 1.0 KeyError('k')"]


def test_each_observer_sees_the_deliveries_of_a_service_that_observes() -> None:
    story: list[str] = []

    combined(Recorder("a", story), Recorder("b", story)).observed("order_placed", Observation(Observed.FIRST))

    assert story == ["a order_placed first", "b order_placed first"]
