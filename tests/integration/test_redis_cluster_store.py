"""The store on a Redis Cluster of six servers, in addition to the contract tests."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from integr8s_idem.config import RedisStoreSettings
from integr8s_idem.errors import StoreConfigurationError, StoreUnavailableError
from integr8s_idem.records import Completion, Reserved, ReserveRequest
from integr8s_idem.stores.factory import open_store
from integr8s_idem.stores.redis import RedisClusterIdempotencyRepository, redis_cluster_client
from integr8s_idem.stores.redis import cluster as cluster_module
from integr8s_idem.stores.redis.buckets import BUCKET_SLOTS, BUCKETS, TAGS, bucket_of, slot_of, stored_name
from integr8s_idem.stores.redis.round_trips import all_of, send
from integr8s_idem.testing.store_under_test import LEASE, TTL, wish
from tests.integration.test_redis_store_errors import SECRET, published
from tests.support.redis import RedisServer, bundled_binary
from tests.support.redis_cluster import RedisCluster

BUCKET = bucket_of("k")
SLOT = BUCKET_SLOTS[BUCKET]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
async def store(cluster: RedisCluster) -> AsyncIterator[RedisClusterIdempotencyRepository]:
    await asyncio.to_thread(cluster.flush)
    client = redis_cluster_client(cluster.settings())
    yield RedisClusterIdempotencyRepository(client, timeout=timedelta(seconds=2))
    await client.aclose()


@pytest.fixture
def round_trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of commands in each round trip to a server."""
    counted: list[int] = []

    async def counting(client: Any, commands: Sequence[Any], *rest: Any) -> list[Any]:
        counted.append(len(commands))
        return await send(client, commands, *rest)

    monkeypatch.setattr(cluster_module, "send", counting)
    return counted


def keys_of_one_bucket(count: int) -> list[str]:
    """Return keys that share a bucket."""
    found = (key for key in (f"k:{number}" for number in range(100_000)) if bucket_of(key) == BUCKET)
    return [next(found) for _ in range(count)]


def other_primary(cluster: RedisCluster, slot: int = SLOT) -> RedisServer:
    """Return a primary that does not own this slot."""
    return next(server for server in cluster.primaries() if slot not in cluster.slots_of(server))


def reserved(verdicts: Sequence[object]) -> list[Reserved]:
    assert all(isinstance(verdict, Reserved) for verdict in verdicts), verdicts
    return [verdict for verdict in verdicts if isinstance(verdict, Reserved)]


async def test_slots_are_computed_as_on_the_servers(cluster: RedisCluster) -> None:
    for name in (stored_name("k"), stored_name("idempotency:billing:{x}:1"), stored_name("é")):
        tag = name[1 : name.index("}")]

        assert cluster.servers[0].admin("CLUSTER", "KEYSLOT", name) == slot_of(tag.encode())


async def test_a_batch_is_one_round_trip_to_each_primary(
    store: RedisClusterIdempotencyRepository, round_trips: list[int]
) -> None:
    await store.ping()  # loads the scripts
    await store.reserve([wish(f"warm:{number}") for number in range(1_000)])
    round_trips.clear()

    await store.reserve([wish(f"k:{number}") for number in range(500)])

    assert len(round_trips) == 3
    assert sum(round_trips) <= BUCKETS


@pytest.mark.scenario(50)
async def test_keys_of_a_migrating_slot_are_found_on_both_servers(
    cluster: RedisCluster, store: RedisClusterIdempotencyRepository
) -> None:
    keys = keys_of_one_bucket(12)
    first = reserved(await store.reserve([wish(key) for key in keys[:8]]))
    target = other_primary(cluster)

    with cluster.half_moved(SLOT, target) as source:
        source.admin("MIGRATE", "127.0.0.1", target.port, "", 0, 1000, "KEYS", *map(stored_name, keys[:4]))
        again = await store.reserve([wish(one.key, token=one.token) for one in first])
        fresh = reserved(await store.reserve([wish(key) for key in keys[8:]]))
        written = await store.complete([Completion(reservation=one, ttl=TTL) for one in [*first, *fresh]])
        records = await store.get(keys)

    assert [one.attempt for one in reserved(again)] == [1] * 8
    assert written == [True] * 12
    assert all(record is not None for record in records)


@pytest.mark.scenario(50)
async def test_moved_slots_are_requested_from_their_new_server(
    cluster: RedisCluster, store: RedisClusterIdempotencyRepository, round_trips: list[int]
) -> None:
    (reservation,) = reserved(await store.reserve([wish("k")]))
    await asyncio.to_thread(cluster.move_slots, [SLOT], other_primary(cluster))
    round_trips.clear()

    assert await store.renew([reservation], LEASE) == [True]
    redirected = len(round_trips)
    assert await store.renew([reservation], LEASE) == [True]

    assert redirected == 3  # redirected, script not loaded, succeeded
    assert len(round_trips) == redirected + 1


@pytest.mark.scenario(50)
async def test_a_key_repeated_in_a_batch_is_in_progress_while_its_slot_migrates(
    cluster: RedisCluster, store: RedisClusterIdempotencyRepository
) -> None:
    one, other = keys_of_one_bucket(2)
    await store.reserve([wish(other)])

    with cluster.half_moved(SLOT, other_primary(cluster)):
        verdicts = await store.reserve([wish(one), wish(other), wish(one)])

    assert [type(verdict).__name__ for verdict in verdicts] == ["Reserved", "InProgress", "InProgress"]


async def test_scan_count_and_delete_reach_all_primaries(store: RedisClusterIdempotencyRepository) -> None:
    keys = [f"mine:{number}" for number in range(300)]
    await store.reserve([wish(key) for key in [*keys, "other:1"]])

    assert {record.key async for record in store.scan("mine:")} == set(keys)
    assert await store.count_active("mine:") == 300
    assert await store.delete([*keys, "never"]) == 300
    assert await store.count_active("") == 1


@pytest.mark.scenario(42)
async def test_a_hanging_server_times_out_and_leaves_no_tasks(
    cluster: RedisCluster, store: RedisClusterIdempotencyRepository
) -> None:
    requests = [wish(f"k:{number}") for number in range(100)]
    await store.reserve(requests)
    before = asyncio.all_tasks()
    owner = cluster.owner(SLOT)

    owner.pause()
    try:
        with pytest.raises(StoreUnavailableError, match=r"no answer from Redis within 0\.3 s"):
            await RedisClusterIdempotencyRepository(store.client, timeout=timedelta(seconds=0.3)).reserve(requests)
    finally:
        owner.resume()

    assert asyncio.all_tasks() == before
    assert len(reserved(await store.reserve(requests))) == 100


async def test_lost_records_of_a_primary_change_the_identity(
    cluster: RedisCluster, store: RedisClusterIdempotencyRepository
) -> None:
    before = await store.ping()

    assert (await store.ping()).identity == before.identity
    cluster.primaries()[1].flush()

    after = await store.ping()
    assert after.identity != before.identity
    assert after.kind == "redis-cluster"


async def test_moving_slots_changes_neither_identity_nor_lineage(
    cluster: RedisCluster, store: RedisClusterIdempotencyRepository
) -> None:
    before = await store.ping()

    await asyncio.to_thread(cluster.move_slots, [SLOT], other_primary(cluster))

    after = await store.ping()
    assert (after.identity, after.lineage, after.start) == (before.identity, before.lineage, before.start)


async def test_a_planned_failover_changes_the_lineage(
    cluster: RedisCluster, store: RedisClusterIdempotencyRepository
) -> None:
    before = await store.ping()
    old = cluster.owner(SLOT)

    await asyncio.to_thread(cluster.hand_over, old)
    await asyncio.to_thread(cluster.await_owner, SLOT, other_than=old)

    after = await store.ping()
    assert after.identity == before.identity
    assert after.lineage != before.lineage
    assert after.lineage[1]
    await asyncio.to_thread(cluster.await_health)


async def test_an_unavailable_seed_is_ignored(cluster: RedisCluster) -> None:
    urls = ["redis://127.0.0.1:1", *cluster.settings().urls[:1]]

    async with open_store(cluster.settings().model_copy(update={"urls": urls}), key_prefix="idem") as store:
        assert (await store.ping()).kind == "redis-cluster"


async def test_a_cluster_server_is_refused_as_a_single_server(cluster: RedisCluster) -> None:
    settings = RedisStoreSettings(url=other_primary(cluster).url)
    requests: list[ReserveRequest] = [wish(TAGS[BUCKET] + "k")]

    async with open_store(settings, key_prefix="idem") as store:
        with pytest.raises(StoreConfigurationError, match='set kind = "redis-cluster"'):
            await store.reserve(requests)


async def test_a_single_server_is_refused_as_a_cluster(cluster: RedisCluster) -> None:
    with RedisServer(tcp=True) as single:
        settings = cluster.settings().model_copy(update={"urls": (single.url,)})
        async with open_store(settings, key_prefix="idem") as store:
            with pytest.raises(StoreConfigurationError, match='not part of a Redis Cluster: set kind = "redis"'):
                await store.ping()


@pytest.mark.scenario(53)
async def test_replicas_of_every_written_primary_must_confirm(
    cluster: RedisCluster, store: RedisClusterIdempotencyRepository
) -> None:
    strict = RedisClusterIdempotencyRepository(
        store.client, wait_replicas=1, wait_timeout=timedelta(seconds=0.2), timeout=timedelta(seconds=2)
    )
    requests = [wish(f"k:{number}") for number in range(100)]
    replica = cluster.replica_of(cluster.owner(SLOT))

    replica.pause()
    try:
        with pytest.raises(StoreUnavailableError, match="0 of 1 required replicas"):
            await strict.reserve(requests)
    finally:
        await asyncio.to_thread(cluster.rejoin, replica)

    patient = RedisClusterIdempotencyRepository(
        store.client, wait_replicas=1, wait_timeout=timedelta(seconds=15), timeout=timedelta(seconds=20)
    )
    assert [one.attempt for one in reserved(await patient.reserve(requests))] == [1] * 100


async def test_an_error_during_a_cancellation_is_retrieved(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ConnectionError("gone")

    asking = asyncio.create_task(all_of([fail(), asyncio.sleep(60)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    del asking  # asyncio logs unretrieved errors when the task is deleted
    gc.collect()

    assert caplog.records == []


async def test_the_documented_user_has_all_permissions_of_the_store(cluster: RedisCluster) -> None:
    rules = [word.replace("~idem:*", "~{idem:*}idem:*") for word in published()]
    slots = "+cluster" if cluster.servers[0].binary == bundled_binary() else "+cluster|slots"
    for server in cluster.servers:
        server.admin(*rules, "+asking", slots, "+wait")
    slot = BUCKET_SLOTS[bucket_of("idem:k")]
    settings = cluster.settings(
        username="worker", password=SECRET, wait_replicas=1, wait_timeout_seconds=15, timeout_seconds=20
    )

    async with open_store(settings, key_prefix="idem") as store:
        with cluster.half_moved(slot, other_primary(cluster, slot)):
            (reservation,) = reserved(await store.reserve([wish("idem:k")]))
        health = await store.ping()
        assert await store.renew([reservation], LEASE) == [True]
        assert await store.count_active("idem:") == 1
        assert await store.complete([Completion(reservation=reservation, ttl=TTL)]) == [True]
        assert await store.delete(["idem:k"]) == 1

    assert not [warning for warning in health.warnings if "may not" in warning]
