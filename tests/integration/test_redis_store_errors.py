"""Errors of the Redis store when the server refuses commands, hangs, dies or is full."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from pydantic import SecretStr
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from integr8s_idem.config import RedisStoreSettings
from integr8s_idem.errors import ApplicationError, StoreConfigurationError, StoreUnavailableError
from integr8s_idem.records import Completion, Failure, Reserved, ReserveRequest, StoredResult
from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_client
from integr8s_idem.stores.redis.access import acl_setuser
from integr8s_idem.stores.redis.errors import guarded
from tests.packaging.repository import ROOT
from tests.support.conditions import eventually
from tests.support.redis import DURABLE, RedisServer, bundled_binary, needs_newer_binary

LEASE = timedelta(seconds=30)
TTL = timedelta(hours=1)
SECRET = "hunter2-hunter2"
SCRIPTS = "+evalsha +script|load +get +set +setrange +time +pttl +pexpire"
CONNECTION = "+client|setname +select"
PAGE = ROOT / "docs" / "how-to" / "prepare-redis.md"
COMMAND = re.compile(r"\s(\+[a-z|]+)")


def published() -> list[str]:
    """Return the command on the page that creates a user, with the key prefix of these tests."""
    (block,) = re.findall(r"^ACL SETUSER .*\n(?: +\+.*\n)+", PAGE.read_text(), re.MULTILINE)
    return [word.replace("~idempotency:", "~idem:").replace("PASSWORD", SECRET) for word in block.split()]


PUBLISHED = [word for word in published() if word.startswith("+")]


def request_for(key: str) -> ReserveRequest:
    return ReserveRequest(key=key, token=os.urandom(16), lease=LEASE, retention=TTL)


def held(key: str) -> Reserved:
    return Reserved(key=key, token=os.urandom(16), attempt=1, fence=1, lease=LEASE)


OTHER_LOOP = "belong to another event loop: create the client"


def test_a_store_that_is_used_in_another_event_loop_raises_an_error_that_says_so(redis_url: str) -> None:
    client = Redis.from_url(redis_url)
    store = RedisIdempotencyRepository(client)
    first = asyncio.new_event_loop()
    first.run_until_complete(CALLS["reserve"](store))

    with pytest.raises(ApplicationError, match=OTHER_LOOP):
        asyncio.run(CALLS["reserve"](store))
    first.run_until_complete(client.aclose())
    first.close()


async def test_the_error_of_a_connection_whose_event_loop_is_closed_is_the_same() -> None:
    closed = asyncio.new_event_loop()
    closed.close()

    with pytest.raises(ApplicationError, match=OTHER_LOOP), guarded("reserve", LEASE):
        closed.call_soon(print)


async def test_the_error_of_the_debug_mode_of_asyncio_is_the_same() -> None:
    other = asyncio.new_event_loop()
    other.set_debug(True)
    with ThreadPoolExecutor() as thread:
        running = thread.submit(other.run_forever)
        await eventually(other.is_running)
        try:
            with pytest.raises(ApplicationError, match=OTHER_LOOP), guarded("reserve", LEASE):
                other.call_soon(print)
        finally:
            other.call_soon_threadsafe(other.stop)
            await asyncio.wrap_future(running)
            other.close()


CALLS: dict[str, Callable[[RedisIdempotencyRepository], Coroutine[Any, Any, Any]]] = {
    "reserve": lambda store: store.reserve([request_for("idem:k")]),
    "renew": lambda store: store.renew([held("idem:k")], LEASE),
    "complete": lambda store: store.complete([Completion(reservation=held("idem:k"), ttl=TTL)]),
    "fail": lambda store: store.fail([Failure(reservation=held("idem:k"), ttl=TTL, error="no")]),
    "release": lambda store: store.release([held("idem:k")]),
    "get": lambda store: store.get(["idem:k"]),
    "delete": lambda store: store.delete(["idem:k"]),
    "scan": lambda store: anext(store.scan("idem:"), None),
    "count_active": lambda store: store.count_active("idem:"),
    "ping": lambda store: store.ping(),
}
WRITES = ["reserve", "renew", "complete", "fail", "release", "delete"]


@asynccontextmanager
async def store_on(
    server: RedisServer,
    *,
    user: str | None = None,
    password: str | None = None,
    timeout: float = 1.0,
    url: str | None = None,
) -> AsyncIterator[RedisIdempotencyRepository]:
    settings = RedisStoreSettings(
        url=url or server.url,
        username=user,
        password=SecretStr(password) if password else None,
        timeout_seconds=timeout,
    )
    client = redis_client(settings)
    try:
        yield RedisIdempotencyRepository(client, timeout=timedelta(seconds=timeout), key_prefix="idem")
    finally:
        await client.aclose()


@pytest.fixture(scope="module", params=["oldest", "newer"])
def guarded_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    binary = bundled_binary() if request.param == "oldest" else needs_newer_binary()
    users = {
        "writer": f"~idem:* {SCRIPTS} {CONNECTION} +ping",
        "no-evalsha": f"~idem:* +get +set {CONNECTION}",
        "no-inner-set": f"~idem:* +evalsha +script|load +get +time {CONNECTION}",
        "no-keys": f"~other:* {SCRIPTS} {CONNECTION}",
    }
    with RedisServer(binary=binary) as server:
        with BlockingRedis.from_url(server.url) as admin:
            for name, rules in users.items():
                admin.execute_command("ACL", "SETUSER", name, "on", f">{SECRET}", "resetkeys", "-@all", *rules.split())
            admin.execute_command(*published())
        yield server


def test_page_and_docstring_publish_the_same_commands() -> None:
    assert COMMAND.findall(RedisIdempotencyRepository.__doc__ or "") == PUBLISHED


def test_the_page_shows_the_line_that_doctor_prints() -> None:
    assert acl_setuser("worker", "idem").replace("PASSWORD", SECRET).split() == published()


async def do_everything(server: RedisServer, user: str) -> str:
    """Call everything that the library uses, on another database, and return the warnings of `ping`."""
    await asyncio.to_thread(server.flush)
    url = server.url.replace("db=0", "db=1")
    async with store_on(server, user=user, password=SECRET, url=url) as store:
        reserved = await store.reserve([request_for("idem:a"), request_for("idem:b"), request_for("idem:c")])
        first, second, third = [one for one in reserved if isinstance(one, Reserved)]

        assert await store.renew([first], 10 * TTL) == [True]
        assert await store.count_active("idem:") == 3
        assert await store.complete([Completion(reservation=first, ttl=TTL)]) == [True]
        assert await store.fail([Failure(reservation=second, ttl=TTL, error="no")]) == [True]
        assert await store.release([third]) == [True]
        assert len([record async for record in store.scan("idem:")]) == 3
        assert await store.delete(["idem:a", "idem:b", "idem:c"]) == 3
        return " ".join((await store.ping()).warnings)


@pytest.mark.scenario(103)
async def test_a_user_with_the_published_commands_can_do_everything(guarded_server: RedisServer) -> None:
    assert "may not" not in await do_everything(guarded_server, "worker")


@pytest.mark.scenario(103)
@pytest.mark.parametrize("missing", PUBLISHED)
async def test_every_published_command_is_needed(guarded_server: RedisServer, missing: str) -> None:
    rules = [word for word in published()[3:] if word != missing]
    await asyncio.to_thread(guarded_server.admin, "ACL", "SETUSER", "lacking", "reset", *rules)

    try:
        message = await do_everything(guarded_server, "lacking")
    except StoreConfigurationError as error:
        message = str(error)

    assert missing.upper().removeprefix("+").partition("|")[0] in message.upper()


@pytest.mark.scenario(103)
@pytest.mark.parametrize(
    "command", ["FLUSHALL", "KEYS *", "CONFIG SET save 1", "DEL idem:k", "GET other:k", "EVAL 1 0"]
)
async def test_a_user_with_the_published_commands_can_do_nothing_else(
    guarded_server: RedisServer, command: str
) -> None:
    async with store_on(guarded_server, user="worker", password=SECRET) as store:
        with pytest.raises(NoPermissionError):
            await store.client.execute_command(*command.split())  # type: ignore[no-untyped-call]


@pytest.mark.scenario(52)
@pytest.mark.parametrize("missing", SCRIPTS.split())
async def test_ping_names_the_command_that_a_user_lacks(guarded_server: RedisServer, missing: str) -> None:
    rules = f"~idem:* {SCRIPTS} {CONNECTION} +ping +info".replace(f"{missing} ", "").replace(f" {missing}", "")
    await asyncio.to_thread(
        guarded_server.admin, *f"ACL SETUSER lacking reset on >{SECRET} resetkeys -@all {rules}".split()
    )
    await asyncio.to_thread(guarded_server.admin, "SCRIPT", "FLUSH")
    async with store_on(guarded_server, user="lacking", password=SECRET) as store:
        with pytest.raises(StoreConfigurationError, match=re.escape(missing)):
            await store.ping()


@pytest.mark.scenario(52)
@pytest.mark.parametrize(
    ("user", "named"), [("no-evalsha", r"EVALSHA: grant it \+evalsha"), ("no-inner-set", r"\+set"), ("no-keys", "~")]
)
async def test_an_error_names_the_missing_permission(guarded_server: RedisServer, user: str, named: str) -> None:
    async with store_on(guarded_server, user=user, password=SECRET) as store:
        with pytest.raises(StoreConfigurationError, match=named) as caught:
            await store.reserve([request_for("idem:k")])

    assert isinstance(caught.value.__cause__, RedisError)
    assert caught.value.operation == "reserve"


async def test_ping_reports_the_checks_that_need_info(guarded_server: RedisServer) -> None:
    async with store_on(guarded_server, user="writer", password=SECRET) as store:
        health = await store.ping()

    assert health.version == "unknown"
    assert "may not run INFO" in health.warnings[0]


@pytest.mark.scenario(52, 104)
async def test_a_wrong_password_is_a_configuration_error_and_is_not_shown(guarded_server: RedisServer) -> None:
    async with store_on(guarded_server, user="worker", password="wr0ng-" + SECRET) as store:
        with pytest.raises(StoreConfigurationError, match="user and password") as caught:
            await store.reserve([request_for("idem:k")])

    assert SECRET not in f"{caught.value}{caught.value.__cause__}{caught.value.args}"


@pytest.mark.scenario(41)
@pytest.mark.parametrize("name", CALLS)
async def test_a_dead_server_is_unavailable_within_the_timeout(name: str) -> None:
    with RedisServer() as server:
        async with store_on(server) as store:
            await store.ping()
            server.kill()
            start = time.monotonic()

            with pytest.raises(StoreUnavailableError) as caught:
                await CALLS[name](store)

    assert caught.value.operation == name
    assert caught.value.__cause__ is not None
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("tcp", [False, True], ids=["socket", "tcp"])
async def test_a_client_reconnects_to_a_restarted_server(tcp: bool) -> None:
    # With one fsync per second, Redis may answer before the write, which waits for a running fsync.
    with RedisServer(tcp=tcp, config=DURABLE) as server:
        async with store_on(server) as store:
            request = request_for("idem:k")
            before = await store.reserve([request])
            server.kill()
            with pytest.raises(StoreUnavailableError):
                await store.reserve([request])
            server.start()

            assert await store.reserve([request]) == before


@pytest.mark.scenario(43)
async def test_a_hanging_server_is_unavailable_and_its_late_answer_is_ignored() -> None:
    with RedisServer() as server:
        async with store_on(server) as store:
            impatient = RedisIdempotencyRepository(store.client, timeout=timedelta(seconds=0.3))
            first, _ = await store.reserve([request_for("idem:a"), request_for("idem:b")])
            assert isinstance(first, Reserved)
            server.pause()
            with pytest.raises(StoreUnavailableError, match=r"within 0\.3 s"):
                await impatient.complete([Completion(reservation=first, ttl=TTL)])
            server.resume()

            records = await asyncio.gather(*(store.get([key]) for key in ("idem:b", "idem:a")))

            assert [record.key for (record,) in records if record is not None] == ["idem:b", "idem:a"]


@pytest.mark.scenario(48)
async def test_a_full_server_refuses_writes_and_still_serves_reads() -> None:
    with RedisServer(config={"maxmemory": "3mb"}) as server:
        async with store_on(server) as store:
            (reserved,) = await store.reserve([request_for("idem:k")])
            assert isinstance(reserved, Reserved)
            large = Completion(reservation=reserved, ttl=TTL, result=StoredResult(b"x" * 3_000_000))

            with pytest.raises(StoreUnavailableError, match="out of memory"):
                await _until_refused(store, large)

            assert (await store.get(["idem:k"]))[0] is not None


async def _until_refused(store: RedisIdempotencyRepository, completion: Completion) -> None:
    for number in range(100):
        await store.complete([completion])
        await store.reserve([request_for(f"idem:{number}:{extra}") for extra in range(1_000)])


@pytest.mark.scenario(50)
@pytest.mark.parametrize(
    ("config", "reason"),
    [({"replicaof": ["127.0.0.1", "1"]}, "read-only replica"), ({"min-replicas-to-write": "1"}, "fewer replicas")],
    ids=["replica", "too few replicas"],
)
async def test_a_server_that_refuses_writes_is_unavailable(config: dict[str, Any], reason: str) -> None:
    with RedisServer(config=config) as server:
        async with store_on(server) as store:
            for name in ("reserve", "delete", "ping"):
                with pytest.raises(StoreUnavailableError, match=reason):
                    await CALLS[name](store)
            assert await store.count_active("idem:") == 0


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_call_ends_at_once_with_a_cancelled_error(turns: int) -> None:
    with RedisServer() as server:
        async with store_on(server, timeout=60) as store:
            await store.ping()
            server.pause()
            call = asyncio.create_task(store.reserve([request_for("idem:k")]))
            await _turns(turns)
            call.cancel()

            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(call, 30)

            server.resume()
            assert (await store.ping()).kind == "redis"


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_that_the_driver_swallows_is_not_lost(redis_client: Redis, turns: int) -> None:
    # A client with the driver's defaults uses asyncio.wait_for.
    store = RedisIdempotencyRepository(redis_client)
    await store.ping()
    call = asyncio.create_task(store.reserve([request_for("idem:k")]))
    await _turns(turns)

    if call.cancel():
        with pytest.raises(asyncio.CancelledError):
            await call


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
