"""Writes that must be confirmed by a replica, while the replica is cut off.

The broker is in memory (see `tests.support.redis_shop`); servers, driver, store and worker are real.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta

import pytest
from redis.asyncio import Redis

from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.records import Completed, Completion, Reserved
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.store_under_test import LEASE, TTL, wish
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.fault_proxy import Stall
from tests.support.redis_pair import Pair, lagging_pair
from tests.support.redis_shop import make_client, open_redis_shop

SHORT = r"0 of 1 required replicas confirmed the write within 0\.2 s: .*; restore .* lower wait_replicas"


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with lagging_pair() as pair:
        await pair.in_step()
        yield pair


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[Redis]:
    client = make_client(pair.front.address, 1.0)
    yield client
    await client.aclose()


@pytest.fixture
def store(client: Redis) -> RedisIdempotencyRepository:
    """A store with a short timeout, for calls while the replica is cut off."""
    return RedisIdempotencyRepository(
        client, timeout=timedelta(seconds=1), wait_replicas=1, wait_timeout=timedelta(seconds=0.2)
    )


@pytest.fixture
def patient(client: Redis) -> RedisIdempotencyRepository:
    """A store with a long timeout, for calls that must succeed on a busy machine."""
    return RedisIdempotencyRepository(
        client, timeout=timedelta(seconds=20), wait_replicas=1, wait_timeout=timedelta(seconds=15)
    )


async def reserve_one(store: RedisIdempotencyRepository, key: str) -> Reserved:
    (verdict,) = await store.reserve([wish(key)])
    assert isinstance(verdict, Reserved)
    return verdict


@pytest.mark.scenario(53)
async def test_an_unreplicated_reservation_is_an_outage_and_is_found_by_the_retry(
    pair: Pair, store: RedisIdempotencyRepository, patient: RedisIdempotencyRepository
) -> None:
    request = wish("k")

    with pair.link.fault(Stall()), pytest.raises(StoreUnavailableError, match=SHORT):
        await store.reserve([request])
    (verdict,) = await patient.reserve([request])

    assert isinstance(verdict, Reserved)
    assert verdict.attempt == 1
    assert pair.new.admin("EXISTS", "k") == 1


@pytest.mark.scenario(53)
async def test_a_completion_repeated_on_another_connection_still_waits_for_the_replica(
    pair: Pair, store: RedisIdempotencyRepository, patient: RedisIdempotencyRepository, client: Redis
) -> None:
    completion = Completion(reservation=await reserve_one(patient, "k"), ttl=TTL)

    with pair.link.fault(Stall()):
        for _ in range(3):
            with pytest.raises(StoreUnavailableError, match=SHORT):
                await store.complete([completion])
            await client.connection_pool.disconnect()

    assert await patient.complete([completion]) == [True]
    assert isinstance((await patient.reserve([wish("k")]))[0], Completed)


@pytest.mark.parametrize("verb", ["renew", "release", "delete"])
async def test_writes_wait_for_replicas_and_reads_do_not(
    pair: Pair, store: RedisIdempotencyRepository, patient: RedisIdempotencyRepository, verb: str
) -> None:
    reserved = await reserve_one(patient, "k")

    writes: dict[str, Callable[[], Awaitable[object]]] = {
        "renew": lambda: store.renew([reserved], LEASE),
        "release": lambda: store.release([reserved]),
        "delete": lambda: store.delete(["k"]),
    }

    with pair.link.fault(Stall()):
        with pytest.raises(StoreUnavailableError, match=SHORT):
            await writes[verb]()
        (record,) = await store.get(["k"])

    assert (record is None) == (verb == "delete")


async def test_a_repeated_completion_is_written_again(pair: Pair, patient: RedisIdempotencyRepository) -> None:
    completion = Completion(reservation=await reserve_one(patient, "k"), ttl=TTL)
    await patient.complete([completion])
    pair.old.admin("CONFIG", "RESETSTAT")

    await patient.complete([completion])

    assert pair.old.admin("INFO", "commandstats")["cmdstat_setrange"]["calls"] == 1


async def test_a_ping_warns_about_missing_replicas(pair: Pair, store: RedisIdempotencyRepository) -> None:
    pair.new.kill()
    await eventually(lambda: pair.old.admin("INFO", "replication")["connected_slaves"] == 0)

    health = await store.ping()

    assert any("wait_replicas = 1" in warning and "restore the replicas" in warning for warning in health.warnings)


@pytest.mark.scenario(53)
async def test_a_failover_loses_no_confirmed_write(
    pair: Pair, store: RedisIdempotencyRepository, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("integr8s_idem.worker.store_circuit.WATCH_SECONDS", 0.3)
    async with open_redis_shop(effects, store) as shop:
        shop.order(20)
        await shop.settled()
        with pair.link.fault(Stall()):
            shop.order(20)
            assert "0 of 1 required replicas" in await shop.paused()
            await pair.fail_over()
        await pair.follow()
        await shop.settled()
        shop.publish(*shop.published)
        await shop.settled()
        await eventually(lambda: shop.observer.counts[Signal.STORE_FAILOVER])

        assert shop.judge() == shop.judge(records_lost=True)
        assert (shop.judge()["lost"], shop.judge()["repeats"]) == (0, 0)
