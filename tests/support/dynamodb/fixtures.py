"""Fixtures: `dynamodb`, a DynamoDB Local for the session; `aws`, credentials; `table`, a table for a test."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from integr8s_idem.config import DynamodbStoreSettings
from integr8s_idem.stores.dynamodb import dynamo_client
from integr8s_idem.stores.dynamodb.table import KEYS, TYPES
from tests.support.dynamodb.server import CREDENTIALS, DynamoServer
from tests.support.kafka.broker import ToolsMissingError
from tests.support.kafka.fixtures import skip_or_fail


@dataclass(frozen=True)
class Table:
    """A table and a client for it."""

    client: Any
    settings: DynamodbStoreSettings

    @property
    def name(self) -> str:
        return self.settings.table


@contextmanager
def own_dynamodb() -> Iterator[DynamoServer]:
    """Start a server for a test that stops or pauses it; takes two seconds."""
    try:
        server = DynamoServer()
    except ToolsMissingError as missing:
        skip_or_fail(str(missing))
    with server:
        yield server


@pytest.fixture(scope="session")
def dynamodb() -> Iterator[DynamoServer]:
    """Share a server; never stop or pause it."""
    with own_dynamodb() as server:
        yield server


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set credentials for DynamoDB Local, and hide those of this machine."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
async def table(dynamodb: DynamoServer, aws: None) -> AsyncIterator[Table]:
    settings = dynamodb.settings(table=f"idem-{uuid4().hex}")
    async with dynamo_client(settings) as client:
        # Five times as fast as `migrate`, which has its own tests.
        await client.create_table(
            TableName=settings.table, KeySchema=KEYS, AttributeDefinitions=TYPES, BillingMode="PAY_PER_REQUEST"
        )
        yield Table(client, settings)
        await client.delete_table(TableName=settings.table)
