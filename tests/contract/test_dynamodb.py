"""The contract suite on DynamoDB Local."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from integr8s_idem.stores.dynamodb import DynamoIdempotencyRepository
from integr8s_idem.testing.contract import HistorySize, RecordAdminContract, RepositoryContract, StoreUnderTest
from tests.support.dynamodb.clocks import VirtualClock
from tests.support.dynamodb.fixtures import Table


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
