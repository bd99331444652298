"""Network faults between a worker and Redis.

The broker is in memory (see `tests.support.redis_shop`); server, proxy, driver, store and worker are real.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import PermanentError, StoreUnavailableError
from integr8s_idem.stores.redis.scripts import RELEASE, RENEW, RESERVE, SCRIPTS, SETTLE
from integr8s_idem.telemetry import Signal
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.fault_proxy import Cut, Delay, Drip, FaultProxy, HalfOpen, Refuse, Stall, Way
from tests.support.redis import RedisServer
from tests.support.redis_shop import DEAD, RedisShop, briefly, crash, open_redis_shop
from tests.support.workers import OrderPlaced

SHORT_LEASE = 1.2
"""Seconds; renewed after 0.4 seconds."""

SLOW_MACHINE = 5.0
"""Seconds that a busy machine may add to a measured time."""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer(tcp=True) as server:
        yield server


@pytest.fixture
async def proxy(server: RedisServer) -> AsyncIterator[FaultProxy]:
    server.flush()
    for script in SCRIPTS:  # otherwise, the lost response of the first call would only be NOSCRIPT
        server.admin("SCRIPT", "LOAD", script.text)
    async with FaultProxy(server.address) as proxy:
        yield proxy


async def behave_by_id(event: OrderPlaced, attempt: Attempt) -> None:
    """Behave as requested by the order's ID."""
    match event.order_id:
        case "renew":
            await asyncio.sleep(SHORT_LEASE * 0.8)
        case "release" if attempt.number == 1:
            raise ValueError("not this time")
        case "fail":
            raise PermanentError("never")


CALLS = {
    "reserve": (RESERVE, b""),
    "renew": (RENEW, b""),
    "complete": (SETTLE, b"\2"),
    "release": (RELEASE, b""),
    "fail": (SETTLE, b"\3"),
}


def calls_of(verb: str, **how: Any) -> Cut:
    """Return a cut of the calls of one verb, identified by its script and the status that it writes."""
    script, status = CALLS[verb]
    return Cut(matching=script.sha.encode(), also=b"$1\r\n%b\r\n" % status if status else b"", **how)


STEPS: dict[str, dict[str, Any]] = {
    "never sent": {"way": Way.TO_SERVER, "reset": True},
    "half sent": {"way": Way.TO_SERVER, "after": 40, "reset": True},
    "answer lost": {"reset": True},
    "half answered": {"after": 1},
    "answer lost repeatedly": {"times": 5},
}
VERBS = {"reserve": [1], "renew": [1], "complete": [1], "release": [2], "fail": []}
"""Attempts whose effects happen, by verb."""


@pytest.mark.scenario(10, 11)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("verb", VERBS)
async def test_an_interrupted_call_is_repeated_safely(
    proxy: FaultProxy, effects: Effects, verb: str, step: str
) -> None:
    async with open_redis_shop(effects, proxy.address, lease=SHORT_LEASE, behave=behave_by_id) as shop:
        shop.order(1)
        await shop.settled()
        order = OrderPlaced(order_id=verb)
        cut = proxy.put(calls_of(verb, **STEPS[step]))

        shop.publish(order)
        await shop.settled()
        proxy.heal()
        shop.publish(order)
        await shop.settled()

        assert cut.struck == (5 if "repeatedly" in step else 1)
        assert shop.attempts(verb) == VERBS[verb]
        assert shop.judge()["repeats"] == 0
        assert len(shop.broker.values(DEAD)) == (2 if verb == "fail" else 0)
        assert (shop.observer.counts[Signal.TAKEOVER], shop.observer.counts[Signal.RESERVATION_LOST]) == (0, 0)
        assert (shop.tally.leases_lost, shop.tally.waits) == (0, 0)


async def test_a_failure_whose_response_was_lost_is_recorded_once(proxy: FaultProxy, effects: Effects) -> None:
    async with open_redis_shop(effects, proxy.address, behave=behave_by_id) as shop:
        proxy.put(calls_of("fail"))

        shop.publish(OrderPlaced(order_id="fail"))
        await shop.settled()

        (record,) = [record async for record in shop.store.scan("idempotency:")]
        assert (record.status.value, record.attempt, record.error) == ("failed", 1, "PermanentError: never")


@pytest.mark.scenario(18)
async def test_a_crash_during_reserve_delays_the_event_by_one_lease(
    server: RedisServer, proxy: FaultProxy, effects: Effects
) -> None:
    async with open_redis_shop(effects, proxy.address, lease=6, timeout=5) as doomed:
        doomed.order(1)
        await doomed.settled()
        held = proxy.put(Delay(60))
        doomed.order(1)
        await eventually(lambda: server.admin("EXISTS", *_keys(server)) == 2)
        proxy.put(HalfOpen())
        await crash(doomed)
        proxy.take_away(held)

        began = time.monotonic()
        async with open_redis_shop(effects, server.address, lease=6) as successor:
            successor.publish(doomed.published[-1])
            await successor.settled()

            assert successor.attempts("1") == [2]
            assert time.monotonic() - began < 6 + SLOW_MACHINE
            assert successor.observer.counts[Signal.TAKEOVER] == 1
    proxy.reset()


def _keys(server: RedisServer) -> list[str]:
    return [key for key in server.admin("KEYS", "*") if not key.endswith(":store-id")] or ["none"]


@pytest.mark.scenario(22)
async def test_a_crash_during_complete_does_not_repeat_the_work(
    server: RedisServer, proxy: FaultProxy, effects: Effects
) -> None:
    async with open_redis_shop(effects, proxy.address, lease=2, timeout=1) as doomed:
        doomed.order(1)
        await doomed.settled()
        cut = proxy.put(calls_of("complete", times=None))
        doomed.order(1)
        await eventually(lambda: cut.struck)
        proxy.put(HalfOpen())
        await crash(doomed)

        async with open_redis_shop(effects, server.address, lease=2) as successor:
            successor.publish(doomed.published[-1])
            await successor.settled()

            assert successor.tally.duplicates == 1
            assert successor.attempts("1") == [1]
    proxy.reset()


@pytest.mark.scenario(42)
@pytest.mark.parametrize("fault", [Delay(2), Drip(3), Stall()], ids=["slow", "dripping", "silent"])
async def test_a_slow_store_pauses_the_worker_without_double_reservations(
    proxy: FaultProxy, effects: Effects, fault: Delay | Drip | Stall
) -> None:
    async with open_redis_shop(effects, proxy.address) as shop:
        shop.order(1)
        await shop.settled()
        with proxy.fault(fault):
            shop.order(20)
            assert "no answer from Redis within 0.5 s" in await shop.paused()
            assert not shop.worker.worker.health().ready

        await shop.settled()

        assert shop.tally.handled == 21
        shop.untouched()


@pytest.mark.scenario(43)
async def test_a_half_open_connection_is_detected_within_the_deadline(proxy: FaultProxy, effects: Effects) -> None:
    async with open_redis_shop(effects, proxy.address) as shop:
        shop.order(1)
        await shop.settled()
        half_open = proxy.put(HalfOpen())

        shop.order(1)
        await eventually(lambda: half_open.struck)
        silent_since = time.monotonic()
        await shop.paused()
        noticed_after = time.monotonic() - silent_since
        proxy.heal()
        await shop.settled()

        assert noticed_after < 0.5 + 2.0  # without a deadline, it would take minutes
        shop.untouched()


@pytest.mark.scenario(41)
async def test_work_resumes_within_five_seconds_after_a_store_outage(proxy: FaultProxy, effects: Effects) -> None:
    async with open_redis_shop(effects, proxy.address) as shop:
        shop.order(1)
        await shop.settled()
        refuse = proxy.put(Refuse())
        proxy.reset()
        shop.order(10)
        await shop.paused()
        await eventually(lambda: refuse.struck > 8)

        proxy.heal()
        back_at = time.monotonic()
        await shop.settled()

        assert time.monotonic() - back_at < 5 + SLOW_MACHINE
        shop.untouched()


async def test_constant_connection_resets_only_delay_work(proxy: FaultProxy, effects: Effects) -> None:
    async with open_redis_shop(effects, proxy.address, behave=briefly) as shop:
        shop.order(60)

        resets = 0
        while shop.acknowledged < 60:
            proxy.reset()
            resets += 1
            await asyncio.sleep(0.03)

        assert resets > 1
        shop.untouched()


@pytest.mark.scenario(10, 11)
async def test_losing_a_third_of_the_responses_loses_and_repeats_nothing(proxy: FaultProxy, effects: Effects) -> None:
    async with open_redis_shop(effects, proxy.address, behave=briefly) as shop:
        lost = proxy.put(Cut(matching=b"EVALSHA", times=None, chance=1 / 3, seed=3, reset=True))

        shop.order(150)
        await shop.settled()

        assert lost.struck >= 5
        shop.untouched()


@pytest.mark.scenario(54)
async def test_calls_wait_for_an_exhausted_pool_without_leaking_connections(
    server: RedisServer, proxy: FaultProxy, effects: Effects
) -> None:
    narrow = {"max_connections": 2}
    async with open_redis_shop(effects, proxy.address, store=narrow, service={"concurrency": 50}) as shop:
        proxy.put(Delay(0.05))
        shop.order(40)
        counted = asyncio.create_task(_most_connections(server, shop))
        await shop.settled()
        with proxy.fault(Stall()):
            answers = await asyncio.gather(
                *(shop.store.get(["idempotency:k"]) for _ in range(20)), return_exceptions=True
            )

        assert {type(answer).__name__ for answer in answers} == {"StoreUnavailableError"}
        assert await counted <= 2
        await _until_it_answers(shop)
        shop.untouched()


async def _until_it_answers(shop: RedisShop) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await shop.store.ping()
                return
            except StoreUnavailableError:
                await asyncio.sleep(0.05)


async def _most_connections(server: RedisServer, shop: RedisShop) -> int:
    most = 0
    while shop.acknowledged < 40:
        listed = str(await asyncio.to_thread(server.admin, "CLIENT", "LIST"))
        most = max(most, listed.count("integr8s-idem"))
        await asyncio.sleep(0.02)
    return most
