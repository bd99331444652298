"""Redis connections that are reused, shared, cut or cancelled: every caller gets its own answer."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from integr8s_idem.config import RedisStoreSettings
from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.records import Completion, Reserved, ReserveRequest
from integr8s_idem.stores.redis import RedisIdempotencyRepository, pools, redis_client
from integr8s_idem.stores.redis.errors import TooFewReplicasError
from integr8s_idem.stores.redis.pools import KEPT, QuickPool
from integr8s_idem.stores.redis.round_trips import ReplicaWait, send
from tests.support.fault_proxy import Cut, FaultProxy
from tests.support.redis import RedisServer, url_of

LEASE = timedelta(seconds=30)
RETENTION = timedelta(hours=1)


def requests(name: str, number: int) -> list[ReserveRequest]:
    return [
        ReserveRequest(key=f"{name}:{each}", token=os.urandom(16), lease=LEASE, retention=RETENTION, owner="a")
        for each in range(number)
    ]


def client_of(url: str, **settings: Any) -> Redis:
    return redis_client(RedisStoreSettings(url=url, **settings))


@pytest.fixture
async def quick(redis_url: str) -> AsyncIterator[Redis]:
    """Return a client like that of the store."""
    client = client_of(redis_url)
    yield client
    await client.aclose()


def pool_of(client: Redis) -> QuickPool:
    pool = client.connection_pool
    assert isinstance(pool, QuickPool)
    return pool


async def connections(client: Redis) -> int:
    """Return the number of connections of this library on the server, including the one of this call."""
    return sum(each["name"] == "integr8s-idem" for each in await client.client_list())


# Answers to concurrent and cancelled calls.


async def test_a_refused_command_does_not_affect_the_others(quick: Redis) -> None:
    await quick.lpush("list", "one")

    answers = await send(quick, [("SET", "a", 1), ("INCR", "list"), ("GET", "a"), ("NOSUCH",), ("GET", "b")])

    assert answers[0] == b"OK"
    assert answers[2] == b"1"
    assert answers[4] is None
    assert [type(answers[each]) for each in (1, 3)] == [ResponseError, ResponseError]
    assert await quick.get("a") == b"1"


@pytest.mark.parametrize("keys", [1, 500])
async def test_the_call_after_a_cancelled_one_gets_its_own_answer(quick: Redis, keys: int) -> None:
    store = RedisIdempotencyRepository(quick)
    await store.reserve(requests("warm", 1))
    for step in range(30):
        asking = asyncio.create_task(store.reserve(requests(f"cancelled:{step}", keys)))
        for _ in range(step):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})

        (verdict,) = await store.reserve(requests(f"next:{step}", 1))
        assert isinstance(verdict, Reserved)
        assert verdict.key == f"next:{step}:0"
        assert await send(quick, [("ECHO", str(step))]) == [str(step).encode()]


async def test_the_call_after_an_unencodable_command_gets_its_own_answer(quick: Redis) -> None:
    with pytest.raises(UnicodeEncodeError):
        await send(quick, [("ECHO", "one"), ("ECHO", "\ud800")])

    assert await send(quick, [("ECHO", "two")]) == [b"two"]


async def test_concurrent_callers_get_their_own_answers_if_others_are_cancelled(redis_url: str) -> None:
    chance, client = random.Random(7), client_of(redis_url, max_connections=30)

    async def ask(number: int) -> None:
        texts = [f"{number}:{each}" for each in range(chance.randrange(1, 4))]
        assert await send(client, [("ECHO", text) for text in texts]) == [text.encode() for text in texts]

    for _ in range(20):
        asking = [asyncio.create_task(ask(number)) for number in range(30)]
        for _ in range(chance.randrange(8)):
            await asyncio.sleep(0)
        for each in chance.sample(asking, 15):
            each.cancel()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        assert {type(end) for end in ends} <= {type(None), asyncio.CancelledError}

    assert await connections(client) <= 30
    await client.aclose()


# Reuse of connections.


async def test_sequential_calls_share_a_connection(quick: Redis) -> None:
    taken = set()
    for _ in range(5):
        connection = await pool_of(quick).get_connection()
        taken.add(id(connection))
        await pool_of(quick).release(connection)

    assert len(taken) == 1


async def test_few_connections_are_kept_for_reuse_and_the_others_by_the_driver(quick: Redis) -> None:
    pool = pool_of(quick)
    taken = [await pool.get_connection() for _ in range(KEPT + 2)]
    for each in taken:
        await pool.release(each)

    assert len(pool._ready) == KEPT
    assert {id(await pool.get_connection()) for _ in range(KEPT + 2)} == {id(each) for each in taken}


@pytest.mark.parametrize("waiting", [1, 5])
async def test_waiting_callers_get_a_released_connection(redis_url: str, waiting: int) -> None:
    client = client_of(redis_url, max_connections=1)
    pool = pool_of(client)
    connection = await pool.get_connection()
    asking = [asyncio.create_task(send(client, [("ECHO", str(each))])) for each in range(waiting)]
    await asyncio.sleep(0.01)
    assert not any(each.done() for each in asking)

    await pool.release(connection)

    assert await asyncio.gather(*asking) == [[str(each).encode()] for each in range(waiting)]
    await client.aclose()


@pytest.mark.parametrize("why", ["idle", "another event loop"])
async def test_only_recently_used_connections_of_this_loop_are_not_checked(
    quick: Redis, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    pool = pool_of(quick)
    await pool.release(connection := await pool.get_connection())
    checked = list[object]()
    ensure = pool.ensure_connection

    async def check(one: Any) -> None:
        checked.append(one)
        await ensure(one)

    monkeypatch.setattr(pool, "ensure_connection", check)
    assert await pool.get_connection() is connection
    assert checked == []

    await pool.release(connection)
    if why == "idle":
        monkeypatch.setattr(pools, "FRESH_SECONDS", 0.0)
    else:
        another = asyncio.new_event_loop()
        another.close()
        [ready] = pool._ready
        ready.loop = another
    assert await pool.get_connection() is connection
    assert checked == [connection]


async def test_a_dead_idle_connection_causes_no_error(quick: Redis, redis_server: RedisServer) -> None:
    store = RedisIdempotencyRepository(quick)
    for each in range(3):
        (verdict,) = await store.reserve(requests(f"k{each}", 1))
        assert isinstance(verdict, Reserved)
        await asyncio.to_thread(redis_server.admin, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        assert await store.complete([Completion(reservation=verdict, ttl=RETENTION)]) == [True]


async def test_a_call_is_repeated_if_its_connection_is_cut(
    redis_server: RedisServer,
) -> None:
    async with FaultProxy(redis_server.address) as proxy:
        client = client_of(url_of(proxy.address))
        store = RedisIdempotencyRepository(client)
        await store.reserve(requests("warm", 1))
        with proxy.fault(Cut()):
            verdicts = await store.reserve(requests("cut", 300))

        assert {type(verdict) for verdict in verdicts} == {Reserved}
        await client.aclose()


async def test_flushed_scripts_are_loaded_again(quick: Redis, redis_server: RedisServer) -> None:
    store = RedisIdempotencyRepository(quick)
    for each in range(5):
        await asyncio.to_thread(redis_server.admin, "SCRIPT", "FLUSH")
        reserved = [
            verdict for verdict in await store.reserve(requests(f"k{each}", 300)) if isinstance(verdict, Reserved)
        ]
        await asyncio.to_thread(redis_server.admin, "SCRIPT", "FLUSH")

        done = await store.complete([Completion(reservation=verdict, ttl=RETENTION) for verdict in reserved])
        assert done == [True] * 300


async def test_missing_replicas_are_an_error_and_the_connection_stays_usable(quick: Redis) -> None:
    wait = ReplicaWait(1, timedelta(milliseconds=10))

    with pytest.raises(TooFewReplicasError):
        await send(quick, [("SET", "a", 1), ("GET", "a")], wait)

    assert await send(quick, [("ECHO", "on")]) == [b"on"]


async def test_a_disconnected_pool_opens_new_connections(quick: Redis) -> None:
    pool = pool_of(quick)
    taken = [await pool.get_connection() for _ in range(3)]
    for each in taken:
        await pool.release(each)

    await pool.disconnect()

    assert not any(each.is_connected for each in taken)
    assert await send(quick, [("ECHO", "on")]) == [b"on"]


async def test_a_silent_server_leaks_no_connections(redis_url: str) -> None:
    with RedisServer() as server:
        client = client_of(server.url, max_connections=2, timeout_seconds=2)
        store = RedisIdempotencyRepository(client, timeout=timedelta(seconds=2))
        await store.reserve(requests("warm", 1))
        await asyncio.to_thread(server.pause)
        answers = await asyncio.gather(*(store.reserve(requests("k", 1)) for _ in range(6)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {StoreUnavailableError}
        await asyncio.to_thread(server.resume)

        again: Sequence[Any] = await asyncio.gather(*(store.reserve(requests(f"n{each}", 1)) for each in range(6)))
        assert [verdict.key for (verdict,) in again] == [f"n{each}:0" for each in range(6)]
        await client.aclose()
