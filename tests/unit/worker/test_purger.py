"""Purging expired records, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, cast

import pytest

from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.stores import PurgeSupport
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.purger import BATCH, REST, Purger
from integr8s_idem.worker.store_circuit import StoreCircuit
from tests.support.conditions import eventually
from tests.support.counting import CountingObserver

DOWN = StoreUnavailableError("purge", "connection refused")


class Store(MemoryIdempotencyRepository):
    """A store with `expired` records that takes `seconds` to purge each batch."""

    def __init__(self, expired: int = 0, *, every: float = 60.0, seconds: float = 0.0) -> None:
        super().__init__()
        self.purge_every = timedelta(seconds=every)
        self.expired = expired
        self.calls: list[float] = []
        self.error: Exception | None = None
        self._seconds = seconds

    async def purge(self, most: int = 500) -> int:
        self.calls.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self._seconds)
        if self.error is not None:
            raise self.error
        purged = min(most, self.expired)
        self.expired -= purged
        return purged


@asynccontextmanager
async def purging(store: MemoryIdempotencyRepository) -> AsyncIterator[tuple[CountingObserver, StoreCircuit]]:
    observer = CountingObserver()
    circuit = StoreCircuit(store.ping, observer)
    purger = Purger("billing", store, circuit, observer)
    purger.begin()
    yield observer, circuit
    await purger.stop()
    await circuit.stop()


@virtual_time
async def test_expired_records_are_purged_in_batches_until_none_is_left() -> None:
    store = Store(expired=3 * BATCH + 7)

    async with purging(store) as (observer, _):
        await asyncio.sleep(91)

    assert store.expired == 0
    assert observer.counts[Signal.PURGED] == 3 * BATCH + 7
    assert len(store.calls) in {4, 5}


@virtual_time
async def test_pauses_between_batches_are_longer_than_the_batches() -> None:
    store = Store(expired=10 * BATCH, seconds=0.2)

    async with purging(store):
        await asyncio.sleep(120)

    pauses = [later - earlier for earlier, later in itertools.pairwise(store.calls[:10])]
    assert pauses == pytest.approx([0.2 * (1 + REST)] * 9)


@virtual_time
async def test_a_hundred_workers_do_not_purge_simultaneously() -> None:
    stores = [Store() for _ in range(100)]
    observer = CountingObserver()
    purgers = [Purger("billing", store, StoreCircuit(store.ping, observer), observer) for store in stores]
    for purger in purgers:
        purger.begin()

    await asyncio.sleep(91)
    for purger in purgers:
        await purger.stop()

    seconds = [int(store.calls[0]) for store in stores]
    assert min(seconds) >= 30
    assert max(seconds.count(one) for one in seconds) < 20


@virtual_time
async def test_an_unavailable_store_is_not_purged() -> None:
    store = Store(expired=10 * BATCH, seconds=0.2)

    async with purging(store) as (_, circuit):
        await eventually(lambda: len(store.calls) == 3)
        store.ping = never  # type: ignore[method-assign]
        circuit._ping = never
        circuit.mark_unavailable(DOWN)
        await asyncio.sleep(3_600)

    assert len(store.calls) == 3


async def never() -> Any:
    raise DOWN


@virtual_time
@pytest.mark.parametrize("error", [DOWN, KeyError("a bug of the store")])
async def test_an_error_is_counted_and_logged_and_purging_continues(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(expired=3)
    store.error = error

    with caplog.at_level(logging.WARNING):
        async with purging(store) as (observer, _):
            await asyncio.sleep(91)
            failures = len(store.calls)
            store.error = None
            await asyncio.sleep(91)

    assert observer.counts[Signal.STORE_ERROR] == failures >= 1
    assert "billing: expired records not purged" in caplog.text
    assert store.expired == 0


@virtual_time
@pytest.mark.parametrize(
    "store", [Store(expired=9, every=0), MemoryIdempotencyRepository()], ids=["disabled", "unsupported"]
)
async def test_a_store_without_purging_is_not_purged(store: MemoryIdempotencyRepository) -> None:
    async with purging(store):
        await asyncio.sleep(3_600)

    assert not isinstance(store, PurgeSupport) or cast(Store, store).calls == []


@virtual_time
async def test_stopping_cancels_a_running_purge() -> None:
    store = Store(expired=9, seconds=1_000)

    async with purging(store) as (observer, _):
        await asyncio.sleep(91)

    assert len(store.calls) == 1
    assert observer.counts[Signal.PURGED] == 0
