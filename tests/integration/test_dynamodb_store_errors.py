"""Errors of DynamoDB, translated into errors of the library.

DynamoDB Local neither throttles requests nor checks credentials, so a proxy in front of it (`DynamoFront`) returns the
errors of DynamoDB.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from integr8s_idem.records import Completed, Completion, Reserved
from integr8s_idem.stores.dynamodb import DynamoIdempotencyRepository, dynamo_client, migrate
from integr8s_idem.testing.store_under_test import LEASE, RETENTION, TTL, new_key, wish
from tests.support.dynamodb.fixtures import Table, own_dynamodb
from tests.support.dynamodb.front import DynamoFront
from tests.support.dynamodb.server import DynamoServer
from tests.support.fault_proxy import Cut, FaultProxy, Refuse

TIMEOUT = timedelta(seconds=3)


@pytest.fixture
async def front(dynamodb: DynamoServer) -> AsyncIterator[DynamoFront]:
    async with DynamoFront(dynamodb.port) as front:
        yield front


@asynccontextmanager
async def store_at(
    table: Table, url: str, timeout: timedelta = TIMEOUT, name: str = ""
) -> AsyncIterator[DynamoIdempotencyRepository]:
    changed = table.settings.model_copy(update={"endpoint_url": url, "table": name or table.name})
    async with dynamo_client(changed) as client:
        yield DynamoIdempotencyRepository(client, changed.table, timeout=timeout)


@pytest.fixture
async def store(front: DynamoFront, table: Table) -> AsyncIterator[DynamoIdempotencyRepository]:
    async with store_at(table, front.url) as store:
        assert await works(store)
        yield store


async def error_of(store: DynamoIdempotencyRepository) -> StoreError:
    """Return the error of a reservation; a ping must fail with the same type."""
    with pytest.raises(StoreError) as pinged:
        await store.ping()
    with pytest.raises(StoreError) as reserved:
        await store.reserve([wish(new_key())])
    assert type(reserved.value) is type(pinged.value)
    assert "canary" not in str(reserved.value)
    return reserved.value


async def works(store: DynamoIdempotencyRepository) -> bool:
    (verdict,) = await store.reserve([wish(new_key())])
    return isinstance(verdict, Reserved)


@pytest.mark.scenario(59)
async def test_a_missing_table_is_reported_with_the_command_to_create_it(table: Table) -> None:
    name = f"idem-{uuid4().hex}"
    async with store_at(table, str(table.settings.endpoint_url), name=name) as store:
        error = await error_of(store)
        assert isinstance(error, StoreConfigurationError)
        assert f"the table {name} does not exist" in str(error)
        assert "run: integr8s-idem store migrate" in str(error)

        assert await migrate(store.client, name) == [f"create table {name}", "enable TTL on purge_at"]
        assert await migrate(store.client, name) == []
        assert await works(store)
        assert (await store.ping()).warnings == ()


async def test_several_processes_can_create_the_table_concurrently(table: Table) -> None:
    name = f"idem-{uuid4().hex}"

    done = await asyncio.gather(*(migrate(table.client, name) for _ in range(4)))

    assert sum(f"create table {name}" in steps for steps in done) == 1


async def create_table(client: Any, keys: list[tuple[str, str]], types: str = "S") -> str:
    name = f"idem-{uuid4().hex}"
    await client.create_table(
        TableName=name,
        KeySchema=[{"AttributeName": attribute, "KeyType": kind} for attribute, kind in keys],
        AttributeDefinitions=[{"AttributeName": attribute, "AttributeType": types} for attribute, _ in keys],
        BillingMode="PAY_PER_REQUEST",
    )
    return name


@pytest.mark.scenario(59)
@pytest.mark.parametrize(
    ("keys", "types"), [([("pk", "HASH")], "S"), ([("key", "HASH"), ("at", "RANGE")], "S"), ([("key", "HASH")], "B")]
)
async def test_a_table_with_other_keys_is_refused(table: Table, keys: list[tuple[str, str]], types: str) -> None:
    name = await create_table(table.client, keys, types)

    with pytest.raises(StoreConfigurationError, match=r"the store needs only key \(S\): choose another table"):
        await migrate(table.client, name)
    async with store_at(table, str(table.settings.endpoint_url), name=name) as store:
        error = await error_of(store)

    assert isinstance(error, StoreConfigurationError)
    assert "has other keys than the store needs" in str(error)


async def test_a_table_with_another_ttl_attribute_is_refused(table: Table) -> None:
    spec = {"Enabled": True, "AttributeName": "ttl"}
    await table.client.update_time_to_live(TableName=table.name, TimeToLiveSpecification=spec)

    with pytest.raises(StoreConfigurationError, match="is ttl, the store needs purge_at"):
        await migrate(table.client, table.name)


async def test_an_unreachable_or_frozen_server_is_an_outage_until_it_responds(aws: None) -> None:
    with own_dynamodb() as server:
        async with dynamo_client(server.settings()) as client:
            await migrate(client, "idem")
            store = DynamoIdempotencyRepository(client, "idem")
            assert await works(store)

            server.stop_signal()
            frozen = await error_of(DynamoIdempotencyRepository(client, "idem", timeout=timedelta(seconds=0.5)))
            server.continue_signal()
            assert await works(store)
            await asyncio.to_thread(server.kill)
            unreachable = await error_of(store)

    assert isinstance(frozen, StoreUnavailableError)
    assert isinstance(unreachable, StoreUnavailableError)
    assert "within 0.5 s" in str(frozen)
    assert "no connection to DynamoDB" in str(unreachable)


THROTTLING = ["ProvisionedThroughputExceededException", "RequestLimitExceeded", "ThrottlingException"]


@pytest.mark.scenario(57)
@pytest.mark.parametrize("code", THROTTLING)
async def test_a_throttled_request_is_retried(
    store: DynamoIdempotencyRepository, front: DynamoFront, code: str
) -> None:
    front.requests.clear()
    front.refuse(code, times=3)

    assert await works(store)

    assert front.requests == ["PutItem"] * 4


@pytest.mark.scenario(57)
@pytest.mark.parametrize("code", THROTTLING)
async def test_persistent_throttling_is_an_outage_after_the_timeout(
    store: DynamoIdempotencyRepository, front: DynamoFront, table: Table, code: str
) -> None:
    front.refuse(code)
    async with store_at(table, front.url, timedelta(seconds=1.5)) as impatient:
        error = await error_of(impatient)

    assert isinstance(error, StoreUnavailableError)
    assert "throughput" in str(error) or "throttles" in str(error)
    front.allow()
    assert await works(store)


async def test_a_service_error_is_retried(store: DynamoIdempotencyRepository, front: DynamoFront) -> None:
    front.refuse("InternalServerError", status=500, times=2)

    assert await works(store)


@pytest.mark.scenario(52)
@pytest.mark.parametrize(
    ("code", "message", "expected", "text"),
    [
        ("UnrecognizedClientException", "The security token included in the request is invalid.",
         StoreConfigurationError, "does not know this access key"),
        ("InvalidSignatureException", "The request signature we calculated does not match the signature you provided.",
         StoreConfigurationError, "check the secret access key"),
        ("InvalidSignatureException", "Signature expired: 20300101T000000Z is now earlier than 20300101T001000Z",
         StoreUnavailableError, "this machine's clock"),
        ("ExpiredTokenException", "The security token included in the request is expired",
         StoreConfigurationError, "have expired"),
        ("AccessDeniedException", "User: a is not authorized to perform: dynamodb:PutItem on resource: idem",
         StoreConfigurationError, "not authorized to perform: dynamodb:PutItem"),
        ("SomethingNewException", "sorry", StoreConfigurationError, "DynamoDB reported SomethingNewException: sorry"),
        ("SomethingNewException", "https://user:canary@host/ is away", StoreConfigurationError, "***@host"),
    ],
)  # fmt: skip
async def test_an_error_response_is_translated_with_a_remedy(
    table: Table, front: DynamoFront, code: str, message: str, expected: type[StoreError], text: str
) -> None:
    front.refuse(code, message=message)
    async with store_at(table, front.url, timedelta(seconds=1.5)) as store:
        error = await error_of(store)

    assert isinstance(error, expected)
    assert text in str(error)


@pytest.mark.parametrize(
    ("code", "warned"), [("AccessDeniedException", ["cannot be read"]), ("ThrottlingException", [])]
)
async def test_unreadable_settings_of_the_table_do_not_stop_the_store(
    store: DynamoIdempotencyRepository, front: DynamoFront, code: str, warned: list[str]
) -> None:
    front.refuse(code, only="Describe")

    warnings = (await store.ping()).warnings

    assert [said for said, warning in zip(warned, warnings, strict=True) if said in warning] == warned


@pytest.mark.scenario(52)
async def test_without_credentials_nothing_is_sent(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    async with store_at(table, str(table.settings.endpoint_url)) as store:
        error = await error_of(store)

    assert isinstance(error, StoreConfigurationError)
    assert "no AWS credentials" in str(error)


@pytest.mark.parametrize(
    ("variable", "text"), [({}, "set region in [store], or AWS_REGION"), ({"AWS_PROFILE": "none"}, "(none)")]
)
async def test_an_invalid_client_configuration_is_reported(
    aws: None, monkeypatch: pytest.MonkeyPatch, dynamodb: DynamoServer, variable: dict[str, str], text: str
) -> None:
    for name, value in variable.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(StoreConfigurationError) as caught:
        async with dynamo_client(dynamodb.settings(region=None)):
            pass

    assert text in str(caught.value)


@pytest.mark.parametrize(("piece", "other"), [(b"{", b"<"), (b"x-amzn-requestid", b"x-served-by")])
async def test_a_corrupt_or_foreign_response_is_an_outage(
    store: DynamoIdempotencyRepository, front: DynamoFront, piece: bytes, other: bytes
) -> None:
    front.rewrite = lambda answer: re.sub(piece, other, answer, count=1, flags=re.IGNORECASE)

    error = await error_of(store)

    assert isinstance(error, StoreUnavailableError)
    assert "the response is not from DynamoDB, or is corrupt" in str(error)


async def test_responses_without_a_date_are_refused(table: Table, front: DynamoFront) -> None:
    front.rewrite = lambda answer: answer.replace(b"\r\nDate:", b"\r\nX-Date:", 1)
    async with store_at(table, front.url) as store:
        error = await error_of(store)

    assert isinstance(error, StoreConfigurationError)
    assert "have no Date" in str(error)


# Responses that are lost after the server has executed the request.


@asynccontextmanager
async def lossy(table: Table, server: DynamoServer) -> AsyncIterator[tuple[DynamoIdempotencyRepository, FaultProxy]]:
    async with FaultProxy(server.port) as proxy, store_at(table, f"http://127.0.0.1:{proxy.address}") as store:
        assert await works(store)
        yield store, proxy


@pytest.mark.scenario(57)
async def test_a_retry_finds_the_reservation_whose_response_was_lost(table: Table, dynamodb: DynamoServer) -> None:
    async with lossy(table, dynamodb) as (store, proxy):
        lost = proxy.put(Cut(matching=b".PutItem"))
        (verdict,) = await store.reserve([wish(new_key())])
        (record,) = await store.get([verdict.key])

    assert lost.struck == 1
    assert isinstance(verdict, Reserved)
    assert record is not None
    assert (verdict.attempt, record.attempt, record.fence) == (1, 1, verdict.fence)


@pytest.mark.parametrize("verb", ["renew", "prolong", "complete", "release"])
async def test_a_write_whose_response_was_lost_succeeds(table: Table, dynamodb: DynamoServer, verb: str) -> None:
    async with lossy(table, dynamodb) as (store, proxy):
        (reserved,) = await store.reserve([wish(new_key())])
        assert isinstance(reserved, Reserved)
        # Only the second request of a longer renewal writes.
        lost = proxy.put(Cut(matching=b".UpdateItem", also=b"purge_at" if verb == "prolong" else b""))
        match verb:
            case "renew":
                results = await store.renew([reserved], LEASE)
            case "prolong":
                results = await store.renew([reserved], 2 * RETENTION)
            case "complete":
                results = await store.complete([Completion(reservation=reserved, ttl=TTL)])
            case _:
                results = await store.release([reserved])

    assert lost.struck == 1
    assert results == [True]


async def test_a_completion_whose_response_was_lost_is_found_by_the_next_call(
    table: Table, dynamodb: DynamoServer
) -> None:
    async with lossy(table, dynamodb) as (store, proxy):
        (reserved,) = await store.reserve([wish(new_key())])
        assert isinstance(reserved, Reserved)
        with proxy.fault(Cut(matching=b".UpdateItem", times=None)), pytest.raises(StoreUnavailableError):
            await store.complete([Completion(reservation=reserved, ttl=TTL)])

        assert await store.complete([Completion(reservation=reserved, ttl=TTL)]) == [True]
        (verdict,) = await store.reserve([wish(reserved.key)])

    assert isinstance(verdict, Completed)


async def test_the_first_error_cancels_the_rest_of_a_batch(table: Table, dynamodb: DynamoServer) -> None:
    async with lossy(table, dynamodb) as (store, proxy):
        with proxy.fault(Refuse()):
            proxy.reset()
            with pytest.raises(StoreUnavailableError, match="no connection to DynamoDB"):
                await store.reserve([wish(new_key()) for _ in range(100)])

        assert not [task for task in asyncio.all_tasks() if "work" in str(task.get_coro())]
        assert await works(store)
