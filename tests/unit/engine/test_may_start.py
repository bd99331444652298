"""`may_start` in a custom consumer loop: it asks the store only if a lease is late."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest

from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.records import Reserved
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.flaky_store import FlakyStore
from tests.support.guarded import LEASE
from tests.support.late_starts import (
    Entry,
    Run,
)
from tests.support.stalling import ManualClock


async def acquired(entry: Entry, *keys: str) -> list[Reserved]:
    """Acquire a batch of free keys."""
    verdicts = (await entry.manager.acquire_batch(keys)).values()
    reserved = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
    assert len(reserved) == len(keys)
    return reserved


async def test_may_start_asks_the_store_only_when_a_lease_is_late(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = Run(clock, inner)
    reserved = await acquired(entry, "1", "2")

    assert [await entry.manager.may_start(each) for each in reserved] == [True, True]
    assert (entry.store.calls["renew"], entry.prevented) == (0, 0)


async def test_may_start_renews_all_late_leases_of_its_batch_in_one_call(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = Run(clock, inner)
    reserved = [*await acquired(entry, "1", "2"), *await acquired(entry, "3")]
    clock.seconds += LEASE - 0.5

    assert [await entry.manager.may_start(each) for each in reserved] == [True] * 3
    assert (entry.store.calls["renew"], entry.prevented) == (2, 2), "leases of other batches are not renewed"
    assert await entry.manager.confirm_batch(reserved) == [True] * 3
    assert {record.attempt async for record in inner.scan("")} == {1}


async def test_may_start_is_false_for_keys_taken_over_by_another_process(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry, other = Run(clock, inner), Run(clock, inner)
    lost, kept = await acquired(entry, "1", "2")
    clock.leap()
    [taken_over] = await acquired(other, "1")

    assert [await entry.manager.may_start(each) for each in (lost, kept)] == [False, True]
    assert taken_over.attempt == 2
    assert await entry.manager.confirm_batch([lost, kept]) == [False, True]


async def test_may_start_renews_an_unknown_reservation(clock: ManualClock, inner: MemoryIdempotencyRepository) -> None:
    entry, other = Run(clock, inner), Run(clock, inner)
    [reserved] = await acquired(other, "1")

    assert await entry.manager.may_start(reserved)
    assert entry.store.calls["renew"] == 1
    assert await entry.manager.may_start(reserved)
    assert entry.store.calls["renew"] == 1


async def test_may_start_raises_while_the_store_does_not_answer(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = Run(clock, inner)
    [reserved] = await acquired(entry, "1")
    clock.leap()
    entry.store.down.add("renew")

    with pytest.raises(StoreUnavailableError):
        await entry.manager.may_start(reserved)

    entry.store.down.clear()
    assert await entry.manager.may_start(reserved)


async def test_renewing_a_batch_manually_gives_its_starts_a_new_lease(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = Run(clock, inner)
    reserved = await acquired(entry, "1", "2")
    clock.seconds += 0.8 * LEASE
    assert await entry.manager.renew(*reserved) == [True, True]
    clock.seconds += 0.8 * LEASE

    assert [await entry.manager.may_start(each) for each in reserved] == [True, True]
    assert entry.store.calls["renew"] == 1


async def test_may_start_gives_up_and_releases_work_whose_renewals_take_nearly_the_whole_lease(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    class Slow(FlakyStore):
        async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
            answers = await super().renew(reservations, lease)
            assert self.calls["renew"] < 100
            clock.leap(LEASE - 0.5)
            return answers

    entry = Run(clock, inner)
    slow = IdempotencyManager(entry.manager.config, Slow(inner), entry.observer, scope="billing", clock=clock)
    [reserved] = [each for each in (await slow.acquire_batch(["1"])).values() if isinstance(each, Reserved)]
    clock.seconds += LEASE - 0.5

    assert not await slow.may_start(reserved)

    assert entry.prevented == 4
    [again] = await acquired(entry, "1")
    assert (again.attempt, again.lapsed) == (2, 0), "it was released, so it does not count as a crash"


async def test_may_start_is_true_if_a_later_renewal_leaves_enough_of_the_lease(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    class SlowTwice(FlakyStore):
        async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
            answers = await super().renew(reservations, lease)
            if self.calls["renew"] <= 2:
                clock.leap(LEASE - 0.5)
            return answers

    entry, store = Run(clock, inner), SlowTwice(inner)
    slow = IdempotencyManager(entry.manager.config, store, entry.observer, scope="billing", clock=clock)
    [reserved] = [each for each in (await slow.acquire_batch(["1"])).values() if isinstance(each, Reserved)]
    clock.seconds += LEASE - 0.5

    assert await slow.may_start(reserved)
    assert store.calls["renew"] == 3
