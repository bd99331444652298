"""The faults of a run and their times, drawn from the seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING, Any, Final

from tests.simulation.workload import LEASE

if TYPE_CHECKING:
    from tests.simulation.world import World

Fault = Callable[["World", Random], Coroutine[Any, Any, None]]


async def crash(world: World, random: Random) -> None:
    """A process dies between two steps, and is restarted."""
    world.after_some_steps(random, world.crash)


async def stall(world: World, random: Random) -> None:
    """A process stalls, for less or more than a lease."""
    seconds = random.choice((random.uniform(0.1, 2.0), random.uniform(LEASE, 2.5 * LEASE)))
    world.after_some_steps(random, lambda worker: world.stall(worker, seconds))


async def stall_before_a_start(world: World, random: Random) -> None:
    """A process stalls for more than a lease, between its next reservation and the start of the handler."""
    worker = world.some_worker(random)
    if worker is None or worker.client is None:
        return
    seconds, steps = random.uniform(LEASE, 2.5 * LEASE), random.randint(1, 5)
    worker.client.when_reserved = lambda: world.after_steps(worker, steps, lambda victim: world.stall(victim, seconds))


async def stop(world: World, random: Random) -> None:
    """A process gets SIGTERM, and sometimes a second one."""
    worker = world.some_worker(random)
    if worker is None:
        return
    world.history.note("stop", worker.process.name)
    worker.stop()
    if random.random() < 0.3:
        await asyncio.sleep(random.uniform(0, 1.5))
        worker.stop_at_once()


async def cut_off(world: World, random: Random) -> None:
    """A process cannot reach store and broker, for less or more than a lease."""
    worker = world.some_worker(random)
    if worker is not None:
        await world.cut_off(worker, random.uniform(0.2, 3 * LEASE))


async def throw_out(world: World, random: Random) -> None:
    """The group removes a healthy member."""
    worker = world.some_worker(random)
    if worker is not None and worker.consumer is not None:
        world.broker.group.leave(worker.consumer)


async def rebalance(world: World, random: Random) -> None:
    """The group rebalances without a reason; sometimes the offsets are rewound."""
    if random.random() < 0.3:
        world.broker.group.rewind = random.randint(1, 5)
    world.broker.group.begin_rebalance()


async def outage(world: World, random: Random) -> None:
    """The store is down."""
    world.server.down = True
    await asyncio.sleep(random.uniform(0.2, 2 * LEASE))
    world.server.down = False


async def bad_weather(world: World, random: Random) -> None:
    """The network to the store loses, repeats and delays requests."""
    weather = random.choice((world.store_network.weather, world.broker.network.weather))
    name = random.choice(("lose_requests", "lose_replies", "repeat", "slow"))
    setattr(weather, name, random.uniform(0.05, 0.6))
    await asyncio.sleep(random.uniform(0.5, LEASE * 1.5))
    setattr(weather, name, 0.0)


async def lose_records(world: World, random: Random) -> None:
    """The store evicts a record, or all of them."""
    keys = world.server.keys()
    if keys:
        world.server.lose(keys if random.random() < 0.2 else [random.choice(keys)])


async def clock_jump(world: World, random: Random) -> None:
    """The store's clock jumps, forwards or backwards."""
    world.server.offset += random.uniform(-LEASE, 2 * LEASE)
    world.history.truth.jumps += 1
    world.history.note("clock jump", world.server.offset)


async def poll_failures(world: World, random: Random) -> None:
    """Polls fail and lose their messages."""
    world.broker.poll_failures = random.uniform(0.1, 0.7)
    await asyncio.sleep(random.uniform(0.5, 5))
    world.broker.poll_failures = 0.0


async def commit_failures(world: World, random: Random) -> None:
    """Commits fail or get no answer."""
    world.broker.commit_failures, world.broker.hold_ups = random.uniform(0, 0.5), random.uniform(0, 0.4)
    await asyncio.sleep(random.uniform(0.5, 5))
    world.broker.commit_failures = world.broker.hold_ups = 0.0


async def refusal(world: World, random: Random) -> None:
    """The broker rejects events and dead letters."""
    world.broker.refusing = True
    await asyncio.sleep(random.uniform(0.2, 5))
    world.broker.refusing = False


FAULTS: Final[tuple[Fault, ...]] = (
    crash,
    stall,
    stall_before_a_start,
    stop,
    cut_off,
    throw_out,
    rebalance,
    outage,
    bad_weather,
    lose_records,
    clock_jump,
    poll_failures,
    commit_failures,
    refusal,
)


async def wreak_havoc(world: World, random: Random, seconds: float) -> None:
    """Inject some kinds of faults at some times within `seconds`."""
    kinds = random.sample(FAULTS, random.randint(1, 5))
    moments = sorted(random.uniform(0.5, seconds) for _ in range(random.randint(1, 10)))
    loop = asyncio.get_running_loop()
    begun, under_way = loop.time(), []
    for moment in moments:
        await asyncio.sleep(begun + moment - loop.time())
        fault = random.choice(kinds)
        world.history.note("fault", fault.__name__)
        under_way.append(loop.create_task(fault(world, random)))
    await asyncio.gather(*under_way)
