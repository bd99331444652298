"""The contract of all stores, held by the one in memory."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.contract import HistorySize, RepositoryContract, StoreUnderTest


class _Clock:
    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    async def advance(self, duration: timedelta) -> None:
        self.now += duration


class TestMemoryStore(RepositoryContract):
    histories = HistorySize(histories=200, steps=40)

    @pytest.fixture
    def store(self) -> StoreUnderTest:
        clock = _Clock()
        return StoreUnderTest(MemoryIdempotencyRepository(clock=clock), clock.advance)
