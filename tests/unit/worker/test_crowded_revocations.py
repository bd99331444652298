"""A revocation waits for no delivery that waits for a slot, while handlers of other partitions hang in all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.dead_letters import GENERATION
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import RunningWorker, running
from tests.support.guarded import Guarded, guarded
from tests.support.pipelines import ParcelSent, dispatcher_of, key_of, reserved_by_another

HUNG, REVOKED = 0, 1
"""The partition whose handlers take all slots, and the one that is revoked."""


def parcel(number: int) -> ParcelSent:
    return ParcelSent(number=number, event_id=f"parcel-{number}")


class Depot:
    """Parcels from 10 on hang until the end of the test."""

    def __init__(self) -> None:
        self.here: Guarded = guarded()
        self.broker = FakeBroker()
        self.begun: list[int] = []
        self.may_end = asyncio.Event()
        for number in (HUNG, REVOKED, 2):
            self.broker.logs[Partition("parcel_sent", number)] = []

    async def handle(self, event: ParcelSent) -> None:
        self.begun.append(event.number)
        await (self.may_end.wait() if event.number >= 10 else asyncio.sleep(4))

    @property
    def hung(self) -> int:
        return sum(number >= 10 for number in self.begun)

    @asynccontextmanager
    async def worker(self, concurrency: int) -> AsyncIterator[RunningWorker]:
        dispatcher = dispatcher_of(self.handle, self.here)
        options: dict[str, Any] = {"isolation_seconds": 5, "drain_timeout_seconds": 20}
        async with running(dispatcher, self.broker, ordering="none", concurrency=concurrency, **options) as worker:
            try:
                yield worker
            finally:
                self.may_end.set()


async def seconds_to_revoke(worker: RunningWorker) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await worker.consumer.take([Partition("parcel_sent", REVOKED)])
    return loop.time() - began


@pytest.mark.parametrize("others", [0, 3])
@virtual_time
async def test_a_replay_that_was_verified_too_late_is_released(others: int) -> None:
    depot = Depot()
    event, verifying = parcel(1), asyncio.Event()
    headers = [*event_headers(event), (GENERATION, b"1")]
    depot.broker.put("parcel_sent", encode_event(event), partition=REVOKED, headers=headers)
    depot.here.store.held["get"] = verifying
    async with depot.worker(concurrency=2) as worker:
        await worker.until(lambda: depot.here.store.calls["get"] == 1)
        depot.broker.publish(*map(parcel, range(10, 12 + others)), partition=HUNG)
        await worker.until(lambda: depot.hung == 2)

        revoking = asyncio.create_task(seconds_to_revoke(worker))
        await asyncio.sleep(0.01)
        verifying.set()

        assert await revoking < 1
    assert 1 not in depot.begun


@virtual_time
async def test_a_suspect_that_waits_for_a_slot_is_released() -> None:
    depot = Depot()
    for _ in range(2):
        for number in (2, 3):
            await reserved_by_another(depot.here, number, timedelta(seconds=1))
        await asyncio.sleep(2)
    async with depot.worker(concurrency=3) as worker:
        depot.broker.publish(parcel(2), partition=2)  # runs alone for 4 s, and the others take their share of the time
        await asyncio.sleep(5)
        depot.broker.publish(parcel(3), partition=REVOKED)  # waits for its turn, and finds that the others hang
        await asyncio.sleep(0.1)
        depot.broker.publish(*map(parcel, (10, 11, 12)), partition=HUNG)
        await asyncio.sleep(60)
        assert depot.begun == [2, 10, 11, 12]

        assert await seconds_to_revoke(worker) < 1
        await asyncio.sleep(1)

        assert not await depot.here.store.count_active(key_of(depot.here, 3))
    assert 3 not in depot.begun
