"""What every store must do: a test suite that a store runs over itself.

    from integr8s_idem.testing import RepositoryContract, SteppedClock, StoreUnderTest


    class TestMyStore(RepositoryContract):
        @pytest.fixture
        def store(self) -> StoreUnderTest:
            clock = SteppedClock()
            return StoreUnderTest(MyStore(clock), clock.advance)

A store with a server has an async fixture, and an `advance` that makes the records older.  docs/how-to/write-a-store.md
tells more.

Needs pytest with an asyncio plugin that runs `async def` tests (pytest-asyncio in auto mode),
and hypothesis.  The store need not be empty: every test has keys of its own.
"""

from __future__ import annotations

import pytest

# Before they are imported: failing assertions then show their values.
pytest.register_assert_rewrite(
    "integr8s_idem.testing.contract_batches",
    "integr8s_idem.testing.contract_reservations",
    "integr8s_idem.testing.contract_outcomes",
    "integr8s_idem.testing.contract_record_admin",
    "integr8s_idem.testing.random_histories",
    "integr8s_idem.testing.store_under_test",
)

from integr8s_idem.testing.contract_batches import BatchesContract  # noqa: E402
from integr8s_idem.testing.contract_outcomes import SettlingContract  # noqa: E402
from integr8s_idem.testing.contract_record_admin import RecordAdminContract  # noqa: E402
from integr8s_idem.testing.contract_reservations import ReservingContract  # noqa: E402
from integr8s_idem.testing.random_histories import HistorySize, check_histories  # noqa: E402
from integr8s_idem.testing.store_under_test import SteppedClock, StoreUnderTest  # noqa: E402

__all__ = ["HistorySize", "RecordAdminContract", "RepositoryContract", "SteppedClock", "StoreUnderTest"]


class RepositoryContract(ReservingContract, SettlingContract, BatchesContract):
    """Inherit, and give a fixture `store`.  `histories` and `large_batch` say how much to spend."""

    histories = HistorySize()

    async def test_any_history_agrees_with_the_model(self, store: StoreUnderTest) -> None:
        await check_histories(store.repository, store.advance, self.histories)
