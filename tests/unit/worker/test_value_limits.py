"""Limits by a field of the event: how many run at a time, who waits, and what those that wait hold."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from integr8s_idem.errors import ApplicationError
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.observing_dispatcher import ObservingEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.keys import Key
from integr8s_idem.records import IdempotencyStatus, ReserveRequest
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import Gauge, Signal
from integr8s_idem.testing.virtual_time import run_virtual, virtual_now, virtual_time
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import RunningWorker, running
from tests.support.guarded import Guarded, guarded
from tests.support.pipelines import unfinished
from tests.support.stalling import ManualClock, StallingStore

EVERY_ORDERING = pytest.mark.parametrize("ordering", ["partition", "key", "none"])


class OrderPaid(BaseEvent):
    event_type: Literal["order_paid"] = "order_paid"
    number: int
    customer: str | None = None
    tags: list[str] | None = None


class Desk:
    """Handles orders, and notes how many run at the same time for each customer."""

    def __init__(self, seconds: float = 1.0, errors: Iterable[int] = ()) -> None:
        self.seconds = seconds
        self.failing = set(errors)
        """Orders whose first run fails."""
        self.started: list[int] = []
        self.done: list[int] = []
        self.running: Counter[str | None] = Counter()
        self.most: Counter[str | None] = Counter()
        self.held: dict[int, asyncio.Event] = {}

    async def handle(self, event: OrderPaid) -> None:
        self.started.append(event.number)
        self.running[event.customer] += 1
        self.most[event.customer] = max(self.most[event.customer], self.running[event.customer])
        try:
            if event.number in self.held:
                await self.held[event.number].wait()
            elif self.seconds:
                await asyncio.sleep(self.seconds)
            if event.number in self.failing:
                self.failing.discard(event.number)
                raise OSError("later")
        finally:
            self.running[event.customer] -= 1
        self.done.append(event.number)


def limited(
    handle: Callable[[OrderPaid], Awaitable[Any]],
    here: Guarded | None = None,
    *,
    limit_by: str = "customer",
    at_most: int = 2,
) -> EventDispatcher:
    router = EventRouter()
    router.on(OrderPaid, name="handle", limit_by=limit_by, at_most=at_most)(handle)
    return IdempotentEventDispatcher(router, here.manager) if here else EventDispatcher(router)


def paid(customers: Iterable[str | None], *, partitions: int = 1, first: int = 0) -> FakeBroker:
    """Return a broker with one order for each of `customers`, each with a Kafka key of its own."""
    return add(FakeBroker(), customers, partitions=partitions, first=first)


def add(broker: FakeBroker, customers: Iterable[str | None], *, partitions: int = 1, first: int = 0) -> FakeBroker:
    for number, customer in enumerate(customers, first):
        event = OrderPaid(number=number, customer=customer, event_id=f"order-{number}", aggregate_id=str(number))
        broker.publish(event, partition=number % partitions)
    return broker


async def settled(worker: RunningWorker, here: Guarded | None = None) -> None:
    """Wait until everything is committed, and check that nothing is left."""
    logs, committed = worker.broker.logs, worker.broker.committed
    await worker.until(lambda: all(committed.get(at, 0) == log[-1].offset + 1 for at, log in logs.items()))
    await worker.until(lambda: not unfinished(worker.worker))
    if here is not None:
        assert await leases(here) == []


async def leases(here: Guarded) -> list[int]:
    """Return the orders that are reserved."""
    records = [record async for record in here.store.scan("")]
    reserved = [record.key for record in records if record.status is IdempotencyStatus.PROCESSING]
    return sorted(int(key.rpartition("-")[2]) for key in reserved)


@EVERY_ORDERING
@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("seconds", [0.0, 1.0])
@virtual_time
async def test_no_more_events_of_one_value_run_than_the_limit(ordering: str, guard: bool, seconds: float) -> None:
    here, desk = guarded() if guard else None, Desk(seconds, errors=(3, 17, 30))
    broker = paid(["ada", "ada", "ada", "bob", "eve"] * 12, partitions=6)

    async with running(limited(desk.handle, here), broker, ordering=ordering, concurrency=16) as worker:
        await settled(worker, here)

    assert sorted(desk.done) == list(range(60))
    assert max(desk.most.values()) <= 2
    if seconds and ordering != "partition":
        assert desk.most == {"ada": 2, "bob": 2, "eve": 2}


@virtual_time
async def test_a_value_with_many_waiting_events_leaves_the_slots_to_the_others() -> None:
    desk, broker = Desk(seconds=10), paid(["ada"] * 100 + ["bob"] * 20)

    async with running(limited(desk.handle, guarded()), broker, ordering="none", concurrency=4) as worker:
        await worker.until(lambda: len([each for each in desk.done if each >= 100]) == 20)

        # Two at a time each: when the twenty of bob are done, about twenty of ada are.
        assert len(desk.done) <= 20 + 22
        await settled(worker)
    assert desk.most == {"ada": 2, "bob": 2}


@virtual_time
async def test_events_of_one_value_start_in_the_order_in_which_they_arrived() -> None:
    desk, broker = Desk(), paid(["ada", "bob"] * 30)

    async with running(limited(desk.handle, guarded(), at_most=1), broker, ordering="none") as worker:
        await settled(worker)

    for customer in (0, 1):
        started = [number for number in desk.started if number % 2 == customer]
        assert started == sorted(started)


@EVERY_ORDERING
@virtual_time
async def test_an_event_that_waits_for_its_limit_holds_no_lease_and_no_slot(ordering: str) -> None:
    here, desk, may_end = guarded(), Desk(seconds=0), asyncio.Event()
    desk.held = dict.fromkeys(range(12), may_end)
    broker = paid(["ada"] * 12, partitions=4)

    async with running(limited(desk.handle, here), broker, ordering=ordering, concurrency=3) as worker:
        await worker.until(lambda: len(desk.started) == 2)
        await asyncio.sleep(5)

        assert len(desk.started) == 2
        assert await leases(here) == sorted(desk.started)
        assert worker.worker._processor.slots.free == 1
        assert worker.worker.report().in_flight == 12
        may_end.set()
        await settled(worker, here)
    assert sorted(desk.done) == list(range(12))


@pytest.mark.parametrize("ordering", ["partition", "key"])
@virtual_time
async def test_keys_of_a_fast_lane_are_not_reserved_before_their_events_have_a_place(ordering: str) -> None:
    here, desk, broker = guarded(), Desk(seconds=0), FakeBroker()
    desk.held = {0: asyncio.Event()}
    # The lane of partition 1 becomes fast, and would reserve many keys at once.
    for number, customer in enumerate(["ada", *[None] * 40, *["ada"] * 20]):
        event = OrderPaid(number=number, customer=customer, event_id=f"order-{number}", aggregate_id="x" * bool(number))
        broker.publish(event, partition=bool(number))

    async with running(limited(desk.handle, here, at_most=1), broker, ordering=ordering) as worker:
        await worker.until(lambda: desk.started[-1:] == [40], seconds=30)
        for _ in range(30):
            assert await leases(here) == [0]
            await asyncio.sleep(0.1)
        desk.held[0].set()
        await settled(worker, here)
    assert desk.most["ada"] == 1


@virtual_time
async def test_a_lane_goes_on_when_its_event_gets_its_place() -> None:
    here, desk = guarded(), Desk(seconds=0)
    desk.held = {0: asyncio.Event()}
    # Order 1 waits for order 0 of the other partition, and order 3 waits for order 1.
    broker = paid(["ada", "ada", "bob", "bob"], partitions=2)

    async with running(limited(desk.handle, here, at_most=1), broker, ordering="partition") as worker:
        await worker.until(lambda: desk.started == [0])
        await asyncio.sleep(5)
        assert desk.started == [0]
        desk.held[0].set()
        await settled(worker, here)

    assert sorted(desk.done) == [0, 1, 2, 3]


@EVERY_ORDERING
@virtual_time
async def test_an_event_that_waits_for_its_retry_gives_up_its_place(ordering: str) -> None:
    desk, broker = Desk(errors=[0]), paid(["ada"] * 6, partitions=2)
    pause: dict[str, Any] = {"retry_initial_seconds": 600, "retry_max_seconds": 600}
    random.seed(1)

    dispatcher = limited(desk.handle, guarded(), at_most=1)
    async with running(dispatcher, broker, ordering=ordering, concurrency=8, **pause) as worker:
        await worker.until(lambda: {1, 3, 5} <= set(desk.done), seconds=30)
        assert 0 not in desk.done
        await settled(worker)


@virtual_time
async def test_an_event_that_waits_for_another_run_gives_up_its_place() -> None:
    here, desk = guarded(), Desk(seconds=0)
    key = here.manager.space.full(Key.of_event("handle", "order_paid", "id", "order-0"))
    request = ReserveRequest(key=key, token=b"0123456789abcdef", lease=timedelta(hours=1), retention=timedelta(hours=2))
    await here.store.reserve([request])

    dispatcher = limited(desk.handle, here, at_most=1)
    async with running(dispatcher, paid(["ada"] * 3), ordering="none", drain_timeout_seconds=1) as worker:
        await worker.until(lambda: sorted(desk.done) == [1, 2], seconds=60)


@virtual_time
async def test_an_unavailable_store_takes_no_places() -> None:
    here, desk = guarded(), Desk(seconds=0)
    broker = paid(["ada"] * 5)

    async with running(limited(desk.handle, here, at_most=1), broker, ordering="none") as worker:
        await worker.until(lambda: worker.worker.health().ready)
        with here.store.outage():
            add(broker, ["ada"] * 5, first=5)
            await asyncio.sleep(10)
        await settled(worker, here)

    assert sorted(desk.done) == list(range(10))


@virtual_time
async def test_events_without_a_value_are_not_limited() -> None:
    desk, broker = Desk(), paid([None] * 10)

    async with running(limited(desk.handle, guarded(), at_most=1), broker, ordering="none") as worker:
        await settled(worker)

    assert desk.most == {None: 10}


@virtual_time
async def test_values_that_cannot_be_hashed_are_limited_by_their_text() -> None:
    desk, broker = Desk(), FakeBroker()
    for number in range(6):
        broker.publish(OrderPaid(number=number, tags=["rush"], event_id=f"order-{number}"))

    dispatcher = limited(desk.handle, guarded(), limit_by="tags", at_most=1)
    async with running(dispatcher, broker, ordering="none") as worker:
        await settled(worker)

    assert desk.most == {None: 1}


@virtual_time
async def test_a_service_in_observe_mode_has_the_same_limits() -> None:
    here, desk, router = guarded(), Desk(), EventRouter()
    router.on(OrderPaid, name="handle", limit_by="customer", at_most=2)(desk.handle)

    async with running(ObservingEventDispatcher(router, here.manager), paid(["ada"] * 10), ordering="none") as worker:
        await settled(worker)
    await here.manager.close()

    assert desk.most == {"ada": 2}


@virtual_time
async def test_each_handler_has_limits_of_its_own() -> None:
    here, slow, quick, free = guarded(), Desk(seconds=5), Desk(seconds=1), Desk(seconds=1)
    router = EventRouter()
    router.on(OrderPaid, name="slow", limit_by="customer", at_most=1)(slow.handle)
    router.on(OrderPaid, name="quick", limit_by="customer", at_most=3)(quick.handle)
    router.on(OrderPaid, name="free")(free.handle)

    async with running(IdempotentEventDispatcher(router, here.manager), paid(["ada"] * 9), ordering="none") as worker:
        await settled(worker)

    assert (slow.most["ada"], quick.most["ada"], free.most["ada"]) == (1, 3, 9)
    assert all(sorted(each.done) == list(range(9)) for each in (slow, quick, free))


@EVERY_ORDERING
@given(
    customers=st.lists(st.sampled_from(["ada", "bob", None]), min_size=1, max_size=30),
    errors=st.sets(st.integers(0, 29), max_size=4),
    revoked_after=st.lists(st.floats(0, 3), max_size=3),
    at_most=st.integers(1, 3),
    seconds=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=60)
def test_nothing_is_lost_or_left_by_errors_and_rebalances(
    ordering: str,
    customers: list[str | None],
    errors: set[int],
    revoked_after: list[float],
    at_most: int,
    seconds: float,
) -> None:
    async def main() -> None:
        here, desk = guarded(), Desk(seconds, errors)
        broker = paid(customers, partitions=2)
        dispatcher = limited(desk.handle, here, at_most=at_most)
        async with running(dispatcher, broker, ordering=ordering, concurrency=4) as worker:
            await worker.until(lambda: bool(worker.consumer.assignment()))
            for pause in revoked_after:
                await asyncio.sleep(pause)
                partition = Partition("order_paid", 0)
                await worker.consumer.take([partition])
                await worker.consumer.give([partition])
            await settled(worker, here)
        assert sorted(desk.done) == list(range(len(customers)))
        assert all(most <= at_most for customer, most in desk.most.items() if customer is not None)

    run_virtual(main())


@virtual_time
async def test_a_stopped_worker_leaves_waiting_events_to_the_next_one() -> None:
    here, desk, broker = guarded(), Desk(seconds=5), paid(["ada"] * 7)

    async with running(limited(desk.handle, here), broker, ordering="none") as worker:
        await worker.until(lambda: len(desk.started) == 2)
    assert unfinished(worker.worker) == {}
    assert sorted(desk.done) == [0, 1]

    async with running(limited(desk.handle, here), broker, ordering="none") as worker:
        await settled(worker, here)
    assert sorted(desk.done) == list(range(7))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"limit_by": "customer"}, "belong together"),
        ({"at_most": 2}, "belong together"),
        ({"limit_by": "client", "at_most": 2}, "no such field"),
        ({"limit_by": "customer", "at_most": 0}, "at_most is 0, but must be an integer of at least 1"),
        ({"limit_by": "customer", "at_most": 2.5}, r"at_most is 2\.5, but must be an integer"),
        ({"limit_by": "customer", "at_most": True}, "at_most is True, but must be an integer"),
        ({"limit_by": "customer", "at_most": "2"}, "at_most is '2', but must be an integer"),
        ({"limit_by": ["customer"], "at_most": 2}, r"limit_by is \['customer'\], but must be the name of a field"),
    ],
)
def test_an_invalid_limit_is_refused_when_the_handler_is_registered(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ApplicationError, match=text):
        EventRouter().on(OrderPaid, **options)


@virtual_time
async def test_a_gauge_counts_the_events_that_wait() -> None:
    here, desk = guarded(), Desk(seconds=0)
    desk.held = {0: asyncio.Event()}

    async with running(limited(desk.handle, here, at_most=1), paid(["ada"] * 4), ordering="none") as worker:
        await worker.until(lambda: here.observer.gauges.get(Gauge.LIMIT_WAITING) == 3, seconds=10)
        desk.held[0].set()
        await worker.until(lambda: here.observer.gauges[Gauge.LIMIT_WAITING] == 0, seconds=10)


@virtual_time
async def test_an_event_whose_start_was_prevented_holds_no_key_while_it_waits_for_its_place() -> None:
    clock, store = ManualClock(), StallingStore(MemoryIdempotencyRepository(clock=virtual_now))
    here, desk = guarded(store, clock=clock), Desk()
    desk.held = {1: asyncio.Event()}
    store.stall = clock.stall  # after the reservation of the first order
    async with running(limited(desk.handle, here, at_most=1), paid(["ann", "ann"]), None, ordering="none") as worker:
        await worker.until(lambda: desk.started == [1])
        assert here.observer.counts[Signal.STALE_START_PREVENTED] == 1
        await worker.until(lambda: worker.worker.report().in_flight == 2)
        assert await reserved(here) == [1]

        desk.held[1].set()
        await settled(worker, here)
    assert desk.done == [1, 0]


async def reserved(here: Guarded) -> list[int]:
    """Return the orders whose keys are held."""
    prefix = f"{here.manager.space.root}handle:order_paid:id:order-"
    return [number for number in await leases(here) if await here.store.count_active(f"{prefix}{number}")]
