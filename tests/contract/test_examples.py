"""The contract suite on the example store of docs/how-to/write-a-store.md, used as that page describes."""

import pytest

from examples.dict_store import DictStore
from integr8s_idem.testing import RepositoryContract, SteppedClock, StoreUnderTest


class TestDictStore(RepositoryContract):
    @pytest.fixture
    def store(self) -> StoreUnderTest:
        clock = SteppedClock()
        return StoreUnderTest(DictStore(clock), clock.advance)
