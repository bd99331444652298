"""The pipeline: batches, concurrency, ordering, and how deliveries are settled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import pairwise

import pytest

from integr8s_idem._util.deadlines import GRACE_TURNS
from integr8s_idem._util.loop_fairness import LONGEST_TURN
from integr8s_idem.config import OnStoreError
from integr8s_idem.errors import PermanentError
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.records import Completion, IdempotencyStatus, Reserved
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import SILENT, Past, Phase, ReceivedMessage, Signal, SilentObserver, Span
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.counting import CountingStore
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import LEASE, guarded
from tests.support.pipelines import (
    TOPIC,
    Depot,
    ParcelSent,
    all_committed,
    completed_parcels,
    dispatcher_of,
    key_of,
    leases_left,
    parcels,
    reserved_by_another,
    sent,
    turns,
    unfinished,
)

EVERY_ORDERING = pytest.mark.parametrize("ordering", ["partition", "key", "none"])


class LoopTurns:
    """Counts iterations of the event loop within a `with` block."""

    def __init__(self) -> None:
        self.count = 0
        self._next: asyncio.Handle | None = None

    def __enter__(self) -> LoopTurns:
        self._turn()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._next is not None
        self._next.cancel()

    def _turn(self) -> None:
        self.count += 1
        self._next = asyncio.get_running_loop().call_soon(self._turn)


async def test_blocking_handlers_leave_the_event_loop_several_iterations_between_them() -> None:
    """Leases of waiting events are renewed in these iterations."""
    seen, router, broker = list[int](), EventRouter(), sent(30)
    here = guarded(FlakyStore(MemoryIdempotencyRepository()))

    with LoopTurns() as loop_turns:

        @router.on(ParcelSent)
        async def handle(event: ParcelSent) -> None:
            seen.append(loop_turns.count)
            time.sleep(2 * LONGEST_TURN)  # noqa: ASYNC251  # as a handler should not

        dispatcher = IdempotentEventDispatcher(router, here.manager)
        async with running(dispatcher, broker, ordering="none", concurrency=30) as worker:
            await worker.until(lambda: len(seen) == 30)

    assert min(later - earlier for earlier, later in pairwise(seen)) > GRACE_TURNS


async def test_work_that_keeps_the_event_loop_busy_does_not_block_a_worker() -> None:
    seen, router, broker = list[int](), EventRouter(), sent(10)
    here = guarded(FlakyStore(MemoryIdempotencyRepository()))

    @router.on(ParcelSent)
    async def handle(event: ParcelSent) -> None:
        seen.append(event.number)

    async def block() -> None:
        time.sleep(1.2 * LONGEST_TURN)  # noqa: ASYNC251  # as work should not

    async def keep_busy(name: int) -> None:
        for number in range(50):
            if len(seen) < 10:
                await here.manager.run(f"{name}-{number}", block)

    async with running(IdempotentEventDispatcher(router, here.manager), broker, ordering="none", concurrency=8):
        await asyncio.gather(*(keep_busy(name) for name in range(6)))

        assert len(seen) == 10


# Batches.


@virtual_time
async def test_events_are_reserved_in_batches_and_completed_in_batches() -> None:
    store, depot, broker = CountingStore(), Depot(), sent(600)
    here = guarded(store)

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none", concurrency=1_000) as worker:
        await worker.until(lambda: all_committed(worker))

        assert max(store.batch_sizes) == 250
        assert sum(store.batch_sizes) == 600
        assert store.calls["reserve"] <= 4
        assert store.calls["complete"] <= 6
        assert unfinished(worker.worker) == {}
    assert depot.done == list(range(600))
    assert await completed_parcels(here) == set(range(600))


@virtual_time
async def test_two_batches_are_reserved_concurrently_but_not_a_third() -> None:
    store, depot, broker = CountingStore(), Depot(), sent(1_000)
    store.held["reserve"] = asyncio.Event()
    dispatcher = dispatcher_of(depot.handle, guarded(store))
    async with running(dispatcher, broker, ordering="none", concurrency=1_000) as worker:
        await worker.until(lambda: worker.worker.report().in_flight == 1_000)
        await asyncio.sleep(1)

        assert store.batch_sizes == [250, 250]
        store.held["reserve"].set()
        await worker.until(lambda: all_committed(worker))


@virtual_time
async def test_duplicates_that_are_ready_together_are_handled_once() -> None:
    here, depot, broker = guarded(), Depot(seconds=0.2), FakeBroker()
    broker.publish(*(parcel for parcel in parcels(5) for _ in range(4)))

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))
        tally = worker.worker.report().tally

    assert sorted(depot.done) == list(range(5))
    assert (tally.handled, tally.duplicates) == (5, 15)


# Ordering and concurrency.


@EVERY_ORDERING
@pytest.mark.parametrize("seconds", [0.0, 0.1])
@virtual_time
async def test_a_lane_keeps_its_order_when_handlers_are_retried(ordering: str, seconds: float) -> None:
    depot = Depot(seconds=seconds, errors={number: [OSError("later")] for number in (0, 3, 4, 11)})
    broker = sent(24, keys=3, partitions=1)

    async with running(dispatcher_of(depot.handle, guarded()), broker, ordering=ordering) as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    lanes = {"partition": 1, "key": 3, "none": 24}[ordering]
    for lane in range(lanes):
        of_lane = [number for number in depot.done if number % lanes == lane]
        assert of_lane == sorted(of_lane)
    assert sorted(depot.done) == list(range(24))


@pytest.mark.parametrize(("ordering", "concurrent"), [("partition", 2), ("key", 6), ("none", 24)])
@virtual_time
async def test_lanes_run_concurrently(ordering: str, concurrent: int) -> None:
    depot, broker = Depot(seconds=0.1), sent(24, keys=6, partitions=2)

    async with running(dispatcher_of(depot.handle, guarded()), broker, ordering=ordering) as worker:
        await worker.until(lambda: all_committed(worker))

    assert depot.max_concurrency == concurrent


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("concurrency", [1, 3])
@virtual_time
async def test_retries_count_toward_the_concurrency_limit(concurrency: int, guard: bool) -> None:
    depot, broker = Depot(seconds=0.3, errors={each: [OSError("later")] * 2 for each in range(0, 30, 4)}), sent(30)
    dispatcher = dispatcher_of(depot.handle, guarded() if guard else None)

    async with running(dispatcher, broker, ordering="none", concurrency=concurrency) as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert depot.max_concurrency == concurrency
    assert sorted(depot.done) == list(range(30))


@virtual_time
async def test_a_waiting_handler_does_not_block_the_others() -> None:
    depot, broker = Depot(held={0: asyncio.Event(), 7: asyncio.Event()}), sent(30)

    async with running(dispatcher_of(depot.handle, guarded()), broker, ordering="none") as worker:
        await worker.until(lambda: len(depot.done) == 28)
        assert {task.done() for task in worker.worker._pipeline.tasks} == {False}
        assert broker.committed.get(TOPIC, 0) == 0
        for each in depot.held.values():
            each.set()
        await worker.until(lambda: all_committed(worker))


@virtual_time
async def test_handlers_that_never_await_do_not_starve_the_event_loop() -> None:
    depot, broker, progress = Depot(), sent(240), list[int]()

    async def watch() -> None:
        while len(depot.done) < 240:
            progress.append(len(depot.done))
            await asyncio.sleep(0)

    dispatcher = dispatcher_of(depot.handle, guarded())
    async with running(dispatcher, broker, ordering="none", concurrency=240) as worker:
        watching = asyncio.create_task(watch())
        await worker.until(lambda: all_committed(worker))
        await watching

    assert max(after - before for before, after in pairwise(progress)) <= 100


# Several handlers, batch handlers, and recorded deliveries.


@virtual_time
async def test_an_event_with_several_handlers_is_settled_when_each_has_succeeded() -> None:
    here, first, second, broker = guarded(), Depot(), Depot(errors={2: [OSError("later")]}), sent(6)
    router = EventRouter()
    router.on(ParcelSent, name="first")(first.handle)
    router.on(ParcelSent, name="second")(second.handle)

    async with running(IdempotentEventDispatcher(router, here.manager), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))

    assert sorted(first.done) == sorted(second.done) == list(range(6))
    assert await leases_left(here) == []


@virtual_time
async def test_a_batch_handler_gets_events_that_were_reserved_in_one_batch() -> None:
    here, broker, batches = guarded(), sent(20), list[int]()
    router = EventRouter()

    @router.on_batch(ParcelSent, max_size=10, max_wait=timedelta(seconds=1))
    async def handle(events: Sequence[ParcelSent]) -> None:
        batches.append(len(events))

    async with running(IdempotentEventDispatcher(router, here.manager), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert batches == [10, 10]


class Recorded(SilentObserver):
    """An observer that notes the phases of recorded deliveries."""

    def __init__(self, *, recorded: bool = True) -> None:
        self.seen: list[Phase] = []
        self.open = self.opened = 0
        self._recorded = recorded

    def processing(self, message: ReceivedMessage, event_type: str, event_id: str) -> AbstractContextManager[Span]:
        return RecordedSpan(self, self._recorded)

    def phase(
        self, phase: Phase, event_type: str = "", *, attempt: int = 0, handler: str = "", past: Past | None = None
    ) -> AbstractContextManager[Span]:
        assert self.open, "a phase outside of a delivery"
        self.seen.append(phase)
        return super().phase(phase, event_type, attempt=attempt, handler=handler, past=past)


class RecordedSpan(AbstractContextManager[Span]):
    def __init__(self, observer: Recorded, recorded: bool = True) -> None:
        self._observer = observer
        self.recorded = recorded

    def __enter__(self) -> Span:
        self._observer.open += 1
        self._observer.opened += 1
        return SILENT.phase(Phase.HANDLE).__enter__()

    def __exit__(self, *_: object) -> None:
        self._observer.open -= 1


@virtual_time
async def test_recorded_deliveries_have_all_their_phases_in_their_own_span() -> None:
    depot, broker, observer = Depot(), sent(5), Recorded()
    here = guarded(observer=observer)

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))

    assert observer.open == 0
    assert observer.seen.count(Phase.RESERVE) == observer.seen.count(Phase.COMPLETE) == 5


@pytest.mark.parametrize("recorded", [True, False])
@virtual_time
async def test_the_span_of_a_dead_lettered_delivery_ends_when_the_dead_letter_is_written(recorded: bool) -> None:
    broker, observer = sent(3), Recorded(recorded=recorded)
    broker.put(TOPIC.topic, b"not an event")
    here = guarded(observer=observer)
    depot = Depot(errors={1: [PermanentError("no such address")]})

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert (observer.open, observer.opened) == (0, 4)
    assert len(broker.values(f"{TOPIC.topic}.dlq")) == 2


@virtual_time
async def test_every_delivery_is_measured_once_including_duplicates() -> None:
    broker, observer = sent(5), Recorded(recorded=False)
    here = guarded(observer=observer, local_memory_keys=2)
    dispatcher = dispatcher_of(Depot().handle, here)
    async with running(dispatcher, broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))
        broker.publish(*parcels(5))
        await worker.until(lambda: all_committed(worker))
        assert worker.worker.report().tally.duplicates == 5

    assert (observer.open, observer.opened) == (0, 10)
    assert observer.seen.count(Phase.HANDLE) == 5
    assert observer.seen.count(Phase.REPLAY) == 3, "two were found in local memory"


# Failures of the store.


@pytest.mark.parametrize("verb", ["reserve", "complete"])
@virtual_time
async def test_an_outage_of_the_store_loses_no_event_and_costs_no_attempt(verb: str) -> None:
    here, depot, broker = guarded(), Depot(), sent(20)
    here.store.down.add(verb)

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none", concurrency=8) as worker:
        await worker.until(lambda: here.store.calls[verb] > 3)
        assert broker.committed == {}
        here.store.down.clear()
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}
        assert worker.worker.report().tally.retries == 0

    assert sorted(depot.done) == list(range(20))
    assert {record.attempt async for record in here.store.scan("")} == {1}
    assert await leases_left(here) == []


@pytest.mark.parametrize("verb", ["reserve", "complete"])
@virtual_time
async def test_a_lost_response_of_the_store_causes_no_second_run(verb: str) -> None:
    here, depot, broker = guarded(), Depot(), sent(20)
    here.store.lose_answers[verb] = 1

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))

    assert sorted(depot.done) == list(range(20))
    assert {record.attempt async for record in here.store.scan("")} == {1}


@virtual_time
async def test_an_outcome_is_recorded_even_if_its_reservation_has_vanished() -> None:
    here, broker, runs = guarded(), sent(10), list[int]()

    async def handle(event: ParcelSent) -> None:
        runs.append(event.number)
        await here.store.delete([key_of(here, event.number)] if event.number % 2 else [])

    async with running(dispatcher_of(handle, here), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert sorted(runs) == list(range(10))
    assert await completed_parcels(here) == set(range(10))
    assert here.observer.counts[Signal.RECORD_VANISHED] == 5


@virtual_time
async def test_an_event_whose_key_was_taken_over_waits_for_the_outcome_of_the_other_run() -> None:
    here, depot, broker = guarded(), Depot(), sent(1)
    elsewhere: list[Reserved] = []

    async def handle(event: ParcelSent) -> None:
        await depot.handle(event)
        await here.store.delete([key_of(here, 0)])
        elsewhere.extend(await reserved_by_another(here, 0, timedelta(hours=1)))

    async with running(dispatcher_of(handle, here), broker) as worker:
        await worker.until(lambda: bool(elsewhere))
        await asyncio.sleep(5)
        assert broker.committed == {}

        assert await here.store.complete([Completion(reservation=elsewhere[0], ttl=timedelta(hours=1))]) == [True]
        await worker.until(lambda: all_committed(worker))
        assert worker.worker.report().tally.leases_lost == 1

    assert depot.done == [0]


@virtual_time
async def test_with_on_store_error_open_handlers_run_without_the_store() -> None:
    here, depot, broker = guarded(on_store_error=OnStoreError.OPEN), Depot(), sent(12)
    here.store.down.update({"reserve", "complete", "release"})

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none", concurrency=4) as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert sorted(depot.done) == list(range(12))
    assert depot.max_concurrency <= 4
    assert here.observer.counts[Signal.UNGUARDED] == 12


@virtual_time
async def test_an_event_that_crashes_its_process_too_often_is_dead_lettered_and_others_are_handled() -> None:
    here, depot, broker = guarded(max_attempts=2), Depot(), sent(5)
    for _ in range(2):
        # The record of a process that died while its handler ran.
        await reserved_by_another(here, 2, timedelta(seconds=LEASE), alone=True)
        await asyncio.sleep(LEASE + 1)

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert sorted(depot.done) == [0, 1, 3, 4]
    (dead_letter,) = broker.values("parcel_sent.dlq")
    assert dict(dead_letter.headers)["idempotency-dlq-reason"] == b"handler_failed"
    (record,) = await here.store.get([key_of(here, 2)])
    assert record is not None
    assert record.status is IdempotencyStatus.FAILED


@virtual_time
async def test_a_stopping_worker_waits_for_outcomes_that_are_being_recorded() -> None:
    here, depot, broker = guarded(), Depot(), sent(4)
    here.store.held["complete"] = asyncio.Event()
    async with running(dispatcher_of(depot.handle, here), broker, ordering="none") as worker:
        await worker.until(lambda: here.store.calls["complete"] == 1)
        worker.worker.stop()
        await turns(10)
        assert broker.committed == {}
        here.store.held["complete"].set()

    assert broker.committed == {TOPIC: 4}
    assert await leases_left(here) == []
