"""The DynamoDB store beyond the contract of all stores: requests, clock and tombstones, on DynamoDB Local."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from msgspec.structs import replace

from integr8s_idem.config.store_sections import MOST_RESULT_BYTES
from integr8s_idem.records import (
    Completed,
    Completion,
    InProgress,
    Previous,
    Reserved,
    ReserveRequest,
    StoredResult,
    TraceLink,
)
from integr8s_idem.stores.dynamodb import DynamoIdempotencyRepository, dynamo_client
from integr8s_idem.testing.store_under_test import LEASE, RETENTION, TTL, new_key, wish
from tests.support.dynamodb.clocks import VirtualClock
from tests.support.dynamodb.fixtures import Table
from tests.support.dynamodb.front import DynamoFront
from tests.support.dynamodb.server import DynamoServer

NOW = 1_900_000_000_000_000
HOUR = timedelta(hours=1)


@pytest.fixture
async def front(dynamodb: DynamoServer, table: Table) -> AsyncIterator[DynamoFront]:
    async with DynamoFront(dynamodb.port) as front:
        yield front


@pytest.fixture
async def store(front: DynamoFront, table: Table) -> AsyncIterator[DynamoIdempotencyRepository]:
    """A store with a counter of requests and a virtual clock."""
    async with dynamo_client(table.settings.model_copy(update={"endpoint_url": front.url})) as client:
        yield DynamoIdempotencyRepository(client, table.name, clock=VirtualClock(NOW))


def clock_of(store: DynamoIdempotencyRepository) -> VirtualClock:
    assert isinstance(store._clock, VirtualClock)
    return store._clock


async def take(store: DynamoIdempotencyRepository, request: ReserveRequest) -> Reserved:
    (verdict,) = await store.reserve([request])
    assert isinstance(verdict, Reserved)
    return verdict


async def item_of(table: Table, key: str) -> dict[str, dict[str, str]]:
    answer = await table.client.get_item(TableName=table.name, Key={"key": {"S": key}}, ConsistentRead=True)
    item: dict[str, dict[str, str]] = answer["Item"]
    return item


async def test_each_operation_takes_one_request_per_key(store: DynamoIdempotencyRepository, front: DynamoFront) -> None:
    first, second, third = [await take(store, wish(new_key())) for _ in range(3)]
    assert await store.renew([first], LEASE) == [True]
    assert await store.complete([Completion(reservation=first, ttl=TTL)]) == [True]
    assert await store.complete([Completion(reservation=first, ttl=TTL)]) == [True]
    assert await store.release([second]) == [True]
    duplicate, held = await store.reserve([wish(first.key), wish(third.key)])

    assert (type(duplicate), type(held)) == (Completed, InProgress)
    assert front.requests == ["PutItem"] * 3 + ["UpdateItem"] * 4 + ["PutItem"] * 2


@pytest.mark.parametrize("state", ["released", "lapsed", "expired", "deleted", "own, response lost"])
async def test_an_existing_item_takes_a_second_request(
    store: DynamoIdempotencyRepository, front: DynamoFront, state: str
) -> None:
    request = wish(new_key())
    first = await take(store, request)
    match state:
        case "released":
            await store.release([first])
        case "lapsed":
            clock_of(store).now += LEASE // timedelta(microseconds=1)
        case "expired":
            clock_of(store).now += RETENTION // timedelta(microseconds=1)
        case "deleted":
            await store.delete([first.key])
    front.requests.clear()

    second = await take(store, request if "own" in state else wish(first.key))

    assert front.requests == ["PutItem", "PutItem"]
    assert second.attempt == {"released": 2, "lapsed": 2}.get(state, 1)


async def test_a_renewal_beyond_the_expiry_of_a_record_takes_two_requests(
    store: DynamoIdempotencyRepository, front: DynamoFront
) -> None:
    first = await take(store, wish(new_key()))
    front.requests.clear()

    assert await store.renew([first], 2 * RETENTION) == [True]

    assert front.requests == ["UpdateItem", "UpdateItem"]


async def test_a_new_store_requests_the_time_once(front: DynamoFront, table: Table) -> None:
    async with dynamo_client(table.settings.model_copy(update={"endpoint_url": front.url})) as client:
        store = DynamoIdempotencyRepository(client, table.name)

        await store.reserve([wish(new_key()), wish(new_key())])

    assert front.requests == ["GetItem", "PutItem", "PutItem"]


@pytest.mark.scenario(77)
@pytest.mark.parametrize("ahead", [HOUR, -HOUR], ids=["an hour behind", "an hour ahead"])
async def test_leases_use_the_clock_of_dynamodb_even_if_the_clock_of_the_worker_is_wrong(
    front: DynamoFront, table: Table, ahead: timedelta
) -> None:
    """For a worker whose clock is wrong, DynamoDB's clock appears to be wrong."""
    front.ahead, key = ahead, new_key()
    settings = table.settings.model_copy(update={"endpoint_url": front.url})
    async with dynamo_client(settings) as one, dynamo_client(settings) as other:
        first = await take(DynamoIdempotencyRepository(one, table.name), wish(key))
        late = DynamoIdempotencyRepository(other, table.name)
        (held,) = await late.reserve([wish(key)])
        front.ahead += LEASE + timedelta(seconds=5)
        # To this worker, the clock of the server has jumped; the intervals must not be averaged.
        await late.ping()
        (taken,) = await late.reserve([wish(key)])

    assert isinstance(held, InProgress)
    assert timedelta(0) <= held.retry_after - LEASE < timedelta(seconds=5)
    assert isinstance(taken, Reserved)
    assert (taken.attempt, taken.previous) == (2, Previous.LAPSED)
    assert taken.fence > first.fence


@pytest.mark.scenario(57)
async def test_an_expired_item_counts_as_absent(store: DynamoIdempotencyRepository, table: Table) -> None:
    first = await take(store, wish(new_key()))
    await store.complete([Completion(reservation=first, ttl=TTL, result=StoredResult(b"1"))])
    clock_of(store).now += TTL // timedelta(microseconds=1)

    assert await store.get([first.key]) == [None]
    assert [record async for record in store.scan("")] == []
    assert await store.delete([first.key]) == 0
    second = await take(store, wish(first.key))

    assert (second.attempt, second.previous) == (1, Previous.NONE)
    assert "result" not in await item_of(table, first.key)


async def test_an_item_is_deleted_at_least_an_hour_after_its_expiry(
    store: DynamoIdempotencyRepository, table: Table
) -> None:
    first = await take(store, wish(new_key()))
    processing = await item_of(table, first.key)
    await store.complete([Completion(reservation=first, ttl=TTL)])
    settled = await item_of(table, first.key)
    await store.delete([first.key])
    tombstone = await item_of(table, first.key)

    ends = [processing["expires_at"]["N"], settled["expires_at"]["N"], str(NOW)]
    assert [int(item["purge_at"]["N"]) for item in (processing, settled, tombstone)] == [
        int(end) // 1_000_000 + 3_601 for end in ends
    ]
    assert set(tombstone) == {"key", "fence", "expires_at", "purge_at"}


@pytest.mark.scenario(78)
async def test_fences_grow_after_a_deletion_even_if_the_clock_goes_back(store: DynamoIdempotencyRepository) -> None:
    first = await take(store, wish(new_key()))
    await store.delete([first.key])
    clock_of(store).now -= HOUR // timedelta(microseconds=1)

    second = await take(store, wish(first.key))

    assert second.fence == first.fence + 1


@pytest.mark.scenario(57)
async def test_the_largest_result_fits_and_a_larger_one_is_dropped(
    store: DynamoIdempotencyRepository,
) -> None:
    media_type = "application/json"
    fitting = b"x" * (MOST_RESULT_BYTES - len(media_type))
    keys = [character * 255 for character in "ab"]
    trace = TraceLink(b"t" * 16, b"s" * 8)
    requests = [wish(key, fingerprint=b"f" * 16, trace=trace, owner="ö" * 128) for key in keys]
    taken = [await take(store, request) for request in requests]
    results = [StoredResult(fitting, media_type), StoredResult(fitting + b"x", media_type)]

    done = [Completion(reservation=one, ttl=TTL, result=result) for one, result in zip(taken, results, strict=True)]
    assert await store.complete(done) == [True, True]

    kept, dropped = await store.reserve([replace(one, token=b"n" * 16) for one in requests])
    assert isinstance(kept, Completed)
    assert isinstance(dropped, Completed)
    assert (kept.result, kept.result_dropped) == (results[0], False)
    assert (dropped.result, dropped.result_dropped) == (None, True)


async def test_the_count_of_active_keys_is_cached(table: Table) -> None:
    clock = VirtualClock(NOW)
    clock.tick = lambda: clock.now
    store = DynamoIdempotencyRepository(table.client, table.name, count_every=HOUR, clock=clock)
    await take(store, wish("k:1"))
    assert (await store.count_active("k:"), await store.count_active("other:")) == (1, 0)
    await take(store, wish("k:2", lease=2 * HOUR))

    assert await store.count_active("k:") == 1
    clock.now += HOUR // timedelta(microseconds=1)
    assert await store.count_active("k:") == 1

    await take(store, wish("k:3"))
    clock.now += HOUR // timedelta(microseconds=1) - 1
    assert await store.count_active("k:") == 1


async def test_a_ping_reads_the_settings_of_the_table_once_an_hour(
    store: DynamoIdempotencyRepository, front: DynamoFront
) -> None:
    first, second = await store.ping(), await store.ping()

    assert first.warnings == second.warnings
    assert front.requests == ["UpdateItem", "DescribeTable", "DescribeTimeToLive", "UpdateItem"]


async def test_a_ping_identifies_the_table_and_warns_about_a_missing_ttl(
    store: DynamoIdempotencyRepository, table: Table
) -> None:
    first, second = await store.ping(), await store.ping()

    assert (first.kind, first.keeps_all) == ("dynamodb", True)
    assert first.identity == second.identity != ""
    assert first.warnings == (
        "expired records are never deleted: no TTL on purge_at: the table and its cost grow; "
        "run: integr8s-idem store migrate",
    )
    assert [record async for record in store.scan("")] == []
