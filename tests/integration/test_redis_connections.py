"""Connections to Redis: at hand, shared, cut, cancelled in the middle; whose answer is whose is never in doubt."""

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


def wishes(name: str, number: int) -> list[ReserveRequest]:
    return [
        ReserveRequest(key=f"{name}:{each}", token=os.urandom(16), lease=LEASE, retention=RETENTION, owner="a")
        for each in range(number)
    ]


def client_of(url: str, **settings: Any) -> Redis:
    return redis_client(RedisStoreSettings(url=url, **settings))


@pytest.fixture
async def quick(redis_url: str) -> AsyncIterator[Redis]:
    """A client as the store has it."""
    client = client_of(redis_url)
    yield client
    await client.aclose()


def pool_of(client: Redis) -> QuickPool:
    pool = client.connection_pool
    assert isinstance(pool, QuickPool)
    return pool


async def connections(client: Redis) -> int:
    """How many the server sees of ours, that of this question included."""
    return sum(each["name"] == "integr8s-idem" for each in await client.client_list())


# Whose answer is whose.


async def test_one_command_that_is_refused_spoils_none_of_the_others(quick: Redis) -> None:
    await quick.lpush("list", "one")

    answers = await send(quick, [("SET", "a", 1), ("INCR", "list"), ("GET", "a"), ("NOSUCH",), ("GET", "b")])

    assert answers[0] == b"OK"
    assert answers[2] == b"1"
    assert answers[4] is None
    assert [type(answers[each]) for each in (1, 3)] == [ResponseError, ResponseError]
    assert await quick.get("a") == b"1"


@pytest.mark.parametrize("keys", [1, 500])
async def test_a_call_that_is_cancelled_at_any_step_leaves_no_answer_to_the_next(quick: Redis, keys: int) -> None:
    store = RedisIdempotencyRepository(quick)
    await store.reserve(wishes("warm", 1))
    for step in range(30):
        asking = asyncio.create_task(store.reserve(wishes(f"cancelled:{step}", keys)))
        for _ in range(step):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})

        (verdict,) = await store.reserve(wishes(f"next:{step}", 1))
        assert isinstance(verdict, Reserved)
        assert verdict.key == f"next:{step}:0"
        assert await send(quick, [("ECHO", str(step))]) == [str(step).encode()]


async def test_a_command_that_cannot_be_written_leaves_no_answer_to_the_next(quick: Redis) -> None:
    with pytest.raises(UnicodeEncodeError):
        await send(quick, [("ECHO", "one"), ("ECHO", "\ud800")])

    assert await send(quick, [("ECHO", "two")]) == [b"two"]


async def test_callers_beside_each_other_that_are_cancelled_at_random_get_their_own_answers(redis_url: str) -> None:
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


# Connections at hand.


async def test_calls_one_after_the_other_share_a_connection(quick: Redis) -> None:
    taken = set()
    for _ in range(5):
        connection = await pool_of(quick).get_connection()
        taken.add(id(connection))
        await pool_of(quick).release(connection)

    assert len(taken) == 1


async def test_no_more_are_kept_at_hand_than_are_usual_and_the_others_are_the_driver_s(quick: Redis) -> None:
    pool = pool_of(quick)
    taken = [await pool.get_connection() for _ in range(KEPT + 2)]
    for each in taken:
        await pool.release(each)

    assert len(pool._ready) == KEPT
    assert {id(await pool.get_connection()) for _ in range(KEPT + 2)} == {id(each) for each in taken}


@pytest.mark.parametrize("waiting", [1, 5])
async def test_one_who_waits_gets_what_is_given_back(redis_url: str, waiting: int) -> None:
    client = client_of(redis_url, max_connections=1)
    pool = pool_of(client)
    connection = await pool.get_connection()
    asking = [asyncio.create_task(send(client, [("ECHO", str(each))])) for each in range(waiting)]
    await asyncio.sleep(0.01)
    assert not any(each.done() for each in asking)

    await pool.release(connection)

    assert await asyncio.gather(*asking) == [[str(each).encode()] for each in range(waiting)]
    await client.aclose()


@pytest.mark.parametrize("why", ["it has rested", "it is of another event loop"])
async def test_only_a_connection_of_this_loop_that_was_used_a_moment_ago_is_taken_without_a_look(
    quick: Redis, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    pool = pool_of(quick)
    await pool.release(connection := await pool.get_connection())
    seen = list[object]()
    ensure = pool.ensure_connection

    async def looked_at(one: Any) -> None:
        seen.append(one)
        await ensure(one)

    monkeypatch.setattr(pool, "ensure_connection", looked_at)
    assert await pool.get_connection() is connection
    assert seen == []

    await pool.release(connection)
    if why == "it has rested":
        monkeypatch.setattr(pools, "FRESH_SECONDS", 0.0)
    else:
        another = asyncio.new_event_loop()
        another.close()
        [(_, _, since)] = pool._ready
        pool._ready[:] = [(connection, another, since)]
    assert await pool.get_connection() is connection
    assert seen == [connection]


async def test_a_connection_that_has_died_at_hand_costs_no_error(quick: Redis, redis_server: RedisServer) -> None:
    store = RedisIdempotencyRepository(quick)
    for each in range(3):
        (verdict,) = await store.reserve(wishes(f"k{each}", 1))
        assert isinstance(verdict, Reserved)
        await asyncio.to_thread(redis_server.admin, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        assert await store.complete([Completion(reservation=verdict, ttl=RETENTION)]) == [True]


async def test_a_connection_that_is_cut_while_it_waits_is_replaced_and_the_call_repeated(
    redis_server: RedisServer,
) -> None:
    async with FaultProxy(redis_server.address) as proxy:
        client = client_of(url_of(proxy.address))
        store = RedisIdempotencyRepository(client)
        await store.reserve(wishes("warm", 1))
        with proxy.fault(Cut()):
            verdicts = await store.reserve(wishes("cut", 300))

        assert {type(verdict) for verdict in verdicts} == {Reserved}
        await client.aclose()


async def test_scripts_that_are_flushed_at_any_time_are_loaded_again(quick: Redis, redis_server: RedisServer) -> None:
    store = RedisIdempotencyRepository(quick)
    for each in range(5):
        await asyncio.to_thread(redis_server.admin, "SCRIPT", "FLUSH")
        reserved = [
            verdict for verdict in await store.reserve(wishes(f"k{each}", 300)) if isinstance(verdict, Reserved)
        ]
        await asyncio.to_thread(redis_server.admin, "SCRIPT", "FLUSH")

        done = await store.complete([Completion(reservation=verdict, ttl=RETENTION) for verdict in reserved])
        assert done == [True] * 300


async def test_replicas_that_are_missing_are_told_and_the_connection_is_fit_for_the_next(quick: Redis) -> None:
    wait = ReplicaWait(1, timedelta(milliseconds=10))

    with pytest.raises(TooFewReplicasError):
        await send(quick, [("SET", "a", 1), ("GET", "a")], wait)

    assert await send(quick, [("ECHO", "on")]) == [b"on"]


async def test_a_pool_that_is_disconnected_has_nothing_at_hand_and_goes_on(quick: Redis) -> None:
    pool = pool_of(quick)
    taken = [await pool.get_connection() for _ in range(3)]
    for each in taken:
        await pool.release(each)

    await pool.disconnect()

    assert not any(each.is_connected for each in taken)
    assert await send(quick, [("ECHO", "on")]) == [b"on"]


async def test_a_silent_server_costs_no_connection(redis_url: str) -> None:
    with RedisServer() as server:
        client = client_of(server.url, max_connections=2, timeout_seconds=2)
        store = RedisIdempotencyRepository(client, timeout=timedelta(seconds=2))
        await store.reserve(wishes("warm", 1))
        await asyncio.to_thread(server.pause)
        answers = await asyncio.gather(*(store.reserve(wishes("k", 1)) for _ in range(6)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {StoreUnavailableError}
        await asyncio.to_thread(server.resume)

        again: Sequence[Any] = await asyncio.gather(*(store.reserve(wishes(f"n{each}", 1)) for each in range(6)))
        assert [verdict.key for (verdict,) in again] == [f"n{each}:0" for each in range(6)]
        await client.aclose()
