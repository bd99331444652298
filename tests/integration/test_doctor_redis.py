"""Each problem is planted in real Redis, and the doctor reports its code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import SecretStr

from integr8s_idem.config import RedisStoreSettings
from integr8s_idem.diagnostics import Code, Finding, Severity
from integr8s_idem.stores.redis.access import acl_setuser
from tests.support.doctor import codes, found_in_store
from tests.support.redis import RedisServer

DURABLE = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"}
SECRET = "hunter2-hunter2"
PUBLISHED = acl_setuser("doctored", "idempotency").replace("PASSWORD", SECRET).split()


async def found_with(config: dict[str, Any]) -> list[Finding]:
    with RedisServer(config={**DURABLE, **config}) as server:
        return await found_in_store(RedisStoreSettings(url=server.url))


@pytest.fixture(scope="module")
def users() -> Iterator[RedisServer]:
    """Start a server for test users, without persistence, so that the doctor reads its settings."""
    with RedisServer() as server:
        yield server


async def found_for(server: RedisServer, *, without: str = "", password: str = SECRET) -> list[Finding]:
    """Return the findings for a user who lacks one of the printed permissions."""
    rules = [word for word in PUBLISHED[3:] if word != without]
    await asyncio.to_thread(server.admin, "ACL", "SETUSER", "doctored", "reset", *rules)
    url = server.url.replace("db=0", "db=1")  # any database but the first requires SELECT
    return await found_in_store(
        RedisStoreSettings(url=url, username="doctored", password=SecretStr(password), timeout_seconds=5)
    )


async def test_a_durable_redis_has_no_findings() -> None:
    (seen,) = await found_with({})

    assert (seen.code, seen.severity) == (Code.STORE_SEEN, Severity.INFO)


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"maxmemory-policy": "allkeys-lru"}, "store-eviction"),
        ({"appendonly": "no"}, "store-not-persistent"),
        ({"appendonly": "no", "save": ["3600", "1"]}, "store-not-persistent"),
        ({"appendfsync": "no"}, "store-late-sync"),
        ({"replicaof": ["127.0.0.1", "1"]}, "store-replica"),
        ({"replicaof": ["127.0.0.1", "1"], "replica-read-only": "no"}, "store-replica"),
        ({"min-replicas-to-write": "1"}, "store-too-few-replicas"),
    ],
)
async def test_a_setting_that_loses_records_is_found(config: dict[str, Any], code: str) -> None:
    assert codes(await found_with(config)) == [code]


async def test_a_replica_that_has_lost_its_primary_is_found() -> None:
    with RedisServer(config={**DURABLE, "replicaof": ["127.0.0.1", "1"]}) as server:
        await asyncio.to_thread(server.admin, "CONFIG", "SET", "replica-serve-stale-data", "no")
        (only,) = await found_in_store(RedisStoreSettings(url=server.url))

    assert (only.code, only.severity) == (Code.STORE_REPLICA, Severity.ERROR)


@pytest.mark.parametrize(("room", "severity"), [(12_000_000, "warning"), (1, "error")])
async def test_full_memory_is_found(room: int, severity: str) -> None:
    with RedisServer(config=DURABLE) as server:
        await asyncio.to_thread(server.admin, "SET", "other:key", "x" * 10_000_000)
        await asyncio.to_thread(server.admin, "CONFIG", "SET", "maxmemory", room)
        found = await found_in_store(RedisStoreSettings(url=server.url))

    assert [one.severity for one in found if one.code is Code.STORE_MEMORY] == [severity]
    assert codes(found) == ["store-memory"]


async def test_an_unavailable_server_is_found() -> None:
    (only,) = await found_in_store(RedisStoreSettings(url="redis://127.0.0.1:1/0"))

    assert (only.code, only.severity) == (Code.STORE_UNAVAILABLE, Severity.ERROR)


async def test_a_hanging_server_does_not_block_the_doctor() -> None:
    with RedisServer() as server:
        server.pause()
        start = time.monotonic()
        found = await found_in_store(RedisStoreSettings(url=server.url, timeout_seconds=0.3))
        server.resume()

    assert codes(found) == ["store-unavailable"]
    assert time.monotonic() - start < 5


async def test_a_wrong_password_is_found_and_not_shown(users: RedisServer) -> None:
    (only,) = await found_for(users, password="wr0ng-" + SECRET)

    assert (only.code, only.severity) == (Code.STORE_CREDENTIALS, Severity.ERROR)
    assert SECRET not in f"{only}{only!r}"


async def test_a_user_without_evalsha_is_found(users: RedisServer) -> None:
    (only,) = await found_for(users, without="+evalsha")

    assert (only.code, only.severity) == (Code.STORE_PERMISSION, Severity.ERROR)
    assert "+evalsha" in only.what


async def test_the_printed_permissions_are_sufficient(users: RedisServer) -> None:
    found = await found_for(users)

    assert codes(found) == ["store-not-persistent"]


@pytest.mark.parametrize("missing", [word for word in PUBLISHED if word.startswith("+")])
async def test_each_missing_permission_is_found(users: RedisServer, missing: str) -> None:
    await asyncio.to_thread(users.admin, "SCRIPT", "FLUSH")

    found = await found_for(users, without=missing)

    named = missing.removeprefix("+").partition("|")[0].upper()
    reported = [one for one in found if one.code in (Code.STORE_PERMISSION, Code.STORE_UNSEEN)]
    assert any(named in str(one).upper() for one in reported), found


async def test_a_user_without_access_to_the_keys_is_found(users: RedisServer) -> None:
    settings = RedisStoreSettings(url=users.url, username="elsewhere", password=SecretStr(SECRET))
    rules = acl_setuser("elsewhere", "other").replace("PASSWORD", SECRET).split()
    await asyncio.to_thread(users.admin, *rules)

    (only,) = await found_in_store(settings)

    assert only.code is Code.STORE_PERMISSION
    assert "these keys" in only.what


@pytest.mark.parametrize(("shift", "way"), [(-60.0, "60.0 s ahead of"), (60.0, "60.0 s behind")])
async def test_clocks_that_differ_are_found(redis_url: str, shift: float, way: str) -> None:
    found = await found_in_store(RedisStoreSettings(url=redis_url), lambda: time.time() + shift)

    (skew,) = [one for one in found if one.code is Code.CLOCK_SKEW]
    assert way in skew.what


async def test_the_doctor_leaves_nothing_in_the_store(redis_url: str, redis_server: RedisServer) -> None:
    await found_in_store(RedisStoreSettings(url=redis_url))

    assert await asyncio.to_thread(redis_server.admin, "KEYS", "*") == ["idempotency:store-id"]
