"""The store that fails when it is told to."""

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


async def test_a_call_that_fails_is_not_executed(store: FlakyStore) -> None:
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


async def test_in_an_outage_nothing_is_answered_and_behind_it_all_is_as_before(store: FlakyStore) -> None:
    store.down.add("delete")

    with store.outage(), pytest.raises(StoreUnavailableError):
        await store.ping()

    await store.ping()
    assert store.down == {"delete"}


def test_a_verb_that_no_store_knows_is_refused(store: FlakyStore) -> None:
    with pytest.raises(ValueError, match=r'no verb "?\'?reserv\'?"?; it knows complete, count_active'):
        store.fail_next("reserv")
