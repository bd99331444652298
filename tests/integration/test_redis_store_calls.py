"""Calls of the Redis store: few round trips, no record without an expiry, no takeover of unreadable records."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from integr8s_idem.config import RedisStoreSettings
from integr8s_idem.errors import CorruptRecordError, StoreConfigurationError
from integr8s_idem.records import (
    Completed,
    Completion,
    Corrupt,
    InProgress,
    Previous,
    Reserved,
    ReserveRequest,
    StoredResult,
    TraceLink,
)
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.redis import RedisIdempotencyRepository, codec, redis_client, scripts
from integr8s_idem.stores.redis.batches import MOST_KEYS
from integr8s_idem.stores.redis.servers import KEYS_PER_RUN
from tests.support.fault_proxy import Cut, FaultProxy
from tests.support.redis import RedisServer, url_of
from tests.support.stored import changed, checked, unchecked

LEASE = timedelta(seconds=30)
RETENTION = timedelta(hours=1)
TTL = timedelta(days=8)


def request_for(key: str, *, lease: timedelta = LEASE, fingerprint: bytes | None = None) -> ReserveRequest:
    return ReserveRequest(
        key=key, token=os.urandom(16), lease=lease, retention=RETENTION, fingerprint=fingerprint, owner="billing@a"
    )


async def take(store: RedisIdempotencyRepository, request: ReserveRequest) -> Reserved:
    (verdict,) = await store.reserve([request])
    assert isinstance(verdict, Reserved)
    return verdict


@pytest.fixture
def store(redis_client: Redis) -> RedisIdempotencyRepository:
    return RedisIdempotencyRepository(redis_client)


async def evalsha_calls(client: Redis) -> int:
    stats = await client.info("commandstats")
    calls: int = stats.get("cmdstat_evalsha", {"calls": 0})["calls"]
    return calls


async def test_large_batches_are_sent_in_parts(store: RedisIdempotencyRepository, redis_client: Redis) -> None:
    await store.reserve([request_for("warm")])
    await store.complete([Completion(reservation=await take(store, request_for("warm:2")), ttl=TTL)])
    await redis_client.config_resetstat()

    reserved = await store.reserve([request_for(f"k:{number}") for number in range(500)])
    parts = 500 / KEYS_PER_RUN
    assert await evalsha_calls(redis_client) == parts
    await store.complete([Completion(reservation=r, ttl=TTL) for r in reserved if isinstance(r, Reserved)])
    assert await evalsha_calls(redis_client) == 2 * parts
    duplicates = await store.reserve([request_for(f"k:{number}") for number in range(500)])

    assert await evalsha_calls(redis_client) == 3 * parts
    assert all(isinstance(verdict, Completed) for verdict in duplicates)


KINDS = ("new", "alone", "completed", "running", "released", "other type")


@pytest.mark.parametrize("first", KINDS)
async def test_every_neighbor_in_a_batch_gets_its_own_verdict(
    store: RedisIdempotencyRepository, redis_client: Redis, first: str
) -> None:
    """After a new key, the script expects another one: any other key must be treated as if it came first."""
    for second, third in product(KINDS, repeat=2):
        batch = {f"{second}:{third}:{place}": kind for place, kind in enumerate((first, second, third))}
        await prepare(store, redis_client, batch)

        verdicts = await store.reserve(
            [replace(request_for(key), alone=kind == "alone") for key, kind in batch.items()]
        )

        for (key, kind), verdict in zip(batch.items(), verdicts, strict=True):
            if kind in ("new", "alone", "released"):
                assert isinstance(verdict, Reserved), (key, kind)
                assert verdict.attempt == (2 if kind == "released" else 1), (key, kind)
            else:
                types = {"completed": Completed, "running": InProgress, "other type": Corrupt}
                assert isinstance(verdict, types[kind]), (key, kind)
        reserved = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        assert await store.renew(reserved, LEASE) == [True] * len(reserved)
        for record in await store.get([verdict.key for verdict in reserved]):
            assert record is not None
            assert record.alone == (batch[record.key] == "alone")


async def prepare(store: RedisIdempotencyRepository, client: Redis, kinds: Mapping[str, str]) -> None:
    """Create what keys of these kinds hold before they are reserved."""
    for key, kind in kinds.items():
        if kind == "other type":
            await client.rpush(key, "x")
        elif kind in ("completed", "running", "released"):
            earlier = await take(store, request_for(key))
            if kind == "completed":
                assert await store.complete([Completion(reservation=earlier, ttl=TTL)]) == [True]
            elif kind == "released":
                assert await store.release([earlier]) == [True]


async def test_a_key_that_occurs_twice_in_a_batch_is_reserved_once(store: RedisIdempotencyRepository) -> None:
    first, second = await store.reserve([request_for("k"), request_for("k")])

    assert isinstance(first, Reserved)
    assert isinstance(second, InProgress)


async def test_a_batch_of_large_results_is_completed(store: RedisIdempotencyRepository) -> None:
    """More than a run of the script and more than a call of 4 MiB."""
    keys = [f"k:{number}" for number in range(2 * KEYS_PER_RUN + 1)]
    bodies = [b'"%05d%b"' % (number, b"x" * 20_000) for number in range(len(keys))]
    reserved = await store.reserve([request_for(key) for key in keys])

    written = await store.complete(
        [
            Completion(reservation=each, ttl=TTL, result=StoredResult(body))
            for each, body in zip(reserved, bodies, strict=True)
            if isinstance(each, Reserved)
        ]
    )

    assert written == [True] * len(keys)
    records = await store.get(keys)
    assert [record.result.body for record in records if record is not None and record.result is not None] == bodies


async def test_each_duplicate_in_a_large_batch_gets_its_own_result(
    store: RedisIdempotencyRepository, redis_client: Redis
) -> None:
    """More keys than a call has, and more bytes of results than a run of the script returns: some are asked again."""
    keys = [f"k:{number}" for number in range(MOST_KEYS + KEYS_PER_RUN + 1)]
    bodies = {key: b'"%b"' % (key.encode() * 9_000) for key in keys}
    reserved = [
        verdict for verdict in await store.reserve(list(map(request_for, keys))) if isinstance(verdict, Reserved)
    ]
    done = [Completion(reservation=each, ttl=TTL, result=StoredResult(bodies[each.key])) for each in reserved]
    assert await store.complete(done) == [True] * len(keys)
    await redis_client.config_resetstat()

    verdicts = await store.reserve(list(map(request_for, keys)))

    found = [(each.key, each.result) for each in verdicts if isinstance(each, Completed)]
    assert found == [(key, StoredResult(bodies[key])) for key in keys]
    assert await evalsha_calls(redis_client) > MOST_KEYS / KEYS_PER_RUN + 2


@pytest.mark.scenario(51)
async def test_scripts_flushed_on_the_server_are_loaded_again(
    store: RedisIdempotencyRepository, redis_client: Redis
) -> None:
    reserved = await take(store, request_for("k"))

    for _ in range(3):
        await redis_client.script_flush()
        assert await store.renew([reserved], LEASE) == [True]
    await redis_client.script_flush()

    assert await store.complete([Completion(reservation=reserved, ttl=TTL)]) == [True]


async def test_a_lease_is_measured_by_the_clock_of_the_server(store: RedisIdempotencyRepository) -> None:
    await take(store, request_for("k", lease=timedelta(milliseconds=150)))

    async with asyncio.timeout(5):
        while isinstance(verdict := (await store.reserve([request_for("k")]))[0], InProgress):
            assert verdict.retry_after <= timedelta(milliseconds=150)
            await asyncio.sleep(verdict.retry_after.total_seconds())

    assert isinstance(verdict, Reserved)
    assert (verdict.attempt, verdict.previous) == (2, Previous.LAPSED)


async def test_a_fence_is_the_clock_of_the_server_in_microseconds(
    store: RedisIdempotencyRepository, redis_client: Redis
) -> None:
    reserved = await take(store, request_for("k"))

    seconds, microseconds = await redis_client.time()

    assert 0 <= seconds * 1_000_000 + microseconds - reserved.fence < 10_000_000


async def answer_of(client: Redis, request: ReserveRequest) -> object:
    """Return the answer of the script about one key."""
    answers = await client.eval(scripts.RESERVE.text, 1, request.key, codec.encode_reserve([request])[0])
    return answers[1]


@pytest.mark.parametrize("fingerprint", [None, b"f" * 16])
async def test_only_the_answer_to_a_takeover_of_a_traced_attempt_is_longer_than_the_record(
    redis_client: Redis, fingerprint: bytes | None
) -> None:
    untraced = request_for("k", lease=timedelta(0), fingerprint=fingerprint)
    traced = replace(untraced, token=os.urandom(16), trace=TraceLink(b"t" * 16, b"s" * 8))
    last = replace(untraced, token=os.urandom(16), lease=LEASE)
    answers: list[object] = []
    records: list[Any] = []
    for request in (untraced, traced, last, last, request_for("k")):
        answers.append(await answer_of(redis_client, request))
        records.append(await redis_client.get("k"))

    new, first_takeover, second_takeover, repeated, in_progress = answers

    assert new == 0
    assert first_takeover == records[1]
    assert second_takeover == b"\0" + b"t" * 16 + b"s" * 8 + records[2]
    assert repeated == records[3]
    assert in_progress == records[4]


@pytest.mark.parametrize("fingerprint", [None, b"f" * 16])
async def test_a_takeover_of_a_record_in_an_earlier_format_gets_its_trace(
    store: RedisIdempotencyRepository, redis_client: Redis, fingerprint: bytes | None
) -> None:
    trace = TraceLink(os.urandom(16), os.urandom(8))
    first = request_for("k", lease=timedelta(0), fingerprint=fingerprint)
    await take(store, replace(first, trace=trace))
    record = await redis_client.get("k")
    assert isinstance(record, bytes)
    await redis_client.set("k", unchecked(record), px=60_000)

    second = await take(store, request_for("k"))

    assert (second.attempt, second.previous, second.trace) == (2, Previous.LAPSED, trace)


@pytest.mark.scenario(8)
async def test_only_one_of_many_concurrent_takeovers_succeeds(store: RedisIdempotencyRepository) -> None:
    await take(store, request_for("k", lease=timedelta(0)))

    verdicts = await asyncio.gather(*(store.reserve([request_for("k")]) for _ in range(50)))

    assert sum(isinstance(verdict, Reserved) for (verdict,) in verdicts) == 1


async def test_every_record_has_an_expiry(store: RedisIdempotencyRepository, redis_client: Redis) -> None:
    renewed, released = await take(store, request_for("renewed")), await take(store, request_for("released"))
    await redis_client.persist("renewed")
    await redis_client.persist("released")

    await store.renew([renewed], LEASE)
    await store.release([released])
    lives = [await redis_client.pttl(key) for key in ("renewed", "released")]

    assert all(LEASE.total_seconds() * 1000 <= life <= 2 * LEASE.total_seconds() * 1000 for life in lives)


async def test_excessive_durations_are_capped(store: RedisIdempotencyRepository) -> None:
    request = ReserveRequest(key="k", token=os.urandom(16), lease=timedelta.max, retention=timedelta(0))
    reserved = await take(store, request)
    await store.renew([reserved], timedelta.max)

    assert await store.complete([Completion(reservation=reserved, ttl=timedelta.max)]) == [True]

    (record,) = await store.get(["k"])
    assert record is not None
    assert record.settled_at is not None
    assert record.expires_at is not None
    assert record.expires_at - record.settled_at <= timedelta(days=36_501)


async def test_another_redis_type_under_a_key_is_corrupt_and_left_alone(
    store: RedisIdempotencyRepository, redis_client: Redis
) -> None:
    await redis_client.rpush("list", "someone else's")

    first, second = await store.reserve([request_for("list"), request_for("good")])

    assert first == Corrupt(key="list", reason="the key holds another Redis type")
    assert isinstance(second, Reserved)
    with pytest.raises(CorruptRecordError, match="another Redis type"):
        await store.get(["good", "list"])
    assert await store.count_active("") == 1
    assert [record.key async for record in store.scan("")] == ["good"]
    assert await redis_client.lrange("list", 0, -1) == [b"someone else's"]


async def test_a_record_in_a_newer_format_is_reported_as_corrupt(
    store: RedisIdempotencyRepository, redis_client: Redis
) -> None:
    await redis_client.set("k", b"\4" + b"data of version 4", px=60_000)

    assert await store.reserve([request_for("k")]) == [
        Corrupt(key="k", reason="its format 4 is newer than this version supports (3)")
    ]
    assert await redis_client.get("k") == b"\4" + b"data of version 4"


async def change(client: Redis, key: str, at: int, new: bytes) -> None:
    """Replace bytes in the header of a record and update its checksum."""
    record = await client.get(key)
    assert isinstance(record, bytes)
    await client.set(key, changed(record, at, new), keepttl=True)


async def test_attempts_are_capped_at_65535(store: RedisIdempotencyRepository, redis_client: Redis) -> None:
    await take(store, request_for("k", lease=timedelta(0)))
    await change(redis_client, "k", 3, b"\xff\xfe")

    first = await take(store, request_for("k", lease=timedelta(0)))
    second = await take(store, request_for("k"))

    assert (first.attempt, second.attempt) == (65_535, 65_535)
    assert second.fence > first.fence


async def test_a_takeover_never_lowers_a_fence_that_is_ahead_of_the_clock(
    store: RedisIdempotencyRepository, redis_client: Redis
) -> None:
    ahead = 2**52
    await take(store, request_for("k", lease=timedelta(0)))
    await change(redis_client, "k", 5, ahead.to_bytes(7, "big"))

    assert (await take(store, request_for("k"))).fence == ahead + 1


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    raw=st.binary(max_size=90)
    | st.builds(
        bytes.__add__, st.sampled_from([b"\1\1", b"\1\2", b"\1\3", b"\2\1", b"\2\2", b"\2\3"]), st.binary(max_size=90)
    )
    # Arbitrary bytes after the flags of a released reservation, which Lua would take over.
    | st.builds(
        lambda flags, rest: bytes((1, 1, flags)) + b"\0\1" + bytes(13) + rest,
        st.integers(0, 255),
        st.binary(max_size=60),
    )
    # Also with a valid checksum of the header.
    | st.builds(
        lambda flags, rest: checked(bytes((2, 1, flags)) + b"\0\1" + bytes(13)) + rest,
        st.integers(0, 255),
        st.binary(max_size=60),
    )
)
@example(raw=checked(bytes((2, 1, 0)) + b"\0\1" + bytes(13)) + bytes(24))
@example(raw=bytes((1, 1, 96)) + b"\0\1" + bytes(29))
@example(raw=bytes((1, 1, 4)) + b"\0\1" + bytes(29))
@example(raw=bytes((1, 1, 0)) + b"\0\0" + bytes(29))
async def test_lua_and_python_agree_on_what_is_readable(redis_server: RedisServer, raw: bytes) -> None:
    async with redis_server.client() as client:
        store = RedisIdempotencyRepository(client)
        await client.set("k", raw, px=60_000)
        request = request_for("k")

        (verdict,) = await store.reserve([request])

        kept = await client.get("k")
        if isinstance(verdict, Reserved):
            codec.parse(raw)
            assert isinstance(kept, bytes)
            assert codec.parse(kept).token == request.token
        else:
            assert kept == raw


async def test_a_completed_record_is_small(store: RedisIdempotencyRepository, redis_client: Redis) -> None:
    keys = [f"idempotency:billing:charge:order_placed:id:{number}".ljust(90, "0") for number in range(1, 10)]
    for key in keys:
        request = ReserveRequest(
            key=key,
            token=os.urandom(16),
            lease=LEASE,
            retention=RETENTION,
            fingerprint=os.urandom(16),
            owner="o" * 128,
            trace=TraceLink(os.urandom(16), os.urandom(8)),
        )
        await store.complete([Completion(reservation=await take(store, request), ttl=TTL)])

    allocator = (await redis_client.info("memory"))["mem_allocator"]
    used = [await redis_client.memory_usage(key) or 0 for key in keys]

    assert {await redis_client.strlen(key) for key in keys} == {60}
    # The allocator of libc rounds up more than jemalloc, and reuses larger blocks.
    assert 0 < min(used) <= (200 if allocator.startswith("jemalloc") else 216)


async def test_a_client_that_decodes_responses_is_refused(redis_url: str) -> None:
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        with pytest.raises(StoreConfigurationError, match="decode_responses=False"):
            RedisIdempotencyRepository(client)


async def test_the_store_implements_the_protocol(store: RedisIdempotencyRepository) -> None:
    assert isinstance(store, IdempotencyRepository)


async def test_a_scan_skips_keys_that_are_not_utf8(store: RedisIdempotencyRepository, redis_client: Redis) -> None:
    await redis_client.set(b"p:\xff", b"x", px=60_000)
    await take(store, request_for("p:good"))

    assert [record.key async for record in store.scan("p:")] == ["p:good"]


@pytest.mark.scenario(10, 11)
async def test_calls_with_lost_answers_are_repeated_safely(redis_server: RedisServer, redis_url: str) -> None:
    async with FaultProxy(redis_server.address) as proxy:
        client = redis_client(RedisStoreSettings(url=url_of(proxy.address)))
        store = RedisIdempotencyRepository(client)
        await store.complete([Completion(reservation=await take(store, request_for("warm")), ttl=TTL)])

        lost = [proxy.put(Cut(matching=b"EVALSHA"))]
        reserved = await take(store, request_for("k"))
        lost.append(proxy.put(Cut(matching=b"EVALSHA")))
        renewed = await store.renew([reserved], LEASE)
        lost.append(proxy.put(Cut(matching=b"EVALSHA")))
        completed = await store.complete([Completion(reservation=reserved, ttl=TTL, result=StoredResult(b"1"))])
        (verdict,) = await store.reserve([request_for("k")])
        await client.aclose()

    assert (reserved.attempt, renewed, completed) == (1, [True], [True])
    assert isinstance(verdict, Completed)
    assert verdict.result == StoredResult(b"1")
    assert [one.struck for one in lost] == [1, 1, 1]


def test_a_flushed_server_is_empty(redis_server: RedisServer, redis_url: str) -> None:
    with BlockingRedis.from_url(redis_url) as client:
        client.set("k", "v")
        redis_server.flush()

        assert client.dbsize() == 0
