"""Round trips to the store for each event, counted from the commands that the server receives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final, Literal

import pytest
from redis.asyncio import Redis

from integr8s_idem import BaseEvent, EventRouter, IdempotencyManager
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.records import ReserveRequest, Verdict
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import RunningWorker, running

TOPIC = Partition("order_placed", 0)
CONNECTION_SETUP: Final = frozenset({"HELLO", "CLIENT", "SELECT"})
"""Sent by the driver once for each new connection, for any number of events."""
LAST: Final = "end of recording"


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"


@pytest.fixture
async def manager(redis_client: Redis) -> AsyncIterator[IdempotencyManager]:
    manager = await warm_manager(RedisIdempotencyRepository(redis_client, timeout=timedelta(seconds=5)))
    yield manager
    await manager.close()


async def warm_manager(repository: RedisIdempotencyRepository) -> IdempotencyManager:
    """Return a manager whose scripts are loaded in the server."""
    manager = IdempotencyManager(repository=repository, scope="billing")
    await manager.run("warm-up", _work)
    return manager


async def _work() -> str:
    return "done"


@asynccontextmanager
async def recorded(client: Redis) -> AsyncIterator[list[str]]:
    """Record the names of the commands that clients send during the block; the list is complete after it.

    Calls from scripts, which Redis marks with `lua`, need no round trip and are excluded.
    """
    commands: list[str] = []
    async with client.monitor() as monitor:
        yield commands
        await client.echo(LAST)
        while LAST not in (received := await monitor.next_command())["command"]:
            if received["client_type"] != "lua":
                commands.append(received["command"].partition(" ")[0].upper())
    commands[:] = [command for command in commands if command not in CONNECTION_SETUP]


async def test_a_fresh_event_costs_two_round_trips(manager: IdempotencyManager, redis_client: Redis) -> None:
    async with recorded(redis_client) as commands:
        await manager.run("order:1", _work)

    assert commands == ["EVALSHA", "EVALSHA"]


async def test_a_duplicate_costs_one_round_trip(manager: IdempotencyManager, redis_client: Redis) -> None:
    await manager.run("order:1", _work)

    async with recorded(redis_client) as commands:
        assert await manager.run("order:1", _work) == "done"

    assert commands == ["EVALSHA"]


async def test_a_hundred_events_at_once_share_their_round_trips(
    manager: IdempotencyManager, redis_client: Redis
) -> None:
    async with recorded(redis_client) as first:
        await asyncio.gather(*(manager.run(f"order:{number}", _work) for number in range(100)))
    async with recorded(redis_client) as second:
        await asyncio.gather(*(manager.run(f"order:{number}", _work) for number in range(100, 200)))

    # The first call is sent alone, and later ones in two batches: eight in total on a quiet machine.
    # On a busy machine, answers arrive in smaller parts, which causes a few more batches.
    # Without batching it would be two hundred.
    assert set(first) == set(second) == {"EVALSHA"}
    assert len(first) <= 20
    assert len(second) <= 20


class TalkativeRepository(RedisIdempotencyRepository):
    """Reads and writes before it reserves, in additional round trips."""

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        if await self.client.get("seen") is None:
            await self.client.set("seen", "1")
        return await super().reserve(requests)


async def test_a_get_and_a_set_in_addition_to_the_scripts_are_counted(redis_client: Redis) -> None:
    manager = await warm_manager(TalkativeRepository(redis_client, timeout=timedelta(seconds=5)))
    await redis_client.delete("seen")

    async with recorded(redis_client) as commands:
        await manager.run("order:1", _work)

    await manager.close()
    assert commands == ["GET", "SET", "EVALSHA", "EVALSHA"]


# Through a worker.


@asynccontextmanager
async def worker_of(manager: IdempotencyManager, **service: Any) -> AsyncIterator[RunningWorker]:
    """Run a worker that has finished its start, during which it pings the store."""
    router, broker = EventRouter(), FakeBroker()

    @router.on(OrderPlaced, name="handle")
    async def handle(event: OrderPlaced) -> str:
        return "done"

    broker.publish(OrderPlaced())
    async with running(IdempotentEventDispatcher(router, manager), broker, **service) as worker:
        await settled(worker)
        yield worker


async def trips_for(events: Sequence[OrderPlaced], worker: RunningWorker, client: Redis) -> list[str]:
    """Return the commands that the worker sends to handle and commit `events`."""
    async with recorded(client) as commands:
        worker.broker.publish(*events)
        await settled(worker)
    return commands


async def settled(worker: RunningWorker) -> None:
    """Return once every message is committed."""
    broker = worker.broker
    await worker.until(lambda: broker.committed.get(TOPIC) == len(broker.logs[TOPIC]), seconds=30)


async def test_with_partition_ordering_events_share_the_round_trip_that_reserves_them(
    manager: IdempotencyManager, redis_client: Redis
) -> None:
    events = [OrderPlaced() for _ in range(10)]

    async with worker_of(manager, ordering="partition") as worker:
        fresh = await trips_for(events, worker, redis_client)
        again = await trips_for(events, worker, redis_client)

    assert {*fresh, *again} == {"EVALSHA"}
    # Each outcome is recorded alone; on a quiet machine, four requests reserve all events.
    assert 11 <= len(fresh) <= 20
    assert len(again) <= 10
    assert worker.worker.report().tally.duplicates == 10


async def test_events_of_many_aggregates_share_the_round_trips_of_their_worker(
    manager: IdempotencyManager, redis_client: Redis
) -> None:
    events = [OrderPlaced(aggregate_id=f"order-{number}") for number in range(50)]

    async with worker_of(manager, ordering="key") as worker:
        fresh = await trips_for(events, worker, redis_client)
        again = await trips_for(events, worker, redis_client)

    assert {*fresh, *again} == {"EVALSHA"}
    # Without batching it would be a hundred, and fifty.  On a quiet machine it is ten, and five.
    assert len(fresh) <= 20
    assert len(again) <= 10
    assert worker.worker.report().tally.duplicates == 50
