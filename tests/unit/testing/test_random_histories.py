"""Random histories with an incorrect store, and with a correct store on a stalled machine."""

from __future__ import annotations

from datetime import timedelta

import pytest

from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.contract import HistorySize, SteppedClock
from integr8s_idem.testing.random_histories import check_histories

SIZE = HistorySize(histories=20, steps=20)
STALL = timedelta(seconds=7)


class _Miscounting(MemoryIdempotencyRepository):
    """A store that counts one active key too many."""

    async def count_active(self, prefix: str = "") -> int:
        active = await super().count_active(prefix)
        return active + (active > 0)


class _Stalling(MemoryIdempotencyRepository):
    """A correct store on a machine that stalls at some reads, so that leases expire unexpectedly for the model."""

    def __init__(self, every: int) -> None:
        self.clock = SteppedClock()
        super().__init__(clock=self.clock)
        self._every = every
        self._reads = 0
        self._stalled = timedelta()

    async def count_active(self, prefix: str = "") -> int:
        self._reads += 1
        if self._reads % self._every == 0:
            self._stalled += STALL
            await self.clock.advance(STALL)
        return await super().count_active(prefix)

    def stopwatch(self) -> float:
        return self._stalled.total_seconds()


async def test_a_store_that_differs_from_the_model_fails() -> None:
    clock = SteppedClock()
    with pytest.raises(AssertionError, match="count_active"):
        await check_histories(_Miscounting(clock=clock), clock.advance, SIZE)


async def test_a_stalled_machine_does_not_fail_a_correct_store() -> None:
    store = _Stalling(every=50)
    await check_histories(store, store.clock.advance, SIZE, store.stopwatch)


async def test_a_store_that_is_too_slow_to_compare_fails() -> None:
    store = _Stalling(every=5)
    with pytest.raises(AssertionError, match="histories took longer than 4 s"):
        await check_histories(store, store.clock.advance, SIZE, store.stopwatch)
