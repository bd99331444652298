"""Spans of deliveries whose traces are recorded, when they do not end as usual."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from prometheus_client import CollectorRegistry

from integr8s_idem.errors import PermanentError, PublishError
from integr8s_idem.failures import discard
from integr8s_idem.handlers.dispatcher import EventDispatcher, EventRouter, IdempotentEventDispatcher
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.telemetry import SILENT, Observer, Phase, ReceivedMessage, Signal, SilentObserver
from integr8s_idem.telemetry import Span as Phased
from integr8s_idem.telemetry.composite import combined
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from integr8s_idem.testing.span_recorder import SpanRecorder
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.assignments import Assignment, Delivery
from tests.support.counting import BusyStore
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import FakePublisher, running
from tests.support.guarded import Guarded, guarded
from tests.support.pipelines import TOPIC, Depot, ParcelSent, all_committed, dispatcher_of, sent, unfinished

PROCESS = f"process {TOPIC.topic}"


class UnreachablePublisher(FakePublisher):
    """A publisher whose broker does not answer."""

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> None:
        raise PublishError(topic, "switched off by the test")


@virtual_time
async def test_deliveries_that_were_reserved_before_their_turn_are_released_with_their_partition() -> None:
    recorder, depot, broker = SpanRecorder(), Depot(), sent(6)
    here = guarded(observer=recorder.observer("billing"))
    depot.held[3] = asyncio.Event()

    async with running(dispatcher_of(depot.handle, here), broker, drain_timeout_seconds=1) as worker:
        await worker.until(lambda: 3 in depot.started)
        await worker.consumer.take([TOPIC])
        depot.held[3].set()

    outcomes = [span.outcome for span in recorder.spans().named(PROCESS)]
    assert sorted(outcomes) == ["executed"] * 4 + ["released"] * (len(outcomes) - 4)
    assert len(outcomes) > 4, "none was reserved before its turn"


class Unended(SpanProcessor):
    """Counts spans that have started and have not ended."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self.names.append(span.name)

    def on_end(self, span: ReadableSpan) -> None:
        self.names.remove(span.name)


@virtual_time
async def test_deliveries_that_were_decoded_while_outcomes_were_recorded_are_released_with_their_partition() -> None:
    recorder, depot, broker, unended = SpanRecorder(), Depot(), sent(200), Unended()
    recorder.provider.add_span_processor(unended)
    here = guarded(BusyStore(), observer=recorder.observer("billing"))
    depot.held[50] = asyncio.Event()

    async with running(dispatcher_of(depot.handle, here), broker, drain_timeout_seconds=1) as worker:
        await worker.until(lambda: 50 in depot.started)
        assert unfinished(worker.worker)["decoded"]
        await worker.consumer.take([TOPIC])
        depot.held[50].set()
        await worker.until(lambda: unfinished(worker.worker) == {})

    assert unended.names == []
    outcomes = [span.outcome for span in recorder.spans().named(PROCESS)]
    assert sorted(outcomes) == ["executed"] * 51 + ["released"] * (len(outcomes) - 51)


@virtual_time
async def test_a_delivery_whose_handler_is_cancelled_at_the_end_of_its_partition_has_its_attempt() -> None:
    recorder, depot, broker = SpanRecorder(), Depot(), sent(1)
    here = guarded(observer=recorder.observer("billing"))
    depot.held[0] = asyncio.Event()

    async with running(dispatcher_of(depot.handle, here), broker, drain_timeout_seconds=1) as worker:
        await worker.until(lambda: 0 in depot.started)
        await worker.consumer.take([TOPIC])

    delivery = recorder.spans().one(PROCESS)
    assert (delivery.outcome, delivery.attempt) == ("released", 1)


@pytest.mark.parametrize("is_recorded", [True, False])
@virtual_time
async def test_of_requests_that_are_repeated_while_the_store_does_not_answer_only_the_first_is_observed(
    is_recorded: bool,
) -> None:
    recorder, registry, broker = SpanRecorder(), CollectorRegistry(), sent(1)
    metrics = PrometheusObserver("billing", registry)
    here = guarded(observer=combined(recorder.observer("billing"), metrics) if is_recorded else metrics)
    here.store.fail_next("reserve", times=50)

    async with running(dispatcher_of(Depot().handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert here.store.calls["reserve"] == 51
    labels = {"service": "billing", "phase": "reserve", "event_type": "parcel_sent"}
    assert registry.get_sample_value("idempotency_phase_seconds_count", labels) == 2
    if is_recorded:
        failed, reserved = recorder.spans().named("idempotency.reserve")
        assert (failed.error_type, reserved.error_type) == ("integr8s_idem.errors.StoreUnavailableError", "")


def two_handlers(guarded_by: Guarded | None, recorder: SpanRecorder) -> EventDispatcher:
    """Return a dispatcher with two handlers of one event, of which `ship` fails once."""
    router, errors = EventRouter(), [OSError("not yet")]

    @router.on(ParcelSent, name="ship")
    async def ship(event: ParcelSent) -> None:
        if errors:
            raise errors.pop()

    @router.on(ParcelSent, name="announce")
    async def announce(event: ParcelSent) -> None:
        pass

    if guarded_by is not None:
        return IdempotentEventDispatcher(router, guarded_by.manager)
    return EventDispatcher(router, observer=recorder.observer("billing"))


@pytest.mark.parametrize("is_guarded", [True, False])
@virtual_time
async def test_the_phases_of_two_handlers_of_one_event_name_their_handler(is_guarded: bool) -> None:
    recorder, broker = SpanRecorder(), sent(1)
    here = guarded(observer=recorder.observer("billing")) if is_guarded else None
    dispatcher = two_handlers(here, recorder)
    broker.publish(ParcelSent(number=0, event_id="parcel-0"))

    async with running(dispatcher, broker) as worker:
        await worker.until(lambda: all_committed(worker))

    phases: dict[str, list[str]] = {}
    deliveries = recorder.spans().named(PROCESS)
    for span in (child for delivery in deliveries for child in delivery.children):
        phases.setdefault(str(span.attributes["idempotency.handler"]), []).append(
            span.name.removeprefix("idempotency.")
        )
    run, replay = ["reserve", "handle", "complete"], ["reserve", "replay"]
    if is_guarded:
        assert phases == {"ship": ["reserve", "handle", "release", *run, *replay], "announce": run + replay}
    else:
        assert phases == {"ship": ["handle"] * 3, "announce": ["handle"] * 2}
    assert not any("idempotency.handler" in delivery.attributes for delivery in deliveries)


@virtual_time
async def test_a_delivery_to_one_handler_and_its_dead_letter_name_it() -> None:
    recorder, depot, broker = SpanRecorder(), Depot(errors={0: [PermanentError("no such address")]}), sent(1)
    here = guarded(observer=recorder.observer("billing"))

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    spans = recorder.spans()
    assert spans.one(PROCESS).attributes["idempotency.handler"] == "handle"
    assert spans.one("idempotency.fail").attributes["idempotency.handler"] == "handle"


@virtual_time
async def test_each_phase_of_a_discarded_delivery_names_its_handler() -> None:
    recorder, depot, broker = SpanRecorder(), Depot(errors={0: [KeyError("address")]}), sent(1)
    router = EventRouter(failures=[discard(KeyError)])
    router.on(ParcelSent, name="handle")(depot.handle)
    here = guarded(observer=recorder.observer("billing"))

    async with running(IdempotentEventDispatcher(router, here.manager), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    phases = [recorder.spans().one(f"idempotency.{name}") for name in ("reserve", "handle", "complete")]
    assert [span.attributes.get("idempotency.handler") for span in phases] == ["handle"] * 3


@virtual_time
async def test_the_handle_spans_of_an_unguarded_handler_have_their_attempt() -> None:
    recorder, broker = SpanRecorder(), sent(1)

    async with running(two_handlers(None, recorder), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    handled = recorder.spans().named("idempotency.handle")
    attempts = [(span.attributes["idempotency.handler"], span.attempt) for span in handled]
    assert sorted(attempts) == [("announce", 1), ("ship", 1), ("ship", 2)]


@virtual_time
async def test_an_undecodable_delivery_is_released_if_its_dead_letter_is_not_written_in_time() -> None:
    recorder, broker = SpanRecorder(), FakeBroker()
    here = guarded(observer=recorder.observer("billing"))
    broker.put(TOPIC.topic, b"not an event")
    dispatcher = dispatcher_of(Depot().handle, here)

    async with running(dispatcher, broker, UnreachablePublisher(broker), drain_timeout_seconds=1) as worker:
        await worker.until(lambda: len(recorder.spans()) > 0)
        await worker.consumer.take([TOPIC])

    assert recorder.spans().one(PROCESS).outcome == "released"


@virtual_time
async def test_an_undecodable_delivery_is_counted_and_has_the_id_in_its_headers() -> None:
    recorder, broker = SpanRecorder(), FakeBroker()
    here = guarded(observer=recorder.observer("billing"))
    headers: Any = [("event_id", b"parcel-7")], [("event_id", None)], []
    for each in headers:
        broker.put(TOPIC.topic, b"not an event", headers=each)

    async with running(dispatcher_of(Depot().handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    spans = recorder.spans().named(PROCESS)
    assert [span.attributes.get("messaging.message.id") for span in spans] == ["parcel-7", None, None]
    assert here.observer.counts[Signal.DELIVERED] == here.observer.counts[Signal.UNDECODABLE] == 3


@virtual_time
async def test_a_late_answer_of_the_store_is_observed_below_the_delivery_that_has_ended() -> None:
    recorder, (record,) = SpanRecorder(), sent(1).values(TOPIC.topic)
    observer = recorder.observer("billing")
    here = guarded(observer=observer)
    delivery = Delivery(record, Assignment(TOPIC))
    (execution,) = dispatcher_of(Depot().handle, here).executions(ParcelSent(event_id="parcel-0"))
    assert isinstance(execution, GuardedExecution)

    delivery.begin(copy_context(), observer.processing(record, "parcel_sent", "parcel-0"))
    delivery.begin_items([execution])
    delivery.end()
    await here.manager.executor.reserve_together([execution.work])

    assert [span.name for span in recorder.spans().one(PROCESS).children] == ["idempotency.reserve"]


@virtual_time
async def test_a_duplicate_that_the_local_memory_knows_is_linked_to_the_run() -> None:
    recorder, broker = SpanRecorder(), sent(1)
    here = guarded(observer=recorder.observer("billing"), local_memory_keys=10)

    async with running(dispatcher_of(Depot().handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        broker.publish(ParcelSent(event_id="parcel-0"))
        await worker.until(lambda: all_committed(worker))

    run, duplicate = recorder.spans().named(PROCESS)
    assert (run.outcome, duplicate.outcome, duplicate.children) == ("executed", "duplicate", [])
    assert duplicate.links == {"run": run}


@virtual_time
async def test_the_local_memory_of_runs_that_are_not_recorded_has_no_link() -> None:
    recorder, broker, observer = SpanRecorder(), sent(1), LateObserver()
    here = guarded(observer=observer, local_memory_keys=10)

    async with running(dispatcher_of(Depot().handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        observer.spans = recorder.observer("billing")
        broker.publish(ParcelSent(event_id="parcel-0"))
        await worker.until(lambda: all_committed(worker))

    duplicate = recorder.spans().one(PROCESS)
    assert (duplicate.outcome, duplicate.links) == ("duplicate", {})


class LateObserver(SilentObserver):
    """An observer that records deliveries once `spans` is set."""

    def __init__(self) -> None:
        self.spans: Observer = SILENT

    def processing(self, message: ReceivedMessage, event_type: str, event_id: str) -> AbstractContextManager[Phased]:
        return self.spans.processing(message, event_type, event_id)


class BrokenProcessor(SpanProcessor):
    """Fails when a span with a name starts, or when it ends."""

    def __init__(self, name: str, *, at_start: bool) -> None:
        self._name = name
        self._at_start = at_start
        self.failures = 0

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self._note(span, at_start=True)

    def on_end(self, span: ReadableSpan) -> None:
        self._note(span, at_start=False)

    def _note(self, span: ReadableSpan, *, at_start: bool) -> None:
        if span.name == self._name and at_start is self._at_start:
            self.failures += 1
            raise ValueError("the span processor is broken")


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        PROCESS,
        f"send {TOPIC.topic}.dlq",
        *(each.value for each in (Phase.RESERVE, Phase.HANDLE, Phase.COMPLETE, Phase.RELEASE, Phase.REPLAY)),
    ],
)
@virtual_time
async def test_a_broken_span_processor_changes_no_outcome(name: str, at_start: bool) -> None:
    recorder, broken, broker = SpanRecorder(), BrokenProcessor(name, at_start=at_start), sent(4)
    recorder.provider.add_span_processor(broken)
    here = guarded(observer=recorder.observer("billing"))
    depot = Depot(errors={2: [OSError("not yet")]})
    broker.put(TOPIC.topic, b"not an event")
    broker.publish(ParcelSent(number=1, event_id="parcel-1"))

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert broken.failures
    assert depot.done == [0, 1, 2, 3]
    assert depot.started == [0, 1, 2, 2, 3]
    assert len(broker.values(f"{TOPIC.topic}.dlq")) == 1
