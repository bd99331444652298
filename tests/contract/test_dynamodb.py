"""The contract suite on DynamoDB Local."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import pytest

from integr8s_idem.errors import CorruptRecordError
from integr8s_idem.records import Corrupt, Reserved
from integr8s_idem.stores.dynamodb import DynamoIdempotencyRepository
from integr8s_idem.testing.contract import HistorySize, RecordAdminContract, RepositoryContract, StoreUnderTest
from integr8s_idem.testing.store_under_test import take, wish
from tests.support.dynamodb.clocks import VirtualClock
from tests.support.dynamodb.fixtures import Table

INVALID_NUMBERS = {
    "lease_far_in_the_future": {"lease_until": 10**37},
    "expiry_far_in_the_future": {"expires_at": 10**37},
    "negative_attempt": {"attempt": -1},
    "negative_previous": {"previous": -1},
    "settled_far_in_the_future": {"status": 2, "settled_at": 10**37},
}


class TestDynamoDB(RepositoryContract, RecordAdminContract):
    # Each key is a request of some milliseconds.
    histories = HistorySize(histories=6)
    large_batch = 100

    @pytest.fixture
    async def store(self, table: Table) -> StoreUnderTest:
        clock = VirtualClock(time.time_ns() // 1_000)

        async def advance(duration: timedelta) -> None:
            clock.now += duration // timedelta(microseconds=1)

        async def spoil(key: str) -> None:
            await table.client.put_item(TableName=table.name, Item={"key": {"S": key}, "status": {"S": "completed"}})

        repository = DynamoIdempotencyRepository(table.client, table.name, clock=clock)
        return StoreUnderTest(repository, advance, spoil, largest_result=400_000)

    @pytest.mark.parametrize("damage", INVALID_NUMBERS.values(), ids=INVALID_NUMBERS)
    async def test_an_item_with_an_invalid_number_does_not_affect_the_rest_of_its_batch(
        self, store: StoreUnderTest, table: Table, damage: dict[str, int]
    ) -> None:
        root = f"contract:{uuid.uuid4().hex}:"
        bad, good = root + "bad", root + "good"
        await take(store, bad)
        found = await table.client.get_item(TableName=table.name, Key={"key": {"S": bad}})
        values = {name: {"N": str(value)} for name, value in damage.items()}
        await table.client.put_item(TableName=table.name, Item=found["Item"] | values)

        first, second = await store.repository.reserve([wish(bad), wish(good)])

        assert isinstance(first, Corrupt)
        assert isinstance(second, Reserved)
        with pytest.raises(CorruptRecordError):
            await store.repository.get([good, bad])
        assert isinstance(store.repository, DynamoIdempotencyRepository)
        assert [record.key async for record in store.repository.scan(root)] == [good]
        assert await store.repository.delete([bad]) == 1
