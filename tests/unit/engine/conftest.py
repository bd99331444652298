"""A process whose lease clock jumps."""

from __future__ import annotations

import pytest

from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from tests.support.stalling import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def inner(clock: ManualClock) -> MemoryIdempotencyRepository:
    return MemoryIdempotencyRepository(clock=clock.wall)
