"""Each problem is planted in a real Redis Cluster or behind a real Sentinel, and the doctor reports its code.

The tests run on the oldest supported server and on a newer one: Redis 6.2 may name a command without its subcommand.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from integr8s_idem.config import RedisClusterStoreSettings, RedisSentinelStoreSettings, Settings
from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.doctor.permissions import access_of
from integr8s_idem.stores.redis.buckets import BUCKET_SLOTS
from tests.support.doctor import Typed, codes, found_in_store
from tests.support.redis import RedisServer, bundled_binary, needs_newer_binary
from tests.support.redis_cluster import BUS, RedisCluster
from tests.support.redis_sentinel import NAME, SentinelServer

SECRET = "hunter2-hunter2"
CREDENTIALS = {"username": "doctored", "password": SecretStr(SECRET)}
DURABLE = {"appendonly": "yes", "appendfsync": "everysec"}


def printed(store: RedisClusterStoreSettings | RedisSentinelStoreSettings) -> list[list[str]]:
    """Return the commands printed by `doctor --acl`, split into words."""
    lines = access_of(Settings(store=store)).replace("PASSWORD", SECRET).splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


def permissions(command: list[str]) -> list[str]:
    return [word for word in command if word.startswith("+")]


def reports_missing(found: list[Finding], permission: str, server: RedisServer) -> bool:
    names = [permission, permission.partition("|")[0]] if server.binary == bundled_binary() else [permission]
    pattern = re.compile(rf"({'|'.join(map(re.escape, names))})(?![\w|])")
    reported = [one for one in found if one.code in (Code.STORE_PERMISSION, Code.STORE_UNSEEN)]
    return any(pattern.search(str(one)) for one in reported)


@pytest.fixture(scope="module", params=["oldest", "newer"])
def binary(request: pytest.FixtureRequest) -> Path:
    return bundled_binary() if request.param == "oldest" else needs_newer_binary()


@pytest.fixture(scope="module")
def cluster(binary: Path) -> Iterator[RedisCluster]:
    with RedisCluster(binary=binary) as cluster:
        yield cluster


CLUSTER_ACL = printed(RedisClusterStoreSettings(kind="redis-cluster", username="doctored", wait_replicas=1))[0]


def make_user(cluster: RedisCluster, without: str = "") -> RedisClusterStoreSettings:
    """Create a user on every server, without one of the printed permissions."""
    for server in cluster.servers:
        server.admin("ACL", "SETUSER", "doctored", "reset", *(word for word in CLUSTER_ACL[3:] if word != without))
        server.admin("SCRIPT", "FLUSH")
        # The doctor reads the settings only if there is no append-only file.
        server.admin("CONFIG", "SET", "appendonly", "no" if without == "+config|get" else "yes")
    return cluster.settings(timeout_seconds=5, wait_replicas=1, **CREDENTIALS)


async def test_a_durable_cluster_has_no_findings(cluster: RedisCluster) -> None:
    (seen,) = await found_in_store(cluster.settings(timeout_seconds=5))

    assert (seen.code, seen.severity) == (Code.STORE_SEEN, Severity.INFO)


async def test_the_printed_permissions_are_sufficient_for_a_cluster(cluster: RedisCluster) -> None:
    settings = await asyncio.to_thread(make_user, cluster)

    assert codes(await found_in_store(settings)) == []


@pytest.mark.parametrize("missing", permissions(CLUSTER_ACL))
async def test_each_missing_permission_is_found_in_a_cluster(cluster: RedisCluster, missing: str) -> None:
    settings = await asyncio.to_thread(make_user, cluster, missing)

    found = await found_in_store(settings)

    assert reports_missing(found, missing, cluster.servers[0]), found


async def test_a_wrong_setting_of_one_cluster_server_is_found_and_the_server_named(cluster: RedisCluster) -> None:
    odd = cluster.primaries()[1]
    odd.admin("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    found = await found_in_store(cluster.settings(timeout_seconds=5))
    odd.admin("CONFIG", "SET", "maxmemory-policy", "noeviction")

    assert codes(found) == ["store-eviction"]
    assert f"on 127.0.0.1:{odd.port}:" in found[1].what


@pytest.mark.parametrize(
    ("policy", "status", "code"), [("allkeys-lru", 1, "store-eviction"), ("noeviction", 0, "store-seen")]
)
def test_the_exit_status_reports_the_state_of_a_cluster(
    cluster: RedisCluster, typed: Typed, policy: str, status: int, code: str
) -> None:
    odd = cluster.primaries()[2]
    odd.admin("CONFIG", "SET", "maxmemory-policy", policy)
    answer = typed(cluster.settings(timeout_seconds=5))
    odd.admin("CONFIG", "SET", "maxmemory-policy", "noeviction")

    assert (answer.status, answer.codes[0]) == (status, code)


async def test_clock_skew_to_a_cluster_is_found(cluster: RedisCluster) -> None:
    found = await found_in_store(cluster.settings(timeout_seconds=5), lambda: time.time() + 60)

    assert codes(found) == ["clock-skew"]


async def test_waiting_for_more_replicas_than_exist_is_found(cluster: RedisCluster) -> None:
    settings = cluster.settings(timeout_seconds=5, wait_replicas=2, wait_timeout_seconds=0.1)

    (only,) = await found_in_store(settings)

    assert (only.code, only.severity) == (Code.STORE_TOO_FEW_REPLICAS, Severity.ERROR)
    assert only.remedy == "restore the replicas, or lower wait_replicas in [store]"


@pytest.mark.scenario(50)
@pytest.mark.parametrize("full_coverage", ["yes", "no"])
async def test_a_cluster_with_an_unassigned_slot_is_found(full_coverage: str) -> None:
    """One server has all slots but one, which a bucket of records needs."""
    config = {**DURABLE, "cluster-enabled": "yes", "cluster-require-full-coverage": full_coverage}
    with RedisServer(tcp=True, config=config, beside=BUS) as server:
        slots = [slot for slot in range(16_384) if slot != BUCKET_SLOTS[7]]
        await asyncio.to_thread(server.admin, "CLUSTER", "ADDSLOTS", *slots)
        urls = (server.url.removesuffix("/0"),)
        found = await found_in_store(RedisClusterStoreSettings(kind="redis-cluster", urls=urls, timeout_seconds=1))

    assert codes(found) == ["store-cluster-down"]
    assert found[0].severity is Severity.ERROR


async def test_a_server_that_is_not_a_cluster_is_found(redis_tcp: RedisServer) -> None:
    settings = RedisClusterStoreSettings(kind="redis-cluster", urls=(redis_tcp.url.removesuffix("/0"),))

    (only,) = await found_in_store(settings)

    assert only.code is Code.STORE_REFUSED
    assert 'set kind = "redis"' in only.what


# Behind a Sentinel.

REDIS_ACL, SENTINEL_ACL = printed(
    RedisSentinelStoreSettings(kind="redis-sentinel", username="doctored", sentinel_username="asking", wait_replicas=1)
)


@pytest.fixture(scope="module")
def redis_tcp(binary: Path) -> Iterator[RedisServer]:
    config = {**DURABLE, "repl-diskless-sync-delay": "0"}
    with RedisServer(binary=binary, tcp=True, config=config) as server:
        yield server


@pytest.fixture(scope="module")
def replica(redis_tcp: RedisServer) -> Iterator[RedisServer]:
    config = {**DURABLE, "replicaof": ["127.0.0.1", str(redis_tcp.port)]}
    with RedisServer(binary=redis_tcp.binary, tcp=True, config=config) as server:
        until = time.monotonic() + 30
        while "'master_link_status': 'up'" not in str(server.admin("INFO", "replication")):
            assert time.monotonic() < until, "the replica is not connected"
            time.sleep(0.02)
        yield server


@pytest.fixture(scope="module")
def sentinel(redis_tcp: RedisServer) -> Iterator[SentinelServer]:
    with SentinelServer(redis_tcp.port, 1, binary=redis_tcp.binary) as server:
        yield server


def settings_of(*sentinels: SentinelServer, **more: Any) -> RedisSentinelStoreSettings:
    addresses = [f"127.0.0.1:{one.port}" for one in sentinels] or ["127.0.0.1:1"]
    kind = {"kind": "redis-sentinel", "sentinels": addresses, "master_name": NAME, "timeout_seconds": 5}
    return RedisSentinelStoreSettings.model_validate({**kind, **more})


def make_users(redis: RedisServer, sentinel: SentinelServer, without: str = "") -> RedisSentinelStoreSettings:
    for server, command in ((redis, REDIS_ACL), (sentinel, SENTINEL_ACL)):
        rules = [word for word in command[3:] if word != without]
        server.admin("ACL", "SETUSER", command[2], "reset", *rules)
    redis.admin("SCRIPT", "FLUSH")
    redis.admin("CONFIG", "SET", "appendonly", "no" if without == "+config|get" else "yes")
    asking = {"sentinel_username": "asking", "sentinel_password": SECRET}
    return settings_of(sentinel, wait_replicas=1, database=1, **asking, **CREDENTIALS)


async def test_a_durable_sentinel_setup_has_no_findings(sentinel: SentinelServer) -> None:
    assert codes(await found_in_store(settings_of(sentinel))) == []


async def test_the_printed_permissions_are_sufficient_behind_a_sentinel(
    redis_tcp: RedisServer, replica: RedisServer, sentinel: SentinelServer
) -> None:
    settings = await asyncio.to_thread(make_users, redis_tcp, sentinel)

    assert replica.running
    assert codes(await found_in_store(settings)) == []


@pytest.mark.parametrize("missing", [*permissions(REDIS_ACL), *permissions(SENTINEL_ACL)])
async def test_each_missing_permission_is_found_behind_a_sentinel(
    redis_tcp: RedisServer, replica: RedisServer, sentinel: SentinelServer, missing: str
) -> None:
    settings = await asyncio.to_thread(make_users, redis_tcp, sentinel, missing)

    found = await found_in_store(settings)

    assert replica.running
    assert reports_missing(found, missing, redis_tcp), found


@pytest.mark.parametrize("wrong", ["password", "sentinel_password"])
async def test_a_wrong_password_of_redis_or_of_a_sentinel_is_found_and_not_shown(
    redis_tcp: RedisServer, sentinel: SentinelServer, wrong: str
) -> None:
    settings = await asyncio.to_thread(make_users, redis_tcp, sentinel)

    (only,) = await found_in_store(settings.model_copy(update={wrong: SecretStr("wr0ng-" + SECRET)}))

    assert (only.code, only.severity) == (Code.STORE_CREDENTIALS, Severity.ERROR)
    assert SECRET not in f"{only}{only!r}"


async def test_an_unknown_primary_is_found(sentinel: SentinelServer) -> None:
    (only,) = await found_in_store(settings_of(sentinel, master_name="other"))

    assert (only.code, only.severity) == (Code.STORE_PRIMARY_UNKNOWN, Severity.ERROR)
    assert "'other'" in only.what
    assert "master_name" in only.what


@pytest.mark.parametrize(("name", "status", "code"), [(NAME, 0, "store-seen"), ("other", 2, "store-primary-unknown")])
def test_the_exit_status_reports_the_state_behind_a_sentinel(
    sentinel: SentinelServer, typed: Typed, name: str, status: int, code: str
) -> None:
    answer = typed(settings_of(sentinel, master_name=name))

    assert (answer.status, answer.codes[0]) == (status, code)


async def test_unavailable_sentinels_are_reported_as_an_outage() -> None:
    (only,) = await found_in_store(settings_of())

    assert only.code is Code.STORE_UNAVAILABLE


async def test_too_few_replicas_behind_a_sentinel_are_found(
    redis_tcp: RedisServer, replica: RedisServer, sentinel: SentinelServer
) -> None:
    settings = settings_of(sentinel, wait_replicas=2, wait_timeout_seconds=0.1)

    found = await found_in_store(settings)

    assert replica.running
    assert {(one.code, one.severity) for one in found} == {
        (Code.STORE_SEEN, Severity.INFO),
        (Code.STORE_TOO_FEW_REPLICAS, Severity.ERROR),
    }
