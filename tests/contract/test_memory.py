"""The contract suite on the memory store."""

from __future__ import annotations

import pytest

from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.contract import (
    HistorySize,
    RecordAdminContract,
    RepositoryContract,
    SteppedClock,
    StoreUnderTest,
)


class TestMemoryStore(RepositoryContract, RecordAdminContract):
    histories = HistorySize(histories=200, steps=40)
    # Its records are objects, which cannot be unreadable.
    test_an_unreadable_record_does_not_fail_its_batch = None  # type: ignore[assignment]
    test_a_survey_includes_unreadable_records = None  # type: ignore[assignment]

    @pytest.fixture
    def store(self) -> StoreUnderTest:
        clock = SteppedClock()
        return StoreUnderTest(MemoryIdempotencyRepository(clock=clock), clock.advance)
