"""Deliveries that wait in a lane are reserved before their turn, and start one after another."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.telemetry import SILENT, Phase, ReceivedMessage, SilentObserver, Span
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.batch_limits import MOST_TOGETHER
from integr8s_idem.worker.kafka_protocols import Partition
from integr8s_idem.worker.lane import HORIZON, MOST_AHEAD
from integr8s_idem.worker.lanes import Ordering
from integr8s_idem.worker.look_ahead import LONGEST_HOLD
from tests.support.counting import BusyStore, CountingStore
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import FakePublisher, running
from tests.support.guarded import Guarded, guarded
from tests.support.pipelines import (
    Depot,
    ParcelSent,
    all_committed,
    dispatcher_of,
    leases_left,
    parcels,
    reserved_by_another,
    sent,
    unfinished,
)

FAST = HORIZON / 100
"""Seconds of a handler that is much faster than the horizon."""


async def statuses(here: Guarded) -> dict[int, IdempotencyStatus]:
    """Return the status of each parcel that has a record."""
    return {int(record.key.rpartition("parcel-")[2]): record.status async for record in here.store.scan("")}


@virtual_time
async def test_a_lane_reserves_many_deliveries_together_and_handles_them_in_order() -> None:
    store, depot, broker = CountingStore(), Depot(seconds=FAST), sent(200)
    here = guarded(store)

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert depot.done == list(range(200))
    assert depot.max_concurrency == 1
    assert store.batch_sizes[:6] == [1, 2, 4, 8, 16, MOST_AHEAD]
    assert sum(store.batch_sizes) == 200
    assert await leases_left(here) == []


@virtual_time
async def test_an_outcome_is_recorded_before_the_next_handler_of_the_lane_starts() -> None:
    here, broker, router, found = guarded(), sent(50), EventRouter(), list[bool]()

    @router.on(ParcelSent, name="handle")
    async def handle(event: ParcelSent) -> None:
        now = await statuses(here)
        found.append(all(now[number] is IdempotencyStatus.COMPLETED for number in range(event.number)))

    async with running(IdempotentEventDispatcher(router, here.manager), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert found == [True] * 50


class DecodingObserver(SilentObserver):
    """Notes when deliveries are decoded, and how long each is processed."""

    def __init__(self, store: BusyStore) -> None:
        self.decoded: list[str] = []
        """Their event ids."""
        self.meanwhile: list[str] = []
        """Those of them that were decoded while the store recorded outcomes."""
        self.seconds: list[float] = []
        self._store = store

    def processing(self, message: ReceivedMessage, event_type: str, event_id: str) -> AbstractContextManager[Span]:
        self.decoded.append(event_id)
        if self._store.is_recording:
            self.meanwhile.append(event_id)
        return self._measured()

    @contextmanager
    def _measured(self) -> Iterator[Span]:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        with SILENT.phase(Phase.HANDLE) as span:
            yield span
        self.seconds.append(loop.time() - began_at)


@virtual_time
@pytest.mark.parametrize("ordering", ["partition", "key"])
async def test_waiting_deliveries_are_decoded_while_the_store_records_outcomes(ordering: Ordering) -> None:
    store, depot, broker = BusyStore(), Depot(), sent(300, keys=3, partitions=3)
    observer = DecodingObserver(store)

    here = guarded(store, observer=observer)
    async with running(dispatcher_of(depot.handle, here), broker, ordering=ordering) as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert len(observer.decoded) == len(set(observer.decoded)) == 300
    for lane in range(3):
        assert [number for number in depot.done if number % 3 == lane] == list(range(lane, 300, 3))
    assert len(observer.meanwhile) > 150


@virtual_time
async def test_the_processing_of_a_delivery_that_was_decoded_early_begins_at_its_turn() -> None:
    store, depot, broker = BusyStore(), Depot(seconds=2 * HORIZON), sent(6)
    observer = DecodingObserver(store)

    async with running(dispatcher_of(depot.handle, guarded(store, observer=observer)), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert len(observer.seconds) == 6
    assert max(observer.seconds) < 3 * HORIZON


@virtual_time
async def test_fewer_deliveries_are_decoded_before_their_turn_when_handlers_become_slow() -> None:
    store, broker, ahead = BusyStore(), sent(200), list[int]()
    observer = DecodingObserver(store)

    async def handle(event: ParcelSent) -> None:
        ahead.append(len(observer.decoded) - (event.number + 1))
        await asyncio.sleep(FAST if event.number < 100 else 2 * HORIZON)

    async with running(dispatcher_of(handle, guarded(store, observer=observer)), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert max(ahead) >= MOST_AHEAD - 1
    assert max(ahead[100 + 2 * MOST_AHEAD :]) <= 1


@virtual_time
async def test_decoded_deliveries_of_a_revoked_partition_are_forgotten() -> None:
    store, broker = BusyStore(), sent(200)
    depot = Depot(held={50: asyncio.Event()})

    async with running(dispatcher_of(depot.handle, guarded(store)), broker, drain_timeout_seconds=20) as worker:
        await worker.until(lambda: 50 in depot.started)
        assert unfinished(worker.worker)["decoded"]
        for assignment in worker.worker._partitions.assignments.values():
            assignment.close()
        depot.held[50].set()
        await worker.until(lambda: unfinished(worker.worker) == {})

    assert depot.done == list(range(51))


DECODED: ContextVar[int | None] = ContextVar("decoded", default=None)


class TracedParcel(ParcelSent):
    def model_post_init(self, context: Any, /) -> None:
        DECODED.set(self.number)


@virtual_time
async def test_context_variables_that_are_set_while_an_event_is_decoded_are_not_visible_to_handlers() -> None:
    seen, router, here, broker = set[int | None](), EventRouter(), guarded(BusyStore()), sent(200)

    async def handle(event: TracedParcel) -> None:
        seen.add(DECODED.get())

    router.on(TracedParcel, name="handle")(handle)
    async with running(IdempotentEventDispatcher(router, here.manager), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert seen == {None}


@virtual_time
async def test_slow_handlers_are_reserved_at_their_turn() -> None:
    store, depot, broker = CountingStore(), Depot(seconds=2 * HORIZON), sent(12)

    async with running(dispatcher_of(depot.handle, guarded(store)), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert store.batch_sizes == [1] * 12


@virtual_time
async def test_the_batches_of_a_lane_shrink_when_its_handlers_become_slow() -> None:
    store, broker, router = CountingStore(), sent(120), EventRouter()

    @router.on(ParcelSent, name="handle")
    async def handle(event: ParcelSent) -> None:
        await asyncio.sleep(FAST if event.number < 63 else HORIZON)

    async with running(IdempotentEventDispatcher(router, guarded(store).manager), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    # The batch of 32 that follows the 63 fast deliveries is released after a while, and reserved one by one.
    assert store.batch_sizes[:7] == [1, 2, 4, 8, 16, 32, 32]
    assert set(store.batch_sizes[7:]) == {1}


@virtual_time
async def test_duplicates_in_a_lane_are_answered_in_order() -> None:
    store, depot, broker = CountingStore(), Depot(seconds=FAST), FakeBroker()
    here = guarded(store)
    broker.publish(*parcels(60))
    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
    before = len(store.batch_sizes)
    broker.publish(*parcels(60), *parcels(61)[60:], *parcels(60))

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        tally = worker.worker.report().tally

    assert depot.done == list(range(61))
    assert (tally.handled, tally.duplicates) == (1, 120)
    assert len(store.batch_sizes) - before < 20


@virtual_time
async def test_duplicates_that_wait_in_one_lane_run_once() -> None:
    here, depot, broker = guarded(), Depot(seconds=FAST), FakeBroker()
    broker.publish(*(parcel for parcel in parcels(20) for _ in range(5)))

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))
        tally = worker.worker.report().tally

    assert depot.done == list(range(20))
    assert (tally.handled, tally.duplicates) == (20, 80)


@virtual_time
async def test_lanes_with_the_same_keys_in_reverse_order_share_the_work() -> None:
    here, depot, broker = guarded(), Depot(seconds=FAST), FakeBroker()
    broker.publish(*parcels(40), partition=0)
    broker.publish(*reversed(parcels(40)), partition=1)

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker), seconds=60)
        tally = worker.worker.report().tally

    assert sorted(depot.done) == list(range(40))
    assert (tally.handled, tally.duplicates) == (40, 40)


@virtual_time
async def test_two_lanes_that_wait_for_each_others_keys_both_finish() -> None:
    here, broker, numbered = guarded(), FakeBroker(), parcels(30)
    depot = Depot(seconds=FAST, held={7: asyncio.Event(), 17: asyncio.Event()})
    elsewhere = await reserved_by_another(here, 20, timedelta(minutes=5))
    broker.logs |= {Partition("parcel_sent", number): [] for number in range(2)}

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        broker.publish(*numbered[:8], numbered[20], numbered[21], partition=0)
        await worker.until(lambda: 7 in depot.started)  # partition 0 holds 21, but not 20
        await here.store.release(elsewhere)
        broker.publish(*numbered[10:18], numbered[21], numbered[20], partition=1)
        await worker.until(lambda: 17 in depot.started)  # partition 1 holds 20, but not 21
        for each in depot.held.values():
            each.set()

        await worker.until(lambda: all_committed(worker), seconds=60)

    assert sorted(depot.done) == [*range(8), *range(10, 18), 20, 21]


@virtual_time
async def test_a_key_is_released_if_the_delivery_before_it_takes_long() -> None:
    store, broker = CountingStore(), sent(40)
    here, depot = guarded(store), Depot(seconds=FAST, held={20: asyncio.Event()})

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: 20 in depot.started)
        assert await here.store.count_active("") > 1
        await asyncio.sleep(2 * LONGEST_HOLD + 0.1)
        assert await here.store.count_active("") == 1  # the key of the running handler
        depot.held[20].set()
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert depot.done == list(range(40))


@virtual_time
async def test_a_reservation_that_was_released_before_its_turn_does_not_count_as_a_failed_attempt() -> None:
    here, broker = guarded(max_attempts=2), sent(40)
    errors: dict[int, list[Exception]] = {24: [OSError("once")], 25: [OSError("once"), OSError("twice")]}
    depot = Depot(seconds=FAST, held={20: asyncio.Event()}, errors=errors)

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: 20 in depot.started)
        await asyncio.sleep(2 * LONGEST_HOLD + 0.1)  # the keys of those that wait are released
        depot.held[20].set()
        await worker.until(lambda: all_committed(worker))
        assert worker.worker.report().tally.dead_letters == 1

    assert depot.done == [number for number in range(40) if number != 25]
    assert [depot.started.count(number) for number in (23, 24, 25)] == [1, 2, 2]


@virtual_time
async def test_a_retried_delivery_stays_ahead_of_those_that_are_reserved() -> None:
    depot = Depot(seconds=FAST, errors={number: [OSError("later")] * 2 for number in (0, 17, 18, 39)})
    here = guarded()

    async with running(dispatcher_of(depot.handle, here), sent(40)) as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert depot.done == list(range(40))
    assert await leases_left(here) == []


@virtual_time
async def test_an_undecodable_message_is_dead_lettered_at_its_turn() -> None:
    broker, depot = sent(20), Depot(seconds=FAST)
    broker.put("parcel_sent", b"not json")
    broker.publish(*parcels(30)[20:])
    done: list[int] = []

    class Publisher(FakePublisher):
        async def send(self, *message: Any) -> None:
            done.extend(depot.done)
            await super().send(*message)

    async with running(dispatcher_of(depot.handle, guarded()), broker, Publisher(broker)) as worker:
        await worker.until(lambda: all_committed(worker))

    assert done == list(range(20))
    assert depot.done == list(range(30))


@virtual_time
async def test_keys_of_a_revoked_partition_are_released_at_once() -> None:
    here, broker = guarded(), sent(40)
    depot = Depot(seconds=FAST, held={20: asyncio.Event()})

    async with running(dispatcher_of(depot.handle, here), broker, drain_timeout_seconds=20) as worker:
        await worker.until(lambda: 20 in depot.started)
        for assignment in worker.worker._partitions.assignments.values():
            assignment.close()
        worker.worker._pipeline.release_closed()
        await asyncio.sleep(LONGEST_HOLD / 10)

        assert await here.store.count_active("") == 1
        depot.held[20].set()

    assert await leases_left(here) == []


@virtual_time
async def test_after_a_crash_a_lane_reserves_one_delivery_at_a_time() -> None:
    store, depot, broker = CountingStore(), Depot(seconds=FAST), sent(100)
    here = guarded(store)
    for number in (*range(20), 40):
        await reserved_by_another(here, number, timedelta(seconds=1))
    await asyncio.sleep(1)
    store.batch_sizes.clear()

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    # 20 deliveries have lapsed, then 20 are new, and one of the next batch has lapsed.
    assert store.batch_sizes[:26] == [*[1] * 20, 1, 2, 4, 8, 16, 1]
    assert depot.done == list(range(100))


@pytest.mark.parametrize("config", [{"max_attempts": 1}])
@virtual_time
async def test_work_that_cannot_run_alone_is_reserved_at_its_turn(config: dict[str, Any]) -> None:
    store, depot, broker = CountingStore(), Depot(seconds=FAST), sent(40)

    async with running(dispatcher_of(depot.handle, guarded(store, **config)), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert set(store.batch_sizes) == {1}


@virtual_time
async def test_no_handler_of_a_lane_starts_while_the_store_is_down() -> None:
    store, broker = CountingStore(), sent(40)
    here, depot = guarded(store), Depot(seconds=FAST, held={20: asyncio.Event()})

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: 20 in depot.started)
        with store.outage():
            depot.held[20].set()
            await asyncio.sleep(5)
            assert depot.started == list(range(21))
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert depot.done == list(range(40))
    assert await leases_left(here) == []


@virtual_time
async def test_a_lost_answer_is_asked_for_again() -> None:
    store, depot, broker = CountingStore(), Depot(seconds=FAST), sent(100)
    here = guarded(store)
    attempts: set[int] = set()

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: len(depot.done) > 10)
        store.lose_answer("reserve", 2)
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}
    async for record in store.scan(""):
        attempts.add(record.attempt)

    assert depot.done == list(range(100))
    assert attempts == {1}


@virtual_time
async def test_all_handlers_of_a_delivery_start_at_its_turn() -> None:
    here, router, broker = guarded(), EventRouter(), sent(20)
    is_second_running = {number: asyncio.Event() for number in range(20)}

    @router.on(ParcelSent)
    async def first(event: ParcelSent) -> None:
        await asyncio.wait_for(is_second_running[event.number].wait(), 1)

    @router.on(ParcelSent)
    async def second(event: ParcelSent) -> None:
        is_second_running[event.number].set()

    async with running(IdempotentEventDispatcher(router, here.manager), broker) as worker:
        await worker.until(lambda: all_committed(worker), seconds=60)
        assert worker.worker.report().tally.retries == 0
        assert unfinished(worker.worker) == {}


@pytest.mark.parametrize("policy", ["wait", "skip"])
@virtual_time
async def test_a_later_duplicate_does_not_get_the_key_before_an_earlier_one(policy: str) -> None:
    here, router, broker = guarded(on_in_progress=policy), EventRouter(), FakeBroker()
    handled: dict[str, list[int]] = {"first": [], "second": []}
    broker.publish(*(parcel for parcel in parcels(40) for _ in range(3)))

    def add(name: str) -> None:
        @router.on(ParcelSent, name=name)
        async def handle(event: ParcelSent) -> None:
            await asyncio.sleep(FAST)
            handled[name].append(event.number)

    for name in handled:
        add(name)
    async with running(IdempotentEventDispatcher(router, here.manager), broker) as worker:
        await worker.until(lambda: len(handled["first"]) == len(handled["second"]) == 40, seconds=1)
        await worker.until(lambda: all_committed(worker))

    assert handled == {"first": list(range(40)), "second": list(range(40))}


@virtual_time
async def test_work_is_not_skipped_because_its_key_is_reserved_early() -> None:
    here, broker = guarded(on_in_progress="skip"), FakeBroker()
    depot = Depot(seconds=FAST, held={19: asyncio.Event()})
    broker.publish(*parcels(21), partition=0)
    broker.logs[Partition("parcel_sent", 1)] = []

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: 19 in depot.started)
        broker.publish(parcels(21)[20], partition=1)
        await worker.until(lambda: 20 in depot.done, seconds=1)
        depot.held[19].set()
        await worker.until(lambda: all_committed(worker))


@virtual_time
async def test_a_request_contains_at_most_250_items() -> None:
    store, router, broker = CountingStore(), EventRouter(), sent(24 * 60, partitions=24)

    @router.on(ParcelSent)
    async def first(event: ParcelSent) -> None: ...

    @router.on(ParcelSent)
    async def second(event: ParcelSent) -> None: ...

    dispatcher = IdempotentEventDispatcher(router, guarded(store).manager)
    async with running(dispatcher, broker, concurrency=500, max_in_flight=2_000) as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert max(store.batch_sizes) == MOST_TOGETHER
