"""Behavior of the in-memory store beyond the contract of all stores."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import pytest

from integr8s_idem.records import Completed, Completion, InProgress, Reserved, ReserveRequest
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.memory import MemoryIdempotencyRepository

LEASE = timedelta(seconds=30)
RETENTION = timedelta(seconds=60)


def request_for(key: str) -> ReserveRequest:
    return ReserveRequest(key=key, token=os.urandom(16), lease=LEASE, retention=RETENTION)


async def test_the_memory_store_uses_the_wall_clock_by_default() -> None:
    store = MemoryIdempotencyRepository()
    before = datetime.now(UTC)

    (reserved,) = await store.reserve([request_for("a")])

    assert isinstance(reserved, Reserved)
    await store.complete([Completion(reservation=reserved, ttl=LEASE)])
    (verdict,) = await store.reserve([request_for("a")])
    assert isinstance(verdict, Completed)
    assert before <= verdict.completed_at <= datetime.now(UTC)
    assert reserved.fence >= before.timestamp() * 1_000_000 - 1


async def test_expired_records_are_dropped_although_nobody_requests_them() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    store = MemoryIdempotencyRepository(clock=lambda: now)
    await store.reserve([request_for(f"old:{number}") for number in range(1_500)])

    now += RETENTION
    await store.reserve([request_for(f"new:{number}") for number in range(1_500)])

    assert len(store._entries) == 1_500


@pytest.mark.scenario(78)
async def test_fences_grow_even_if_the_clock_stops_or_goes_back() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    store = MemoryIdempotencyRepository(clock=lambda: now)
    first, second = await store.reserve([request_for("a"), request_for("b")])
    assert isinstance(first, Reserved)
    assert isinstance(second, Reserved)

    now -= timedelta(days=1)
    await store.delete(["a"])
    (third,) = await store.reserve([request_for("a")])

    assert isinstance(third, Reserved)
    assert first.fence < second.fence < third.fence


@pytest.mark.scenario(78)
async def test_a_clock_that_goes_back_ends_no_lease() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    store = MemoryIdempotencyRepository(clock=lambda: now)
    await store.reserve([request_for("a")])

    now -= timedelta(days=1)

    assert isinstance((await store.reserve([request_for("a")]))[0], InProgress)


async def test_the_health_of_the_memory_store_warns_about_lost_records() -> None:
    store = MemoryIdempotencyRepository()

    health = await store.ping()

    assert health.kind == "memory"
    assert "lost when it exits" in health.warnings[0]
    assert isinstance(store, IdempotencyRepository)
