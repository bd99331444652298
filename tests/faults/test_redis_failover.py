"""Failovers of Redis: by Sentinel, and with loss of acknowledged writes.

The broker is in memory (see `tests.support.redis_shop`); servers, Sentinels, driver, store and worker are real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta

import pytest
from redis.asyncio.sentinel import MasterNotFoundError

from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_sentinel_client
from integr8s_idem.telemetry import Signal
from tests.redis_faults.campaign import CAMPAIGN
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.fault_proxy import Stall
from tests.support.redis import RedisServer
from tests.support.redis_pair import lagging_pair
from tests.support.redis_sentinel import NAME, RedisGroup
from tests.support.redis_shop import RedisShop, briefly, open_redis_shop
from tests.support.workers import OrderPlaced

pytestmark = pytest.mark.usefixtures("_quick_watch")


@pytest.fixture
def _quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.worker.store_circuit.WATCH_SECONDS", 0.3)


@pytest.fixture(scope="module")
def group() -> Iterator[RedisGroup]:
    with RedisGroup() as group:
        yield group


@pytest.fixture
async def store(group: RedisGroup) -> AsyncIterator[RedisIdempotencyRepository]:
    group.primary().flush()
    client = group.client()
    yield RedisIdempotencyRepository(client, timeout=timedelta(seconds=0.5))
    await client.aclose()


@pytest.mark.scenario(44)
@pytest.mark.parametrize("lose", [RedisServer.kill, RedisServer.pause], ids=["killed", "cut off"])
async def test_a_worker_follows_the_primary_that_sentinel_names(
    group: RedisGroup, store: RedisIdempotencyRepository, effects: Effects, lose: Callable[[RedisServer], None]
) -> None:
    old = group.primary()
    async with open_redis_shop(effects, store, behave=briefly) as shop:
        shop.order(100)
        await eventually(lambda: shop.acknowledged >= 20)
        lose(old)
        shop.order(100)
        try:
            await asyncio.to_thread(group.await_failover, old)
            await shop.settled()
            await eventually(lambda: shop.observer.counts[Signal.STORE_FAILOVER])
        finally:
            await asyncio.to_thread(group.rejoin, old)

        assert shop.observer.counts[Signal.TAKEOVER] == 0, "an event waited for the end of a lease"
        assert shop.observer.counts[Signal.STORE_DATA_LOST] == 0
        assert shop.judge(records_lost=True)["lost"] == 0


@pytest.mark.scenario(50)
async def test_a_worker_follows_a_manual_failover_by_sentinel(
    group: RedisGroup, store: RedisIdempotencyRepository, effects: Effects
) -> None:
    old = group.primary()
    async with open_redis_shop(effects, store, behave=briefly) as shop:
        shop.order(20)
        await shop.settled()

        await asyncio.to_thread(group.sentinels[0].admin, "SENTINEL", "FAILOVER", NAME)
        load = asyncio.create_task(_keep_ordering(shop))
        await asyncio.to_thread(group.await_failover, old)
        load.cancel()
        await shop.settled()
        await asyncio.to_thread(group.rejoin, old)

        assert shop.judge(records_lost=True)["lost"] == 0


async def _keep_ordering(shop: RedisShop) -> None:
    while True:
        shop.order(1)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("no sentinel", "no Sentinel reports a primary for"),
        ("unknown name", "no Sentinel knows master_name = 'elsewhere'"),
    ],
)
async def test_a_missing_primary_is_an_outage(group: RedisGroup, cause: str, message: str) -> None:
    wrong = {"sentinels": ("127.0.0.1:1",)} if cause == "no sentinel" else {"master_name": "elsewhere"}
    client = redis_sentinel_client(group.settings().model_copy(update=wrong))
    store = RedisIdempotencyRepository(client, timeout=timedelta(seconds=30))

    with pytest.raises(StoreUnavailableError, match=message) as caught:
        await store.get(["k"])

    assert isinstance(caught.value.__cause__, MasterNotFoundError)
    await client.aclose()


async def test_unreachable_or_hanging_sentinels_are_skipped(group: RedisGroup) -> None:
    hanging = group.sentinels[0]
    addresses = ("127.0.0.1:1", f"127.0.0.1:{hanging.port}", f"127.0.0.1:{group.sentinels[1].port}")
    client = redis_sentinel_client(group.settings(timeout_seconds=2).model_copy(update={"sentinels": addresses}))
    store = RedisIdempotencyRepository(client, timeout=timedelta(seconds=2))

    hanging.pause()
    try:
        assert await store.get(["k"]) == [None]
    finally:
        hanging.resume()

    await client.aclose()


# Loss of acknowledged writes.


@pytest.mark.scenario(44)
async def test_a_completion_lost_in_a_failover_is_counted_and_repeats_nothing_in_a_fenced_sink(
    effects: Effects,
) -> None:
    async with lagging_pair() as pair, open_redis_shop(effects, pair.front.address) as shop:
        shop.order(5)
        await shop.settled()
        await pair.in_step()
        with pair.link.fault(Stall()):
            lost = shop.order(3)
            await shop.settled()
            await pair.fail_over()

        shop.publish(*shop.published)
        await shop.settled()
        await eventually(lambda: shop.observer.counts[Signal.STORE_FAILOVER])

        figures = shop.judge(records_lost=True)
        assert (figures["lost"], figures["repeats"]) == (0, 3)
        assert shop.attempts(lost[0].order_id) == [1, 1]
        assert shop.effects.in_sink().total() == 8


@pytest.mark.scenario(44, 45)
async def test_a_reservation_lost_in_a_failover_is_detected_at_completion(effects: Effects) -> None:
    may_go_on = asyncio.Event()
    started: list[str] = []

    async def wait(event: OrderPlaced, attempt: Attempt) -> None:
        started.append(event.order_id)
        await may_go_on.wait()

    async with lagging_pair() as pair, open_redis_shop(effects, pair.front.address, behave=wait) as shop:
        await eventually(lambda: shop.state == "running")
        await pair.in_step()
        with pair.link.fault(Stall()):
            events = shop.order(3)
            await eventually(lambda: len(started) == 3)
            await pair.fail_over()
        may_go_on.set()
        await shop.settled()
        shop.publish(*events)
        await shop.settled()

        assert shop.observer.counts[Signal.RECORD_VANISHED] == 3
        assert shop.tally.duplicates == 3
        assert shop.judge()["repeats"] == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.scenario(*CAMPAIGN.scenarios)
def test_restarts_and_failovers_under_load_lose_nothing() -> None:
    figures = CAMPAIGN.run(0, CAMPAIGN.in_test)

    assert figures["restarts"] == CAMPAIGN.in_test
    assert (figures["lost"], figures["fenced_repeats"]) == (0, 0)
