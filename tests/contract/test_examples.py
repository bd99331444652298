"""The contract of all stores, held by the one that docs/how-to/write-a-store.md walks through, as it says to."""

import pytest

from examples.dict_store import DictStore
from integr8s_idem.testing import RepositoryContract, SteppedClock, StoreUnderTest


class TestDictStore(RepositoryContract):
    @pytest.fixture
    def store(self) -> StoreUnderTest:
        clock = SteppedClock()
        return StoreUnderTest(DictStore(clock), clock.advance)
