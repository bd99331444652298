"""The contract of all stores, held by the one in DynamoDB: on DynamoDB Local."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from integr8s_idem.stores.dynamodb import DynamoIdempotencyRepository
from integr8s_idem.stores.dynamodb.clock import ServerClock
from integr8s_idem.testing.contract import HistorySize, RepositoryContract, StoreUnderTest
from tests.support.dynamodb.fixtures import Table


class VirtualClock(ServerClock):
    """This machine's clock, put forward by the tests; what DynamoDB's answers tell of the time is not heard."""

    ahead = 0
    known = True

    def earliest(self) -> int:
        return time.time_ns() // 1_000 + self.ahead

    def latest(self) -> int:
        return self.earliest()


class TestDynamoDB(RepositoryContract):
    histories = HistorySize(histories=20)

    @pytest.fixture
    async def store(self, table: Table) -> StoreUnderTest:
        clock = VirtualClock()

        async def advance(duration: timedelta) -> None:
            clock.ahead += duration // timedelta(microseconds=1)

        async def spoil(key: str) -> None:
            await table.client.put_item(TableName=table.name, Item={"key": {"S": key}, "status": {"S": "completed"}})

        return StoreUnderTest(DynamoIdempotencyRepository(table.client, table.name, clock=clock), advance, spoil)
