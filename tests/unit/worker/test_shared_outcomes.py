"""While deliveries wait for handlers, outcomes wait for others, so that they share requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.outcome_recorder import ENOUGH, LONGEST_WAIT
from tests.support.counting import SentOutcomes
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import guarded
from tests.support.pipelines import ParcelSent, all_committed, completed_parcels, sent


class Handlers:
    """Take 50 ms; the first 64 begin together and end one after another."""

    def __init__(self, step: float, **options: Any) -> None:
        self.ended: list[int] = []
        self.ended_at: list[float] = []
        self.first_ended = asyncio.Event()
        self.router = EventRouter()

        @self.router.on(ParcelSent, **options)
        async def handle(event: ParcelSent) -> None:
            await asyncio.sleep(0.05 + (event.number if event.number < 64 else 0) * step)
            self.ended.append(event.number)
            self.first_ended.set()
            self.ended_at.append(asyncio.get_running_loop().time())


@virtual_time
async def test_outcomes_that_wait_for_others_are_recorded_when_the_worker_stops() -> None:
    store, handlers = SentOutcomes(), Handlers(0.001)
    here = guarded(store)

    dispatcher = IdempotentEventDispatcher(handlers.router, here.manager)
    async with running(dispatcher, sent(400), ordering="none", concurrency=64):
        await handlers.first_ended.wait()
        assert store.sent_at == [], "the first outcome waits"

    assert await completed_parcels(here) == set(handlers.ended)


@virtual_time
async def test_outcomes_that_come_one_by_one_share_requests() -> None:
    step = LONGEST_WAIT / 10
    store, handlers = SentOutcomes(), Handlers(step)

    dispatcher = IdempotentEventDispatcher(handlers.router, guarded(store).manager)
    async with running(dispatcher, sent(640), ordering="none", concurrency=64) as worker:
        await worker.until(lambda: all_committed(worker))

    assert sum(store.sizes) == 640
    assert sum(store.sizes) / len(store.sizes) > 5
    waits = [sent_at - ended_at for sent_at, ended_at in zip(store.sent_at, handlers.ended_at, strict=True)]
    assert 0 <= min(waits) < step
    assert max(waits) <= LONGEST_WAIT * 1.01


@virtual_time
async def test_enough_outcomes_do_not_wait() -> None:
    store, router = SentOutcomes(), EventRouter()
    ended_at: list[float] = []

    @router.on(ParcelSent)
    async def handle(event: ParcelSent) -> None:
        # All but one of the first 100 end a moment after that one, which waits for others.
        await asyncio.sleep(0.05 + (0 if event.number == 0 else LONGEST_WAIT / 10))
        ended_at.append(asyncio.get_running_loop().time())

    dispatcher = IdempotentEventDispatcher(router, guarded(store).manager)
    async with running(dispatcher, sent(200), ordering="none", concurrency=100) as worker:
        await worker.until(lambda: len(store.sizes) > 0)
        first = store.sent_at[0]
        await worker.until(lambda: all_committed(worker))

    assert store.sizes[0] >= ENOUGH
    assert first - ended_at[0] == pytest.approx(LONGEST_WAIT / 10)


@pytest.mark.parametrize("events", [1, 8, 48])
@virtual_time
async def test_an_outcome_is_sent_at_once_unless_deliveries_wait_for_slots(events: int) -> None:
    store, handlers = SentOutcomes(), Handlers(0.001)

    dispatcher = IdempotentEventDispatcher(handlers.router, guarded(store).manager)
    async with running(dispatcher, sent(events), ordering="none", concurrency=64) as worker:
        await worker.until(lambda: all_committed(worker))

    assert store.sent_at == handlers.ended_at


@virtual_time
async def test_an_outcome_is_sent_at_once_if_only_a_few_handlers_run() -> None:
    store, handlers = SentOutcomes(), Handlers(0.001)

    dispatcher = IdempotentEventDispatcher(handlers.router, guarded(store).manager)
    async with running(dispatcher, sent(100), ordering="none", concurrency=3) as worker:
        await worker.until(lambda: all_committed(worker))

    assert store.sent_at == handlers.ended_at


@virtual_time
async def test_an_outcome_is_sent_at_once_if_the_next_delivery_of_its_partition_waits_for_it() -> None:
    store, handlers = SentOutcomes(), Handlers(0.0)

    dispatcher = IdempotentEventDispatcher(handlers.router, guarded(store).manager)
    async with running(dispatcher, sent(80, partitions=8), ordering="partition", concurrency=8) as worker:
        await worker.until(lambda: all_committed(worker))

    assert store.sent_at == handlers.ended_at


SHARED = [number % 50 for number in range(200)]
MIXED = [number % 10 if number % 2 else number for number in range(200)]
"""Every other parcel is for one of five recipients."""


@pytest.mark.parametrize("recipients", [SHARED, MIXED])
@virtual_time
async def test_an_outcome_is_sent_at_once_if_the_next_delivery_of_its_key_waits_for_it(recipients: list[int]) -> None:
    store, handlers, broker = SentOutcomes(), Handlers(LONGEST_WAIT / 10), FakeBroker()
    broker.publish(*(ParcelSent(number=each, aggregate_id=str(of)) for each, of in enumerate(recipients)))

    dispatcher = IdempotentEventDispatcher(handlers.router, guarded(store).manager)
    async with running(dispatcher, broker, ordering="key", concurrency=20) as worker:
        await worker.until(lambda: all_committed(worker))

    ended = zip(handlers.ended, store.sent_at, handlers.ended_at, strict=True)
    waits = {number: sent_at - ended_at for number, sent_at, ended_at in ended}
    assert max(waits[number] for number in waits if recipients[number] in recipients[number + 1 :]) == 0
    assert max(waits.values()) > 0


@virtual_time
async def test_an_outcome_is_sent_at_once_if_another_event_of_a_limited_value_waits() -> None:
    store, handlers, broker = SentOutcomes(), Handlers(0.0, limit_by="aggregate_id", at_most=1), FakeBroker()
    # A third is for the same recipient.
    broker.publish(*(ParcelSent(number=each, aggregate_id=str(each % 3 and each)) for each in range(150)))

    dispatcher = IdempotentEventDispatcher(handlers.router, guarded(store).manager)
    async with running(dispatcher, broker, ordering="none", concurrency=20) as worker:
        await worker.until(lambda: len(handlers.ended) >= 100)

        assert store.sent_at[:80] == handlers.ended_at[:80]
