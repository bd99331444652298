"""Two workers that both get each event, and a Redis that fails.

A run has one fault; its number selects the fault, and seeds its time and duration.  The brokers are in memory (see
`tests.support.redis_shop`); the Redis servers, Sentinels, stores and workers are real.
"""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final
from unittest.mock import patch

from integr8s_idem.engine.work import Attempt
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.redis import (
    RedisClusterIdempotencyRepository,
    RedisIdempotencyRepository,
    redis_cluster_client,
)
from integr8s_idem.stores.redis.buckets import BUCKET_SLOTS
from integr8s_idem.telemetry import Signal
from integr8s_idem.worker import store_circuit
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.redis import DURABLE, RedisServer
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_sentinel import RedisGroup
from tests.support.redis_shop import DEAD, RedisShop, make_client, open_redis_shop
from tests.support.workers import OrderPlaced, orders

EVENTS: Final = 120
LEASE: Final = 20.0
"""Seconds; longer than any fault here, so that a takeover would be a bug."""
TIMEOUT: Final = 0.5


@dataclass
class Servers:
    """Servers that are started on first use."""

    stack: ExitStack = field(default_factory=ExitStack)
    _single: RedisServer | None = None
    _group: RedisGroup | None = None
    _cluster: RedisCluster | None = None

    def single(self) -> RedisServer:
        if self._single is None:
            self._single = self.stack.enter_context(RedisServer(config=DURABLE))
        return self._single

    def group(self) -> RedisGroup:
        if self._group is None:
            self._group = self.stack.enter_context(RedisGroup())
        return self._group

    def cluster(self) -> RedisCluster:
        if self._cluster is None:
            self._cluster = self.stack.enter_context(RedisCluster())
        return self._cluster


# Faults: each returns once the store works again.


async def killed(servers: Servers, rng: random.Random) -> None:
    server = servers.single()
    server.kill()
    await asyncio.sleep(rng.uniform(0, 1.5))
    await asyncio.to_thread(server.start)


async def emptied(servers: Servers, rng: random.Random) -> None:
    await asyncio.to_thread(servers.single().restart_empty)


async def stalled(servers: Servers, rng: random.Random) -> None:
    server = servers.single()
    server.pause()
    try:
        await asyncio.sleep(rng.uniform(0.2, 2.5))
    finally:
        server.resume()


async def primary_killed(servers: Servers, rng: random.Random) -> None:
    await asyncio.to_thread(_fail_over, servers.group(), RedisServer.kill)


async def primary_cut_off(servers: Servers, rng: random.Random) -> None:
    await asyncio.to_thread(_fail_over, servers.group(), RedisServer.pause)


def _fail_over(group: RedisGroup, lose: Callable[[RedisServer], None]) -> None:
    old = group.primary()
    lose(old)
    group.await_failover(old)
    group.rejoin(old)


async def slots_moved(servers: Servers, rng: random.Random) -> None:
    cluster = servers.cluster()
    target = rng.choice(cluster.primaries())
    slots = sorted(set(BUCKET_SLOTS) - cluster.slots_of(target))
    await asyncio.to_thread(cluster.move_slots, rng.sample(slots, min(20, len(slots))), target)


async def cluster_primary_killed(servers: Servers, rng: random.Random) -> None:
    await asyncio.to_thread(_fail_over_in, servers.cluster(), rng, RedisServer.kill)


async def cluster_primary_cut_off(servers: Servers, rng: random.Random) -> None:
    await asyncio.to_thread(_fail_over_in, servers.cluster(), rng, RedisServer.pause)


def _fail_over_in(cluster: RedisCluster, rng: random.Random, lose: Callable[[RedisServer], None]) -> None:
    slot = rng.choice(BUCKET_SLOTS)
    old = cluster.owner(slot)
    lose(old)
    cluster.await_owner(slot, other_than=old)
    cluster.rejoin(old)


Fault = Callable[[Servers, random.Random], Awaitable[None]]
FAULTS: Final[tuple[Fault, ...]] = (
    killed,
    emptied,
    primary_killed,
    stalled,
    primary_cut_off,
    slots_moved,
    cluster_primary_killed,
    cluster_primary_cut_off,
)
"""Faults in the order in which run numbers select them."""
EXPECTED_SIGNALS: Final[dict[Fault, Signal]] = {
    emptied: Signal.STORE_DATA_LOST,
    primary_killed: Signal.STORE_FAILOVER,
    primary_cut_off: Signal.STORE_FAILOVER,
    cluster_primary_killed: Signal.STORE_FAILOVER,
    cluster_primary_cut_off: Signal.STORE_FAILOVER,
}
"""Signals that a worker must count for faults that can lose records."""
FAILING_OVER: Final[frozenset[Fault]] = frozenset({primary_killed, primary_cut_off})
"""Failovers by Sentinel."""
IN_CLUSTER: Final[frozenset[Fault]] = frozenset({slots_moved, cluster_primary_killed, cluster_primary_cut_off})


def run(first: int, count: int) -> Figures:
    """Perform the runs numbered `first` to `first + count - 1`."""
    logging.getLogger("integr8s_idem").addHandler(logging.NullHandler())
    figures = Figures()
    servers = Servers()
    with servers.stack, patch.object(store_circuit, "WATCH_SECONDS", 0.5):
        for number in range(first, first + count):
            try:
                figures.update(asyncio.run(_run(number, servers)))
            except (ViolationError, AssertionError, TimeoutError) as error:
                raise ViolationError(f"redis-faults {number} ({_fault(number).__name__}): {error}") from error
    return figures


def _fault(number: int) -> Fault:
    return FAULTS[number % len(FAULTS)]


async def _run(number: int, servers: Servers) -> Figures:
    fault, rng = _fault(number), random.Random(number)
    with tempfile.TemporaryDirectory(prefix="idem-effects-") as folder:
        async with _two_workers(servers, fault, Effects(Path(folder)), rng) as shops:
            load = asyncio.create_task(_publish(shops, number))
            await asyncio.sleep(rng.uniform(0.05, 0.8))
            await fault(servers, rng)
            await load
            for shop in shops:
                await shop.settled()
            return await _judge(shops, fault)


@asynccontextmanager
async def _two_workers(
    servers: Servers, fault: Fault, effects: Effects, rng: random.Random
) -> AsyncIterator[list[RedisShop]]:
    async def behave(event: OrderPlaced, attempt: Attempt) -> None:
        await asyncio.sleep(rng.uniform(0.001, 0.08))

    async with AsyncExitStack() as stack:
        shops = []
        for _ in range(2):
            store = await _store(servers, fault, stack)
            shops.append(await stack.enter_async_context(open_redis_shop(effects, store, lease=LEASE, behave=behave)))
        # A worker can detect another store only if it has seen the store before the fault.
        await eventually(lambda: all(shop.state == "running" for shop in shops))
        yield shops


async def _store(servers: Servers, fault: Fault, stack: AsyncExitStack) -> IdempotencyRepository:
    timeout = timedelta(seconds=TIMEOUT)
    if fault in IN_CLUSTER:
        cluster = redis_cluster_client((await asyncio.to_thread(servers.cluster)).settings(timeout_seconds=TIMEOUT))
        stack.push_async_callback(cluster.aclose)
        return RedisClusterIdempotencyRepository(cluster, timeout=timeout)
    if fault in FAILING_OVER:
        client = (await asyncio.to_thread(servers.group)).client()
    else:
        client = make_client((await asyncio.to_thread(servers.single)).address, TIMEOUT)
    stack.push_async_callback(client.aclose)
    return RedisIdempotencyRepository(client, timeout=timeout)


async def _publish(shops: list[RedisShop], number: int) -> None:
    """Publish a steady stream of orders to both workers, with a delay for the second one."""
    stream = [order.model_copy(update={"order_id": f"{number}-{order.order_id}"}) for order in orders(EVENTS)]
    late: list[OrderPlaced] = []
    for order in stream:
        shops[0].publish(order)
        late.append(order)
        if len(late) > 10:
            shops[1].publish(late.pop(0))
        await asyncio.sleep(0.015)
    shops[1].publish(*late)


async def _judge(shops: list[RedisShop], fault: Fault) -> Figures:
    """Check the results; repeats are allowed only if records can be lost, which both workers must have counted."""
    if fault in EXPECTED_SIGNALS:
        await eventually(lambda: all(shop.observer.counts[EXPECTED_SIGNALS[fault]] for shop in shops))
    requested = {event.order_id for event in shops[0].published}
    figures = shops[0].effects.judge(requested, records_lost=fault in EXPECTED_SIGNALS)
    counts = shops[0].observer.counts + shops[1].observer.counts
    if counts[Signal.TAKEOVER] or any(shop.broker.values(DEAD) or shop.tally.retries for shop in shops):
        raise ViolationError(f"an outage cost attempts: {[shop.snapshot() for shop in shops]}")
    if figures["repeats"] and fault not in EXPECTED_SIGNALS:
        raise ViolationError(f"repeats although no record was lost: {figures}")
    figures.update(
        restarts=1,
        failovers=int(EXPECTED_SIGNALS.get(fault) is Signal.STORE_FAILOVER),
        vanished=counts[Signal.RECORD_VANISHED],
        data_losses=counts[Signal.STORE_DATA_LOST],
    )
    return figures


CAMPAIGN: Final = Campaign(
    name="redis-faults",
    counts="restarts",
    says="Redis is killed and restarted, restarted empty, stalled, or failed over by Sentinel, or a cluster is "
    "resharded or failed over, under two workers in one process on a broker in memory",
    scenarios=(41, 44, 46),
    in_test=3,
    target=100,
    batch=10,
    run=run,
)
