"""A test suite for implementations of stores.

    from integr8s_idem.testing import RepositoryContract, SteppedClock, StoreUnderTest


    class TestMyStore(RepositoryContract):
        @pytest.fixture
        def store(self) -> StoreUnderTest:
            clock = SteppedClock()
            return StoreUnderTest(MyStore(clock), clock.advance)

For a store with a server, use an async fixture, and an `advance` that makes the records older; see
docs/how-to/write-a-store.md.

It needs hypothesis, and pytest with an asyncio plugin that runs `async def` tests (pytest-asyncio in auto mode).  The
store may contain records: every test uses its own keys.
"""

from __future__ import annotations

import pytest

# Before the modules are imported, so that failing assertions show their values.
pytest.register_assert_rewrite(
    "integr8s_idem.testing.contract_batches",
    "integr8s_idem.testing.contract_reservations",
    "integr8s_idem.testing.contract_outcomes",
    "integr8s_idem.testing.contract_payloads",
    "integr8s_idem.testing.contract_record_admin",
    "integr8s_idem.testing.contract_schedules",
    "integr8s_idem.testing.random_histories",
    "integr8s_idem.testing.store_under_test",
)

from integr8s_idem.testing.contract_batches import BatchesContract  # noqa: E402
from integr8s_idem.testing.contract_outcomes import SettlingContract  # noqa: E402
from integr8s_idem.testing.contract_payloads import PayloadContract  # noqa: E402
from integr8s_idem.testing.contract_record_admin import RecordAdminContract  # noqa: E402
from integr8s_idem.testing.contract_reservations import ReservingContract  # noqa: E402
from integr8s_idem.testing.contract_schedules import SchedulingContract  # noqa: E402
from integr8s_idem.testing.random_histories import HistorySize, check_histories  # noqa: E402
from integr8s_idem.testing.store_under_test import SteppedClock, StoreUnderTest  # noqa: E402

__all__ = ["HistorySize", "RecordAdminContract", "RepositoryContract", "SteppedClock", "StoreUnderTest"]


class RepositoryContract(ReservingContract, SchedulingContract, PayloadContract, SettlingContract, BatchesContract):
    """Inherit from this class and define a fixture `store`.  `histories` and `large_batch` limit the effort."""

    histories = HistorySize()

    async def test_any_history_agrees_with_the_model(self, store: StoreUnderTest) -> None:
        await check_histories(store.repository, store.advance, self.histories)
