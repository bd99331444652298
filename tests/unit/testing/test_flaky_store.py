"""The store with configurable failures."""

from __future__ import annotations

from datetime import timedelta

import pytest

from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.records import Reserved, ReserveRequest
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing import FlakyStore

REQUEST = ReserveRequest(key="order:1", token=b"t" * 16, lease=timedelta(seconds=30), retention=timedelta(hours=1))


@pytest.fixture
def store() -> FlakyStore:
    return FlakyStore(MemoryIdempotencyRepository())


async def test_a_failing_call_is_not_executed(store: FlakyStore) -> None:
    store.fail_next("reserve", times=1)

    with pytest.raises(StoreUnavailableError):
        await store.reserve([REQUEST])

    assert await store.get(["order:1"]) == [None]
    assert isinstance((await store.reserve([REQUEST]))[0], Reserved)


async def test_a_call_whose_answer_is_lost_is_executed(store: FlakyStore) -> None:
    store.lose_answer("reserve")

    with pytest.raises(StoreUnavailableError):
        await store.reserve([REQUEST])

    assert await store.get(["order:1"]) != [None]


async def test_no_call_is_answered_during_an_outage(store: FlakyStore) -> None:
    store.down.add("delete")

    with store.outage(), pytest.raises(StoreUnavailableError):
        await store.ping()

    await store.ping()
    assert store.down == {"delete"}


def test_an_unknown_operation_is_rejected(store: FlakyStore) -> None:
    with pytest.raises(ValueError, match=r"unknown store operation 'reserv'; known are complete, count_active"):
        store.fail_next("reserv")
