"""Records that are damaged, older, newer or foreign, on a real Redis: never overwritten, never treated as valid.

The last test uses a broker in memory.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Literal

import pytest
from redis.asyncio import Redis

from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.keys import Key
from integr8s_idem.records import (
    Completed,
    Completion,
    Corrupt,
    Failure,
    Reserved,
    ReserveRequest,
    StoredResult,
    TraceLink,
    Verdict,
)
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.stored import flips, settled_earlier, unchecked

LEASE = timedelta(seconds=30)
TTL = timedelta(hours=1)
AFTER_FINGERPRINT = 38
AFTER_TRACE_CHECKSUM = 66
"""Offsets in a record that has both fields."""
FOREIGN = [b"", b"{}", b'{"status": "completed", "result": 1}', b"\x80\x04N.", b"1", b"\0" * 60, b"\xff" * 60]


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"


@pytest.fixture
def store(redis_client: Redis) -> RedisIdempotencyRepository:
    return RedisIdempotencyRepository(redis_client, timeout=timedelta(seconds=20))


def request_for(key: str = "k", lease: timedelta = LEASE) -> ReserveRequest:
    trace = TraceLink(os.urandom(16), os.urandom(8))
    return ReserveRequest(
        key=key, token=os.urandom(16), lease=lease, retention=TTL, fingerprint=b"f" * 16, owner="billing@h", trace=trace
    )


async def reserve_one(store: RedisIdempotencyRepository, request: ReserveRequest) -> Reserved:
    (verdict,) = await store.reserve([request])
    assert isinstance(verdict, Reserved)
    return verdict


async def raw_of(client: Redis, key: str = "k") -> bytes:
    record = await client.get(key)
    assert isinstance(record, bytes)
    return record


async def spread(client: Redis, records: list[bytes]) -> list[str]:
    """Write each record under its own key, and return the keys."""
    keys = [f"k{number}" for number in range(len(records))]
    await client.mset(dict(zip(keys, records, strict=True)))
    return keys


async def put_in_state(store: RedisIdempotencyRepository, state: str) -> None:
    reserved = await reserve_one(store, request_for(lease=timedelta(0) if state == "lapsed" else LEASE))
    match state:
        case "released":
            await store.release([reserved])
        case "completed":
            await store.complete([Completion(reservation=reserved, ttl=TTL, result=StoredResult(b'"receipt"'))])
        case "failed":
            await store.fail([Failure(reservation=reserved, ttl=TTL, error="no such card")])


@pytest.mark.scenario(92, 94)
@pytest.mark.parametrize("state", ["held", "lapsed", "released", "completed", "failed"])
async def test_a_flipped_bit_is_detected_and_the_record_is_unchanged(
    store: RedisIdempotencyRepository, redis_client: Redis, state: str
) -> None:
    await put_in_state(store, state)
    damaged = list(flips(await raw_of(redis_client)))
    keys = await spread(redis_client, damaged)

    verdicts = await store.reserve([request_for(key) for key in keys])

    # A takeover overwrites everything after the fingerprint, including the damage.
    detected = 8 * AFTER_FINGERPRINT if state in {"lapsed", "released"} else len(verdicts)
    assert {type(verdict) for verdict in verdicts[:detected]} == {Corrupt}
    assert all(isinstance(verdict, Corrupt) or is_second_run(verdict) for verdict in verdicts)
    left = await redis_client.mget(keys)
    assert all(
        now == then for verdict, now, then in zip(verdicts, left, damaged, strict=True) if isinstance(verdict, Corrupt)
    )


@pytest.mark.scenario(92, 94)
@pytest.mark.parametrize("verb", ["complete", "fail", "renew", "release", "reserve again"])
async def test_no_write_of_the_owner_adds_a_valid_checksum_to_a_damaged_record(
    store: RedisIdempotencyRepository, redis_client: Redis, verb: str
) -> None:
    request = request_for()
    reserved = await reserve_one(store, request)
    keys = await spread(redis_client, list(flips(await raw_of(redis_client))))
    reservations = [
        Reserved(key=key, token=reserved.token, attempt=1, fence=reserved.fence, lease=LEASE) for key in keys
    ]
    result = StoredResult(b'"receipt"')

    await write(store, verb, reservations, request, result)

    verdicts = await store.reserve([request_for(key) for key in keys])
    unharmed = [verdict for verdict in verdicts if not isinstance(verdict, Corrupt)]
    match verb:
        case "complete" | "fail":
            # Token, owner and their checksum are not kept, nor is damage in them.
            assert len(verdicts) - len(unharmed) >= 8 * AFTER_TRACE_CHECKSUM
            assert all(is_valid(verdict, result) for verdict in unharmed)
        case "release":
            assert len(verdicts) - len(unharmed) >= 8 * AFTER_FINGERPRINT
            assert all(map(is_second_run, unharmed))
        case _:
            assert unharmed == []


async def write(
    store: RedisIdempotencyRepository,
    verb: str,
    reservations: list[Reserved],
    request: ReserveRequest,
    result: StoredResult,
) -> None:
    match verb:
        case "complete":
            await store.complete(
                [Completion(reservation=reservation, ttl=TTL, result=result) for reservation in reservations]
            )
        case "fail":
            await store.fail([Failure(reservation=reservation, ttl=TTL, error="no") for reservation in reservations])
        case "renew":
            await store.renew(reservations, LEASE)
        case "release":
            await store.release(reservations)
        case _:
            requests = [
                ReserveRequest(
                    key=reservation.key, token=request.token, lease=LEASE, retention=TTL, fingerprint=b"f" * 16
                )
                for reservation in reservations
            ]
            await store.reserve(requests)


def is_second_run(verdict: Verdict) -> bool:
    return isinstance(verdict, Reserved) and verdict.attempt == 2


def is_valid(verdict: Verdict, result: StoredResult) -> bool:
    attempt = getattr(verdict, "attempt", None)
    return attempt == 1 and getattr(verdict, "result", result) == result and getattr(verdict, "error", "no") == "no"


@pytest.mark.scenario(92)
@pytest.mark.parametrize("foreign", FOREIGN, ids=ascii)
async def test_foreign_data_under_a_key_is_corrupt_for_all_calls_and_unchanged(
    store: RedisIdempotencyRepository, redis_client: Redis, foreign: bytes
) -> None:
    reserved = await reserve_one(store, request_for())
    await redis_client.set("k", foreign)

    (verdict,) = await store.reserve([request_for()])

    assert isinstance(verdict, Corrupt)
    assert await refused_by_all(store, reserved)
    assert await redis_client.get("k") == foreign


@pytest.mark.scenario(92)
async def test_a_value_of_another_type_is_corrupt_for_all_calls_and_unchanged(
    store: RedisIdempotencyRepository, redis_client: Redis
) -> None:
    reserved = await reserve_one(store, request_for())
    await redis_client.delete("k")
    await redis_client.rpush("k", "1")

    (verdict,) = await store.reserve([request_for()])

    assert isinstance(verdict, Corrupt)
    assert await refused_by_all(store, reserved)
    assert await redis_client.lrange("k", 0, -1) == [b"1"]


@pytest.mark.scenario(93)
@pytest.mark.parametrize("newer", range(4, 32))
async def test_a_record_of_a_newer_format_is_not_changed(
    store: RedisIdempotencyRepository, redis_client: Redis, newer: int
) -> None:
    reserved = await reserve_one(store, request_for(lease=timedelta(0)))
    record = bytes((newer,)) + (await raw_of(redis_client))[1:]
    await redis_client.set("k", record)

    (verdict,) = await store.reserve([request_for()])

    assert verdict == Corrupt(key="k", reason=f"its format {newer} is newer than this version supports (3)")
    assert await refused_by_all(store, reserved)
    assert await redis_client.get("k") == record


async def refused_by_all(store: RedisIdempotencyRepository, reserved: Reserved) -> bool:
    answers = [
        *await store.renew([reserved], LEASE),
        *await store.release([reserved]),
        *await store.complete([Completion(reservation=reserved, ttl=TTL)]),
        *await store.fail([Failure(reservation=reserved, ttl=TTL, error="no")]),
    ]
    return not any(answers)


@pytest.mark.scenario(93)
@pytest.mark.parametrize("state", ["held", "completed", "failed"])
async def test_a_record_of_the_older_format_gives_the_same_verdict(
    store: RedisIdempotencyRepository, redis_client: Redis, state: str
) -> None:
    await put_in_state(store, state)
    (before,) = await store.reserve([request_for()])
    raw = await raw_of(redis_client)
    older = unchecked(raw if state == "held" else settled_earlier(raw))
    await redis_client.set("k", older)

    (verdict,) = await store.reserve([request_for()])

    assert type(verdict) is type(before)
    if isinstance(verdict, Completed):
        assert verdict == before
    assert await redis_client.get("k") == older


@pytest.mark.scenario(93)
@pytest.mark.parametrize("state", ["lapsed", "released"])
async def test_a_record_of_the_older_format_gets_checksums_when_it_is_taken_over(
    store: RedisIdempotencyRepository, redis_client: Redis, state: str
) -> None:
    await put_in_state(store, state)
    await redis_client.set("k", unchecked(await raw_of(redis_client)))

    taken = await reserve_one(store, request_for())

    assert (taken.attempt, taken.previous.value) == (2, state)
    assert (await raw_of(redis_client))[0] == 2
    assert await store.complete([Completion(reservation=taken, ttl=TTL)]) == [True]


@pytest.mark.scenario(92, 94)
@pytest.mark.parametrize("at", [2, 17, -1])
async def test_a_delivery_with_a_damaged_record_is_dead_lettered_without_a_run(
    store: RedisIdempotencyRepository, redis_client: Redis, at: int
) -> None:
    broker, runs, router = FakeBroker(), list[str](), EventRouter()

    @router.on(OrderPlaced, name="charge")
    async def charge(event: OrderPlaced) -> str:
        runs.append(event.order_id)
        return "receipt"

    manager = IdempotencyManager(IdempotencyConfig(), store, scope="billing")
    event: Any = OrderPlaced()
    broker.publish(event)
    async with running(IdempotentEventDispatcher(router, manager), broker) as worker:
        await worker.until(lambda: broker.committed.get(Partition("order_placed", 0)) == 1, 30)
        full = manager.space.full(Key.of_event("charge", "order_placed", "id", event.event_id))
        record = bytearray(await raw_of(redis_client, full))
        record[at] ^= 4
        await redis_client.set(full, bytes(record), keepttl=True)
        broker.publish(event)
        await worker.until(lambda: broker.committed.get(Partition("order_placed", 0)) == 2, 30)

    (dead_letter,) = broker.values("order_placed.dlq")
    assert runs == ["1"]
    assert dict(dead_letter.headers)["idempotency-dlq-reason"] == b"corrupt_record"
    assert await redis_client.get(full) == bytes(record)
