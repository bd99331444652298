"""A worker meets work that a later version has scheduled for later, such as after a rollback."""

from __future__ import annotations

from datetime import timedelta

import pytest

from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.records import NOBODY, Previous, Reserved, ReserveRequest, Scheduled
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.contract import SteppedClock
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import LEASE, Guarded, guarded
from tests.support.pipelines import TOPIC, Depot, ParcelSent, dispatcher_of

HOUR = timedelta(hours=1)


async def schedule(here: Guarded, event: ParcelSent, after: timedelta) -> None:
    """Write a record as a later version does: in processing, held by nobody, until its time comes."""
    key = here.manager.space.full(KeyResolver().resolve("handle", event).key)
    request = ReserveRequest(key=key, token=NOBODY, lease=after, retention=after + HOUR)
    (verdict,) = await here.store.reserve([request])
    assert isinstance(verdict, Reserved)


@virtual_time
async def test_a_worker_waits_for_the_time_of_scheduled_work_and_then_does_it() -> None:
    here, depot, broker = guarded(max_attempts=2), Depot(), FakeBroker()
    event = ParcelSent(number=1, event_id="1")
    await schedule(here, event, HOUR)
    broker.publish(event)

    async with running(dispatcher_of(depot.handle, guarded(here.store, max_attempts=2)), broker) as worker:
        await worker.until(lambda: worker.worker.report().tally.waits == 1)
        assert not is_settled(broker)
        await worker.until(lambda: broker.committed.get(TOPIC) == 1, HOUR.total_seconds() + LEASE)

    assert depot.done == [1]
    assert not broker.values("parcel_sent.dlq")


def is_settled(broker: FakeBroker) -> bool:
    return broker.committed.get(TOPIC, 0) > 0


@pytest.mark.parametrize("is_alone", [False, True])
async def test_scheduled_work_in_memory_is_taken_over_without_a_crash(is_alone: bool) -> None:
    clock = SteppedClock()
    store = MemoryIdempotencyRepository(clock=clock)
    await store.reserve([ReserveRequest(key="k", token=NOBODY, lease=HOUR, retention=2 * HOUR, alone=is_alone)])
    request = ReserveRequest(key="k", token=b"t" * 16, lease=HOUR, retention=HOUR)
    (early,) = await store.reserve([request])
    await clock.advance(HOUR)

    (due,) = await store.reserve([request])

    assert isinstance(early, Scheduled)
    assert isinstance(due, Reserved)
    assert (due.previous, due.attempt, due.lapsed, due.lapsed_alone) == (Previous.RELEASED, 2, 0, 0)
