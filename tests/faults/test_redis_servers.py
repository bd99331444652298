"""A Redis that is away, emptied or unfit, under a worker.

The broker is in memory (see `tests.support.redis_shop`); server, driver, store and worker are real.
`tests/integration/test_redis_store_errors.py` has the same faults call by call.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from integr8s_idem.telemetry import Signal
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.redis import DURABLE, RedisServer
from tests.support.redis_shop import DEAD, Held, briefly, open_redis_shop

SECRET = "hunter2-hunter2"


@pytest.fixture
def _quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.worker.gate.WATCH_SECONDS", 0.3)


# Away.


@pytest.mark.scenario(40)
async def test_a_worker_whose_store_is_down_at_its_start_fetches_nothing_until_it_is_there(effects: Effects) -> None:
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
async def test_a_store_killed_and_started_again_costs_no_attempt_and_work_resumes(
    server: RedisServer, effects: Effects
) -> None:
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
async def test_a_store_that_hangs_for_a_while_costs_no_attempt(server: RedisServer, effects: Effects) -> None:
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


# Emptied.


@pytest.mark.usefixtures("_quick_watch")
@pytest.mark.scenario(45, 46)
async def test_records_flushed_under_running_handlers_are_counted_and_nothing_is_lost(
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
async def test_a_record_evicted_under_its_handler_is_remembered_after_all(
    server: RedisServer, effects: Effects
) -> None:
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
async def test_a_store_that_lost_its_data_says_so_and_what_was_done_may_be_done_again(
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
        assert "Find out who flushed it, or make it keep its data" in caplog.text
        assert shop.broker.values(DEAD) == []


@pytest.mark.scenario(51)
async def test_scripts_flushed_all_the_time_are_loaded_again(server: RedisServer, effects: Effects) -> None:
    async with open_redis_shop(effects, server.address, behave=briefly) as shop:
        shop.order(150)

        while shop.acknowledged < 150:
            await asyncio.to_thread(server.admin, "SCRIPT", "FLUSH")

        shop.untouched()


@pytest.mark.scenario(47)
async def test_a_policy_that_drops_records_is_told_loudly_at_the_start(
    effects: Effects, caplog: pytest.LogCaptureFixture
) -> None:
    with RedisServer(config={**DURABLE, "maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}) as server:
        async with open_redis_shop(effects, server.address) as shop:
            shop.order(1)
            await shop.settled()

    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("allkeys-lru drops records" in warning and "set it to noeviction" in warning for warning in warnings)
