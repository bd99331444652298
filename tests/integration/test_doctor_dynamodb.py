"""Findings of `doctor` for faults planted in DynamoDB Local, or simulated by a proxy that returns DynamoDB's errors."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

from integr8s_idem.config import DynamodbStoreSettings, Settings
from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.doctor.permissions import access_of
from integr8s_idem.records import Reserved
from integr8s_idem.stores.dynamodb import DynamoIdempotencyRepository, dynamo_client, migrate
from integr8s_idem.testing.store_under_test import LEASE, RETENTION, new_key, wish
from tests.packaging.repository import ROOT
from tests.support.doctor import Typed, codes, found_in_store
from tests.support.dynamodb.fixtures import Table
from tests.support.dynamodb.front import DynamoFront
from tests.support.dynamodb.server import DynamoServer

DRIVER = re.compile(r"client\.([a-z]+(?:_[a-z]+)+|scan)\b")


def printed(statement: str) -> set[str]:
    """Return the actions of one statement of `doctor --acl`."""
    policy = json.loads(access_of(Settings(store=DynamodbStoreSettings(kind="dynamodb", table="idem"))))
    (actions,) = [one["Action"] for one in policy["Statement"] if one["Sid"] == statement]
    return {action.removeprefix("dynamodb:") for action in actions}


@pytest.fixture
async def front(dynamodb: DynamoServer) -> AsyncIterator[DynamoFront]:
    async with DynamoFront(dynamodb.port) as front:
        yield front


@pytest.fixture
async def migrated(table: Table, front: DynamoFront) -> DynamodbStoreSettings:
    """Settings of a migrated table, behind the proxy."""
    await migrate(table.client, table.name)
    return table.settings.model_copy(update={"endpoint_url": front.url})


async def use_all(store: DynamoIdempotencyRepository) -> None:
    """Make the requests that `doctor` does not: for existing records, and for a lease that outlives its record."""
    (first,) = await store.reserve([wish(new_key())])
    assert isinstance(first, Reserved)
    await store.release([first])
    (second,) = await store.reserve([wish(first.key)])
    assert isinstance(second, Reserved)
    assert await store.renew([second], 2 * RETENTION) == [True]
    await store.reserve([wish(first.key)])


async def test_a_correct_table_has_no_findings(migrated: DynamodbStoreSettings) -> None:
    (seen,) = await found_in_store(migrated)

    assert (seen.code, seen.severity) == (Code.STORE_SEEN, Severity.INFO)
    assert seen.what.startswith("dynamodb answers in ")


async def test_a_worker_sends_exactly_the_printed_actions(migrated: DynamodbStoreSettings, front: DynamoFront) -> None:
    front.requests.clear()

    await found_in_store(migrated)
    async with dynamo_client(migrated) as client:
        await use_all(DynamoIdempotencyRepository(client, migrated.table, timeout=LEASE))

    assert set(front.requests) == printed("Worker")


async def test_migrate_sends_exactly_the_printed_actions(table: Table, front: DynamoFront) -> None:
    changed = table.settings.model_copy(update={"endpoint_url": front.url})

    async with dynamo_client(changed) as client:
        await migrate(client, f"idem-{uuid4().hex}")

    assert set(front.requests) == printed("Migrate")


def test_only_the_printed_actions_are_called() -> None:
    folder = ROOT / "integr8s_idem" / "stores" / "dynamodb"
    called = {name for file in folder.glob("*.py") for name in DRIVER.findall(file.read_text(encoding="utf-8"))}

    actions = {"".join(word.capitalize() for word in name.split("_")) for name in called}

    assert actions == printed("Worker") | printed("Migrate")


@pytest.mark.parametrize("action", sorted(printed("Worker")))
async def test_each_denied_action_is_found(migrated: DynamodbStoreSettings, front: DynamoFront, action: str) -> None:
    denied = f"User: a is not authorized to perform: dynamodb:{action} on resource: idem"
    front.refuse("AccessDeniedException", message=denied, only=action)

    found = await found_in_store(migrated)

    missed = [one for one in found if one.code in (Code.STORE_PERMISSION, Code.STORE_UNSEEN)]
    assert any(f"dynamodb:{action}" in str(one) for one in missed), found


async def found_when_refused(migrated: DynamodbStoreSettings, front: DynamoFront, code: str, message: str) -> Finding:
    front.refuse(code, message=message)
    (only,) = await found_in_store(migrated.model_copy(update={"timeout_seconds": 1}))
    return only


@pytest.mark.parametrize(
    ("refusal", "message", "code"),
    [
        ("UnrecognizedClientException", "The security token included in the request is invalid.", "store-credentials"),
        ("InvalidSignatureException", "The request signature we calculated does not match", "store-credentials"),
        ("ExpiredTokenException", "The security token included in the request is expired", "store-credentials"),
        ("InvalidSignatureException", "Signature expired: 20300101T000000Z is now earlier", "clock-skew"),
        ("ThrottlingException", "", "store-unavailable"),
    ],
)
async def test_an_error_response_has_its_code(
    migrated: DynamodbStoreSettings, front: DynamoFront, refusal: str, message: str, code: str
) -> None:
    found = await found_when_refused(migrated, front, refusal, message)

    assert (found.code.value, found.severity) == (code, Severity.ERROR)


async def test_missing_credentials_are_found(migrated: DynamodbStoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    (only,) = await found_in_store(migrated)

    assert (only.code, only.severity) == (Code.STORE_CREDENTIALS, Severity.ERROR)


async def test_a_missing_table_is_found(migrated: DynamodbStoreSettings) -> None:
    (only,) = await found_in_store(migrated.model_copy(update={"table": f"idem-{uuid4().hex}"}))

    assert (only.code, only.severity) == (Code.SCHEMA_MISSING, Severity.ERROR)
    assert "store migrate" in only.remedy


@pytest.mark.parametrize(("key", "type_"), [("pk", "S"), ("key", "B")])
async def test_a_table_with_other_keys_is_found(
    migrated: DynamodbStoreSettings, table: Table, key: str, type_: str
) -> None:
    name = f"idem-{uuid4().hex}"
    await table.client.create_table(
        TableName=name,
        KeySchema=[{"AttributeName": key, "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": type_}],
        BillingMode="PAY_PER_REQUEST",
    )

    found = await found_in_store(migrated.model_copy(update={"table": name}))

    assert codes(found) == ["schema-other"]


@pytest.mark.parametrize("attribute", [None, "ttl"])
async def test_a_table_with_a_missing_or_wrong_ttl_is_found(table: Table, attribute: str | None) -> None:
    if attribute is not None:
        spec = {"Enabled": True, "AttributeName": attribute}
        await table.client.update_time_to_live(TableName=table.name, TimeToLiveSpecification=spec)

    found = await found_in_store(table.settings)

    assert codes(found) == ["store-not-purged"]


async def test_a_table_of_several_regions_is_found(migrated: DynamodbStoreSettings) -> None:
    """The client simulates the replicas, which DynamoDB Local does not support."""
    async with dynamo_client(migrated) as client:
        describe = client.describe_table

        async def replicated(**arguments: Any) -> Any:
            answer = await describe(**arguments)
            answer["Table"]["Replicas"] = [{"RegionName": "eu-west-1"}]
            return answer

        client.describe_table = replicated
        (warning,) = (await DynamoIdempotencyRepository(client, migrated.table).ping()).warnings

    assert getattr(warning, "code", None) is Code.STORE_REGIONS


async def test_an_unreachable_server_is_found(migrated: DynamodbStoreSettings) -> None:
    unreachable = migrated.model_copy(update={"endpoint_url": "http://127.0.0.1:1", "timeout_seconds": 0.5})

    assert codes(await found_in_store(unreachable)) == ["store-unavailable"]


@pytest.mark.parametrize(("shift", "way"), [(-60.0, "ahead of"), (60.0, "behind")])
async def test_clock_skew_is_found(migrated: DynamodbStoreSettings, shift: float, way: str) -> None:
    found = await found_in_store(migrated, lambda: time.time() + shift)

    (skew,) = [one for one in found if one.code is Code.CLOCK_SKEW]
    assert way in skew.what


@pytest.mark.parametrize(
    ("done", "status", "code"),
    [("nothing", 2, "schema-missing"), ("created", 1, "store-not-purged"), ("migrated", 0, "store-seen")],
)
def test_the_command_exits_with_its_status(
    dynamodb: DynamoServer, aws: None, typed: Typed, done: str, status: int, code: str
) -> None:
    settings = dynamodb.settings(table=f"idem-{uuid4().hex}")

    async def prepare() -> None:
        async with dynamo_client(settings) as client:
            await migrate(client, settings.table)
            if done == "created":
                spec = {"Enabled": False, "AttributeName": "purge_at"}
                await client.update_time_to_live(TableName=settings.table, TimeToLiveSpecification=spec)

    if done != "nothing":
        asyncio.run(prepare())
    answer = typed(settings)

    assert (answer.status, answer.codes[0]) == (status, code)
