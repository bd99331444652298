"""Workers whose Redis is down, emptied, has lost its last writes, or is misconfigured.

The broker is in memory (see `tests.support.redis_shop`); server, driver, store and worker are real.
`tests/integration/test_redis_store_errors.py` covers the same faults for each store call.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from integr8s_idem.telemetry import Signal
from integr8s_idem.worker.store_circuit import StoreCircuit
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.redis import DURABLE, RedisServer
from tests.support.redis_shop import DEAD, Held, briefly, open_redis_shop

COUNTED_LOSSES = {
    Signal.STORE_DATA_LOST,
    Signal.STORE_FAILOVER,
    Signal.STORE_RESTART,
    Signal.RECORD_VANISHED,
    Signal.TAKEOVER,
}


@pytest.fixture
def _quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.worker.store_circuit.WATCH_SECONDS", 0.3)


# Outages.


@pytest.mark.scenario(40)
async def test_a_worker_fetches_nothing_until_its_store_is_available(effects: Effects) -> None:
    with RedisServer() as server:
        server.kill()
        async with open_redis_shop(effects, server.address) as shop:
            shop.order(5)
            await eventually(lambda: "no connection to Redis" in shop.reason)
            assert not shop.worker.worker.health().ready
            assert shop.worker.consumer.assignment() == set()

            await asyncio.to_thread(server.start)
            await shop.settled()

            assert shop.worker.worker.health().ready
            shop.untouched()


@pytest.mark.scenario(41)
async def test_a_store_restart_costs_no_attempt_and_work_resumes(server: RedisServer, effects: Effects) -> None:
    async with open_redis_shop(effects, server.address, behave=briefly) as shop:
        shop.order(100)
        await eventually(lambda: shop.acknowledged >= 20)

        server.kill()
        shop.order(50)
        await shop.paused()
        await asyncio.to_thread(server.start)
        back_at = time.monotonic()
        await eventually(lambda: shop.state == "running")
        resumed_after = time.monotonic() - back_at
        await shop.settled()

        assert resumed_after < 5
        assert shop.observer.counts[Signal.STORE_DATA_LOST] == 0
        shop.untouched()


@pytest.mark.scenario(41, 43)
async def test_a_store_stall_costs_no_attempt(server: RedisServer, effects: Effects) -> None:
    async with open_redis_shop(effects, server.address, behave=briefly) as shop:
        shop.order(100)
        await eventually(lambda: shop.acknowledged >= 20)

        server.pause()
        shop.order(50)
        try:
            await shop.paused()
        finally:
            server.resume()
        await shop.settled()

        shop.untouched()


# Loss of all records.


@pytest.mark.usefixtures("_quick_watch")
@pytest.mark.scenario(45, 46)
async def test_records_flushed_during_their_handlers_are_counted_and_nothing_is_lost(
    server: RedisServer, effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    held = Held()
    async with open_redis_shop(effects, server.address, behave=held) as shop:
        events = shop.order(8)
        await eventually(lambda: len(held.began) == 8)

        server.admin("FLUSHALL")
        held.may_go_on.set()
        await shop.settled()
        shop.publish(*events)
        await shop.settled()
        await eventually(lambda: shop.observer.counts[Signal.STORE_DATA_LOST])

        assert shop.observer.counts[Signal.RECORD_VANISHED] == 8
        assert shop.tally.duplicates == 8
        assert shop.judge()["repeats"] == 0
        assert "lost its records" in caplog.text


@pytest.mark.scenario(45)
async def test_a_record_evicted_during_its_handler_is_written_again(server: RedisServer, effects: Effects) -> None:
    held = Held()
    async with open_redis_shop(effects, server.address, behave=held) as shop:
        (event,) = shop.order(1)
        await eventually(lambda: held.began)
        (key,) = [key for key in server.admin("KEYS", "*") if not key.endswith(":store-id")]

        server.admin("DEL", key)
        held.may_go_on.set()
        await shop.settled()
        shop.publish(event)
        await shop.settled()

        assert shop.attempts() == [1]
        assert (shop.observer.counts[Signal.RECORD_VANISHED], shop.tally.duplicates) == (1, 1)
        assert shop.observer.counts[Signal.STORE_DATA_LOST] == 0


@pytest.mark.usefixtures("_quick_watch")
@pytest.mark.scenario(46)
@pytest.mark.parametrize("how", ["flushed", "restarted empty"])
async def test_a_loss_of_all_records_is_logged_and_redelivered_events_run_again(
    server: RedisServer, effects: Effects, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    async with open_redis_shop(effects, server.address) as shop:
        done = shop.order(5)
        await shop.settled()

        await asyncio.to_thread(server.flush if how == "flushed" else server.restart_empty)
        shop.publish(*done)
        shop.order(20)
        await shop.settled()
        await eventually(lambda: shop.observer.counts[Signal.STORE_DATA_LOST])

        assert shop.observer.counts[Signal.STORE_DATA_LOST] == 1
        assert shop.judge(records_lost=True)["repeats"] == 5
        assert "Find out who flushed it, or make it persist its data" in caplog.text
        assert shop.broker.values(DEAD) == []


# Loss of the last writes, as in a power failure: the record that identifies the store is older, and survives.


EVERY_SECOND = {"appendonly": "yes", "appendfsync": "everysec"}


async def written(server: RedisServer) -> int:
    """Return the length of the append-only file, once it contains all acknowledged writes."""
    await eventually(lambda: server.admin("INFO", "persistence")["aof_buffer_length"] == 0)
    return file_of(server).stat().st_size


def file_of(server: RedisServer) -> Path:
    """Return the incremental append-only file; Redis 7 has a folder of several files."""
    (file,) = [path for path in server.folder.rglob("*.aof") if not path.name.endswith(".base.aof")]
    return file


async def lose_power(server: RedisServer, synced: int) -> None:
    """Kill the server, and start it with only the first `synced` bytes of its file."""
    # While a sync is running, Redis may buffer acknowledged writes in memory for two seconds.
    await eventually(lambda: file_of(server).stat().st_size > synced)
    server.kill()
    os.truncate(file_of(server), synced)
    await asyncio.to_thread(server.start)


@pytest.mark.scenario(31)
async def test_work_whose_records_were_lost_in_a_power_failure_runs_again_and_the_restart_is_counted(
    effects: Effects,
) -> None:
    with RedisServer(config=EVERY_SECOND) as server:
        async with open_redis_shop(effects, server.address) as shop:
            circuit = StoreCircuit(shop.store.ping, shop.observer)
            await circuit.check()
            kept = shop.order(3)
            await shop.settled()
            synced = await written(server)
            lost = shop.order(5)
            await shop.settled()

            await lose_power(server, synced)
            shop.publish(*kept, *lost)
            await shop.settled()

            assert shop.tally.duplicates == len(kept)
            assert [shop.attempts(event.order_id) for event in lost] == [[1, 1]] * len(lost)
            # Nothing is lost, and nothing is repeated in the fenced sink.
            assert shop.judge(records_lost=True)["repeats"] == len(lost)
            await circuit.check()
            await circuit.stop()
            assert {signal: shop.observer.counts[signal] for signal in COUNTED_LOSSES} == {
                **dict.fromkeys(COUNTED_LOSSES, 0),
                Signal.STORE_RESTART: 1,
            }


@pytest.mark.scenario(31)
async def test_work_whose_completion_was_lost_in_a_power_failure_runs_again_as_a_takeover(effects: Effects) -> None:
    held = Held()
    with RedisServer(config=EVERY_SECOND) as server:
        async with open_redis_shop(effects, server.address, behave=held, lease=1.0) as shop:
            (event,) = shop.order(1)
            await eventually(lambda: held.began)
            synced = await written(server)
            held.may_go_on.set()
            await shop.settled()

            await lose_power(server, synced)
            shop.publish(event)
            await shop.settled()

            assert shop.attempts() == [1, 2]
            assert shop.observer.counts[Signal.TAKEOVER] == 1
            assert shop.judge()["repeats"] == 1


@pytest.mark.scenario(51)
async def test_constantly_flushed_scripts_are_loaded_again(server: RedisServer, effects: Effects) -> None:
    async with open_redis_shop(effects, server.address, behave=briefly) as shop:
        shop.order(150)

        while shop.acknowledged < 150:
            await asyncio.to_thread(server.admin, "SCRIPT", "FLUSH")

        shop.untouched()


@pytest.mark.scenario(47)
async def test_an_eviction_policy_that_drops_records_is_logged_as_a_warning_at_start(
    effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(config={**DURABLE, "maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}) as server:
        async with open_redis_shop(effects, server.address) as shop:
            shop.order(1)
            await shop.settled()

    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("allkeys-lru drops records" in warning and "set it to noeviction" in warning for warning in warnings)
