"""Items of fast handlers wait for slots while their keys are reserved; those of slow ones are reserved with a slot."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from datetime import timedelta
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.kafka_protocols import Partition
from integr8s_idem.worker.lane import HORIZON
from integr8s_idem.worker.look_ahead import LONGEST_HOLD
from integr8s_idem.worker.slot_horizon import MOST_WAITING, SlotHorizon
from tests.support.counting import CountingStore
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
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
    turns,
    unfinished,
)

SLOTS = 8
FAST = HORIZON / 100
"""Seconds of a handler that is much faster than the horizon."""


class Reserving(CountingStore):
    """Records how many more parcels were reserved than have started, after each `reserve` request."""

    def __init__(self) -> None:
        super().__init__()
        self.depot = Depot()
        self.waiting: list[int] = []

    async def reserve(self, requests: Any) -> Any:
        verdicts = await super().reserve(requests)
        self.waiting.append(sum(self.batch_sizes) - len(self.depot.started))
        return verdicts


async def handle_all(here: Guarded, depot: Depot, number: int, **service: Any) -> None:
    options = {"ordering": "none", "concurrency": SLOTS, **service}
    async with running(dispatcher_of(depot.handle, here), sent(number), **options) as worker:
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}
    assert await leases_left(here) == []


@virtual_time
async def test_a_slot_is_taken_by_a_reserved_item_at_once() -> None:
    store, router, begins, ends = CountingStore(), EventRouter(), list[float](), list[float]()
    loop = asyncio.get_running_loop()

    @router.on(ParcelSent)
    async def handle(event: ParcelSent) -> None:
        begins.append(loop.time())
        # The first ones start together, and end one after another.
        await asyncio.sleep(0.05 + (event.number if event.number < 64 else 0) * 0.0003)
        ends.append(loop.time())

    dispatcher = IdempotentEventDispatcher(router, guarded(store).manager)
    async with running(dispatcher, sent(1_000), ordering="none", concurrency=64) as worker:
        await worker.until(lambda: all_committed(worker))

    assert len(begins) == sum(store.batch_sizes) == 1_000
    warm = [time for time in begins if time > begins[0] + 2 * HORIZON]
    assert len(warm) > 500
    assert set(warm) <= set(ends)
    later = store.batch_sizes[-10:-1]
    assert min(later) >= MOST_WAITING // 2


@virtual_time
async def test_a_limited_number_of_items_waits_for_slots() -> None:
    store = Reserving()
    store.depot.seconds = FAST

    await handle_all(guarded(store), store.depot, 2_000)

    assert MOST_WAITING // 2 < max(store.waiting) <= MOST_WAITING + SLOTS
    assert store.depot.max_concurrency == SLOTS
    assert sorted(store.depot.done) == list(range(2_000))


@virtual_time
async def test_slow_handlers_are_reserved_when_slots_are_free() -> None:
    store = Reserving()
    store.depot.seconds = 2 * SLOTS * HORIZON

    await handle_all(guarded(store), store.depot, 100)

    assert max(store.waiting) <= SLOTS
    assert store.depot.max_concurrency == SLOTS


@pytest.mark.parametrize(
    ("config", "service"),
    [
        ({"max_attempts": 1}, {}),
        ({"max_attempts": 2}, {}),
        ({"on_in_progress": "skip"}, {}),
        ({}, {"isolation_share": 0}),
    ],
)
@virtual_time
async def test_work_that_must_not_wait_is_reserved_when_slots_are_free(
    config: dict[str, Any], service: dict[str, Any]
) -> None:
    store = Reserving()
    store.depot.seconds = FAST

    await handle_all(guarded(store, **config), store.depot, 2_000, **service)

    assert max(store.waiting) <= SLOTS


@virtual_time
async def test_keys_are_released_if_no_slot_becomes_free_for_long() -> None:
    here, broker = guarded(), sent(2_000)
    depot = Depot(seconds=FAST, held={number: asyncio.Event() for number in range(1_500, 1_500 + SLOTS)})

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none", concurrency=SLOTS) as worker:
        await worker.until(lambda: set(depot.held) <= set(depot.started))
        assert await here.store.count_active("") > SLOTS + 10
        await asyncio.sleep(2 * LONGEST_HOLD + 0.1)
        assert await here.store.count_active("") == SLOTS, "those of the running handlers"
        for event in depot.held.values():
            event.set()
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert sorted(depot.started) == list(range(2_000))
    assert await leases_left(here) == []


@virtual_time
async def test_keys_are_released_in_time_although_other_partitions_are_revoked() -> None:
    here, broker, other = guarded(), sent(0), Partition("parcel_sent", 1)
    depot = Depot(held={number: asyncio.Event() for number in range(SLOTS)})
    broker.logs[other] = []
    service = running(dispatcher_of(depot.handle, here), broker, ordering="none", concurrency=SLOTS)

    with patch.object(SlotHorizon, "note"):
        async with service as worker:
            runners, horizon = worker.worker._pipeline._runners, worker.worker._pipeline._horizon
            horizon.size = 20
            broker.publish(*parcels(SLOTS + 12))
            await worker.until(lambda: len(runners.runnable) == 12)
            while not runners._old:  # noqa: ASYNC110  # a number has no event to wait for
                await asyncio.sleep(0.01)
            horizon.size = 60
            broker.publish(*parcels(100)[90:], partition=1)
            await worker.until(lambda: len(runners.runnable) == 22)
            await worker.consumer.take([other])
            assert len(runners.runnable) == 12
            await asyncio.sleep(LONGEST_HOLD)

            assert await here.store.count_active("") == SLOTS
            for event in depot.held.values():
                event.set()


@virtual_time
async def test_keys_are_kept_while_slots_are_free() -> None:
    here, broker, depot = guarded(), sent(0), Depot()

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none", concurrency=SLOTS) as worker:
        pipeline = worker.worker._pipeline
        broker.publish(*parcels(SLOTS))
        while not pipeline._batches:  # noqa: ASYNC110  # a number has no event to wait for
            await asyncio.sleep(0)
        pipeline._isolation._close()  # as if handlers blocked the event loop
        await asyncio.sleep(10 * LONGEST_HOLD)
        assert len(pipeline._runners.runnable) == SLOTS
        assert depot.started == []
        pipeline._isolation._open()
        await worker.until(lambda: all_committed(worker))
        assert worker.worker.report().tally.reruns == 0

    assert depot.done == list(range(SLOTS))


@virtual_time
async def test_an_event_loses_one_attempt_at_most_while_it_waits_for_slots() -> None:
    here, broker, router, slow = guarded(), sent(4_000), EventRouter(), Random(1)

    @router.on(ParcelSent, name="handle")
    async def handle(_: ParcelSent) -> None:
        await asyncio.sleep(2 if slow.random() < 0.1 else FAST)

    dispatcher = IdempotentEventDispatcher(router, here.manager)
    async with running(dispatcher, broker, ordering="none", concurrency=16) as worker:
        await worker.until(lambda: all_committed(worker))

    attempts = Counter([record.attempt async for record in here.store.scan("")])
    assert attempts.total() == 4_000
    assert set(attempts) == {1, 2}


@virtual_time
async def test_the_rate_before_a_pause_does_not_count() -> None:
    here, broker, gate, started = guarded(), sent(1_500), asyncio.Event(), list[int]()

    async def handle(event: ParcelSent) -> None:
        started.append(event.number)
        await (asyncio.sleep(FAST) if event.number < 1_500 else gate.wait())

    async with running(dispatcher_of(handle, here), broker, ordering="none", concurrency=SLOTS) as worker:
        await worker.until(lambda: all_committed(worker))
        assert worker.worker._pipeline._horizon.size > 0
        await asyncio.sleep(3_600)
        broker.publish(*parcels(1_700)[1_500:])
        await worker.until(lambda: len(started) == 1_500 + SLOTS)

        assert await here.store.count_active("") == SLOTS
        gate.set()


@virtual_time
async def test_a_handler_may_request_a_key_that_waits_for_its_slot() -> None:
    """It waits for a key that is reserved for a delivery, which waits for the slot of the handler."""
    here, broker, router, started = guarded(), sent(100), EventRouter(), list[int]()

    @router.on(ParcelSent, name="handle")
    async def handle(event: ParcelSent) -> None:
        started.append(event.number)
        await asyncio.sleep(HORIZON / 20)
        if event.number == 80:
            while await here.store.count_active("") > 1:  # noqa: ASYNC110  # the store has no event to wait for
                await asyncio.sleep(HORIZON)

    dispatcher = IdempotentEventDispatcher(router, here.manager)
    async with running(dispatcher, broker, ordering="none", concurrency=1) as worker:
        await worker.until(lambda: all_committed(worker), seconds=10)

    assert sorted(started) == list(range(100))


@virtual_time
async def test_keys_of_a_revoked_partition_are_released_at_once_although_no_slot_is_free() -> None:
    here, broker = guarded(), sent(2_000)
    depot = Depot(seconds=FAST, held={number: asyncio.Event() for number in range(1_500, 1_500 + SLOTS)})
    options: dict[str, Any] = {"ordering": "none", "concurrency": SLOTS, "drain_timeout_seconds": 20}

    async with running(dispatcher_of(depot.handle, here), broker, **options) as worker:
        await worker.until(lambda: set(depot.held) <= set(depot.started))
        for assignment in worker.worker._partitions.assignments.values():
            assignment.close()
        worker.worker._pipeline.release_closed()
        await asyncio.sleep(LONGEST_HOLD / 10)

        assert await here.store.count_active("") == SLOTS
        for event in depot.held.values():
            event.set()

    assert sorted(depot.done) == list(range(1_500 + SLOTS))
    assert await leases_left(here) == []


@virtual_time
async def test_items_that_are_reserved_after_a_revocation_are_released_although_no_slot_is_free() -> None:
    here, broker, answer = guarded(), sent(0), asyncio.Event()
    depot = Depot(held={number: asyncio.Event() for number in range(SLOTS)})
    options: dict[str, Any] = {"ordering": "none", "concurrency": SLOTS, "drain_timeout_seconds": 20}
    broker.logs[Partition("parcel_sent", 1)] = []

    async with running(dispatcher_of(depot.handle, here), broker, **options) as worker:
        here.store.held["reserve"] = answer
        worker.worker._pipeline._horizon.size = 20
        broker.publish(*parcels(SLOTS))
        await asyncio.sleep(1)
        broker.publish(*parcels(SLOTS + 1)[SLOTS:], partition=1)
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        revoking = asyncio.create_task(worker.consumer.take([Partition("parcel_sent", 1)]))
        await asyncio.sleep(0.1)
        answer.set()
        await revoking

        assert asyncio.get_running_loop().time() - began < 1
        await worker.until(lambda: depot.started == list(range(SLOTS)))
        for event in depot.held.values():
            event.set()


@virtual_time
async def test_unguarded_items_wait_for_slots_as_long_as_it_takes() -> None:
    depot = Depot(held={number: asyncio.Event() for number in range(SLOTS)})

    async with running(dispatcher_of(depot.handle), sent(100), ordering="none", concurrency=SLOTS) as worker:
        await worker.until(lambda: len(depot.started) == SLOTS)
        worker.worker._pipeline._horizon.size = 20
        worker.worker._pipeline._schedule()
        await worker.until(lambda: len(worker.worker._pipeline._runners.runnable) == 20)
        await asyncio.sleep(10 * LONGEST_HOLD)
        assert len(worker.worker._pipeline._runners.runnable) == 20
        for event in depot.held.values():
            event.set()
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert sorted(depot.done) == list(range(100))


@virtual_time
async def test_items_start_when_a_suspect_leaves_its_slot() -> None:
    here, depot, broker = guarded(), Depot(), sent(0)
    loop = asyncio.get_running_loop()

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none", concurrency=1) as worker:
        pipeline = worker.worker._pipeline
        taken = await pipeline._slots.acquire(unless=loop.create_future())
        pipeline._horizon.size = 5
        broker.publish(*parcels(5))
        await worker.until(lambda: len(pipeline._runners.runnable) == 5)
        assert taken
        assert depot.started == []
        pipeline._slots.release()
        await turns(5)

        assert depot.started == list(range(5))


@virtual_time
async def test_after_a_crash_items_are_reserved_when_slots_are_free() -> None:
    store = Reserving()
    store.depot.seconds = FAST
    here = guarded(store)
    for number in range(1_500, 1_600):
        await reserved_by_another(here, number, timedelta(seconds=1))
    await asyncio.sleep(1)
    store.batch_sizes.clear()
    store.waiting.clear()

    await handle_all(here, store.depot, 2_000)

    assert sorted(store.depot.done) == list(range(2_000))
    reserved = list(itertools.accumulate(store.batch_sizes))
    # The first batch with lapsed ones may be large, since nobody knew.
    crashed = [waits for total, waits in zip(reserved, store.waiting, strict=True) if 1_700 < total < 1_800]
    assert crashed
    assert max(crashed) <= SLOTS


@virtual_time
async def test_items_that_wait_for_slots_do_not_start_while_the_store_is_down() -> None:
    store, broker = CountingStore(), sent(2_000)
    here = guarded(store)
    depot = Depot(seconds=FAST, held={number: asyncio.Event() for number in range(1_500, 1_500 + SLOTS)})

    async with running(dispatcher_of(depot.handle, here), broker, ordering="none", concurrency=SLOTS) as worker:
        await worker.until(lambda: set(depot.held) <= set(depot.started))
        with store.outage():
            for event in depot.held.values():
                event.set()
            await asyncio.sleep(5)
            # Those that started at the same time as the first request that failed.
            assert len(depot.started) <= 1_500 + 2 * SLOTS
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert sorted(set(depot.done)) == list(range(2_000))
    assert await leases_left(here) == []


@virtual_time
async def test_items_that_waited_for_the_store_keep_to_the_limit_of_their_value() -> None:
    store, broker, router, gate = CountingStore(), FakeBroker(), EventRouter(), asyncio.Event()
    running_now, most, held = Counter[str](), Counter[str](), list[int]()

    # When the first 1,500 have made the rate known, the next ones hold all slots.
    @router.on(ParcelSent, limit_by="aggregate_id", at_most=1)
    async def handle(event: ParcelSent) -> None:
        value = str(event.aggregate_id)
        running_now[value] += 1
        most[value] = max(most[value], running_now[value])
        if 1_500 <= event.number < 1_500 + SLOTS:
            held.append(event.number)
            await gate.wait()
        await asyncio.sleep(FAST)
        running_now[value] -= 1

    for number in range(1_500 + SLOTS + 24):
        value = number if number < 1_500 + SLOTS else number // 2
        broker.publish(ParcelSent(number=number, aggregate_id=f"value-{value}"))
    dispatcher = IdempotentEventDispatcher(router, guarded(store).manager)
    async with running(dispatcher, broker, ordering="none", concurrency=SLOTS) as worker:
        await worker.until(lambda: len(held) == SLOTS)
        assert len(worker.worker._pipeline._runners.runnable) > SLOTS, "more items wait than slots"
        with store.outage():
            gate.set()
            await asyncio.sleep(1)
        await worker.until(lambda: all_committed(worker))
        assert unfinished(worker.worker) == {}

    assert max(most.values()) == 1


@pytest.mark.parametrize("config", [{}, {"max_attempts": 1}])
@virtual_time
async def test_no_handler_of_an_event_waits_beyond_the_limit(config: dict[str, Any]) -> None:
    store, router, handled = Reserving(), EventRouter(), Counter[str]()

    for name in ("pack", "invoice", "notify"):

        async def handle(event: ParcelSent, name: str = name) -> None:
            store.depot.started.append(event.number)
            await asyncio.sleep(FAST)
            handled[name] += 1

        router.on(ParcelSent, name=name)(handle)

    dispatcher = IdempotentEventDispatcher(router, guarded(store, **config).manager)
    async with running(dispatcher, sent(600), ordering="none", concurrency=SLOTS) as worker:
        await worker.until(lambda: all_committed(worker))

    assert dict(handled) == dict.fromkeys(("pack", "invoice", "notify"), 600)
    assert max(store.waiting) <= SLOTS + (0 if config else MOST_WAITING)


@virtual_time
async def test_handlers_that_never_wait_need_no_slot() -> None:
    store, depot = CountingStore(), Depot()

    await handle_all(guarded(store), depot, 300, concurrency=1)

    assert sorted(depot.done) == list(range(300))


def test_the_horizon_follows_the_rate() -> None:
    horizon = SlotHorizon(100)
    horizon.note(64, 10.0)
    horizon.note(10, 10.0 + HORIZON / 2)
    assert horizon.size == 0, "the rate is unknown"
    horizon.note(1_000, 10.0 + HORIZON * 2)
    assert horizon.size == 37
    horizon.note(20, 10.0 + HORIZON * 4)
    assert horizon.size == 100
    horizon.note(1_000, 10.0 + HORIZON * 6)
    assert horizon.size == 0, "10 are too few"
    horizon.note(50, 10.0 + HORIZON * 8)
    horizon.slow_down()
    assert horizon.size == 0
    horizon.note(1_000, 20.0)
    assert horizon.size == 0
    horizon.note(1_000, 20.0 + HORIZON * 11)
    assert horizon.size == 90
