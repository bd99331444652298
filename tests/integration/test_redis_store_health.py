"""Health reported by `ping`, and the clients that `redis_client` creates."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from pydantic import SecretStr
from redis.asyncio import SSLConnection

from integr8s_idem.config import RedisStoreSettings
from integr8s_idem.records import StoreHealth
from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_client
from tests.support.redis import RedisServer

DURABLE = {"appendonly": "yes"}


async def health_with(config: dict[str, Any]) -> StoreHealth:
    with RedisServer(config=config) as server:
        client = redis_client(RedisStoreSettings(url=server.url))
        health = await RedisIdempotencyRepository(client).ping()
        await client.aclose()
    return health


async def test_a_durable_server_has_no_warnings() -> None:
    health = await health_with({**DURABLE, "maxmemory": "100mb", "maxmemory-policy": "noeviction"})

    assert health.kind == "redis"
    assert health.version[0].isdigit() or health.version.startswith("Valkey ")
    assert timedelta(0) < health.latency < timedelta(seconds=2)
    assert health.warnings == ()


@pytest.mark.scenario(47)
@pytest.mark.parametrize(
    ("config", "warning"),
    [
        ({**DURABLE, "maxmemory": "100mb", "maxmemory-policy": "volatile-ttl"}, "volatile-ttl drops records beyond"),
        ({**DURABLE, "maxmemory-policy": "allkeys-lru"}, "allkeys-lru drops records as soon as"),
        ({"save": ""}, "a restart loses all records"),
        ({"save": ["3600", "1"]}, "since the last snapshot"),
        ({**DURABLE, "appendfsync": "no"}, "appendfsync is set to no: a power failure loses"),
        ({**DURABLE, "replicaof": ["127.0.0.1", "1"], "replica-read-only": "no"}, "is a replica (writable"),
    ],
)
async def test_settings_that_lose_records_are_reported(config: dict[str, Any], warning: str) -> None:
    health = await health_with(config)

    (only,) = health.warnings
    assert warning in only


async def test_nearly_full_memory_is_reported() -> None:
    with RedisServer(config=DURABLE) as server:
        await asyncio.to_thread(server.admin, "SET", "other:key", "x" * 10_000_000)
        await asyncio.to_thread(server.admin, "CONFIG", "SET", "maxmemory", 12_000_000)
        client = redis_client(RedisStoreSettings(url=server.url))
        (warning,) = (await RedisIdempotencyRepository(client).ping()).warnings
        await client.aclose()

    assert warning.startswith("more than 90% of maxmemory (12000000 bytes) is used: once it is full")


async def test_the_identity_of_a_store_changes_only_when_its_data_are_lost() -> None:
    with RedisServer(config=DURABLE) as server:
        client = redis_client(RedisStoreSettings(url=server.url))
        store = RedisIdempotencyRepository(client, key_prefix="p")
        first = (await store.ping()).identity
        await asyncio.to_thread(server.restart)
        again = (await RedisIdempotencyRepository(client, key_prefix="p").ping()).identity
        mark = await client.get("p:store-id")
        life = await client.ttl("p:store-id")
        await client.flushall()
        after = (await store.ping()).identity
        await client.aclose()

    assert isinstance(mark, bytes)
    assert first == again == mark.decode()
    assert life == -1
    assert after not in ("", first)


@pytest.mark.parametrize("fsync", ["always", "everysec"])
async def test_ping_reports_the_start_of_the_server_and_whether_it_keeps_all_writes(fsync: str) -> None:
    with RedisServer(config={"appendonly": "yes", "appendfsync": fsync}) as server:
        client = redis_client(RedisStoreSettings(url=server.url))
        store = RedisIdempotencyRepository(client)
        first, same = await store.ping(), await store.ping()
        await asyncio.to_thread(server.restart)
        second = await store.ping()
        await client.aclose()

    assert first.start == same.start != second.start
    assert first.keeps_all == second.keeps_all == (fsync == "always")


async def test_the_store_id_is_not_listed_as_a_record(redis_url: str) -> None:
    client = redis_client(RedisStoreSettings(url=redis_url))
    store = RedisIdempotencyRepository(client, key_prefix="p")

    await store.ping()

    assert [record async for record in store.scan("p:")] == []
    assert await store.count_active("p:") == 0
    assert await client.keys() == [b"p:store-id"]
    await client.aclose()


async def test_concurrent_first_pings_agree_on_one_identity(redis_url: str) -> None:
    client = redis_client(RedisStoreSettings(url=redis_url))
    store = RedisIdempotencyRepository(client)

    seen = {health.identity for health in await asyncio.gather(*(store.ping() for _ in range(20)))}
    await client.aclose()

    assert len(seen) == 1


async def test_the_client_has_a_name_and_waits_for_a_free_connection(redis_url: str) -> None:
    client = redis_client(RedisStoreSettings(url=redis_url, max_connections=2))

    names = await asyncio.gather(*(client.client_getname() for _ in range(20)))
    connections = len([one for one in await client.client_list() if one["name"] == "integr8s-idem"])
    await client.aclose()

    assert {str(name) for name in names} == {"integr8s-idem"}
    assert connections <= 2


async def test_the_password_setting_overrides_the_password_in_the_url() -> None:
    with RedisServer(tcp=True, config={"requirepass": "right"}) as server:
        url = server.url.replace("redis://", "redis://:wrong@")
        client = redis_client(RedisStoreSettings(url=url, password=SecretStr("right")))

        assert (await RedisIdempotencyRepository(client).ping()).kind == "redis"

        await client.aclose()


def test_certificates_are_passed_to_tls_connections() -> None:
    settings = RedisStoreSettings(
        url="rediss://cache:6380/1", tls_ca_file="ca.pem", tls_cert_file="me.pem", tls_key_file="me.key"
    )

    pool = redis_client(settings).connection_pool

    assert pool.connection_class is SSLConnection
    kept = pool.connection_kwargs
    assert (kept["ssl_ca_certs"], kept["ssl_certfile"], kept["ssl_keyfile"]) == ("ca.pem", "me.pem", "me.key")
    assert (kept["host"], kept["port"], kept["db"]) == ("cache", 6380, 1)


@pytest.mark.scenario(41)
async def test_a_restarted_durable_server_keeps_its_data() -> None:
    with RedisServer(config=DURABLE) as server:
        client = server.client()
        await client.set("k", "v")
        await asyncio.to_thread(server.restart)

        assert await client.get("k") == b"v"

        await client.aclose()
