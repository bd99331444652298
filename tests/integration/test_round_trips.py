"""What an event costs at the store: the commands that came over the wire, as the store saw them."""

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
OF_A_CONNECTION: Final = frozenset({"HELLO", "CLIENT", "SELECT"})
"""Sent by the driver once for each new connection, whatever the number of events."""
LAST: Final = "nothing more is listened to"


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"


@pytest.fixture
async def manager(redis_client: Redis) -> AsyncIterator[IdempotencyManager]:
    manager = await warm_manager(RedisIdempotencyRepository(redis_client, timeout=timedelta(seconds=5)))
    yield manager
    await manager.close()


async def warm_manager(repository: RedisIdempotencyRepository) -> IdempotencyManager:
    """A manager whose scripts the server knows."""
    manager = IdempotencyManager(repository=repository, scope="billing")
    await manager.run("warm-up", _work)
    return manager


async def _work() -> str:
    return "done"


@asynccontextmanager
async def overheard(client: Redis) -> AsyncIterator[list[str]]:
    """Names of the commands that clients send during the block.  The list is complete once the block is left.

    Redis marks what a script calls as coming from `lua`; that costs no round trip and is left out.
    """
    commands: list[str] = []
    async with client.monitor() as monitor:
        yield commands
        await client.echo(LAST)
        while LAST not in (heard := await monitor.next_command())["command"]:
            if heard["client_type"] != "lua":
                commands.append(heard["command"].partition(" ")[0].upper())
    commands[:] = [command for command in commands if command not in OF_A_CONNECTION]


async def test_a_fresh_event_costs_two_round_trips(manager: IdempotencyManager, redis_client: Redis) -> None:
    async with overheard(redis_client) as commands:
        await manager.run("order:1", _work)

    assert commands == ["EVALSHA", "EVALSHA"]


async def test_a_duplicate_costs_one_round_trip(manager: IdempotencyManager, redis_client: Redis) -> None:
    await manager.run("order:1", _work)

    async with overheard(redis_client) as commands:
        assert await manager.run("order:1", _work) == "done"

    assert commands == ["EVALSHA"]


async def test_a_hundred_events_at_once_share_their_round_trips(
    manager: IdempotencyManager, redis_client: Redis
) -> None:
    async with overheard(redis_client) as first:
        await asyncio.gather(*(manager.run(f"order:{number}", _work) for number in range(100)))
    async with overheard(redis_client) as second:
        await asyncio.gather(*(manager.run(f"order:{number}", _work) for number in range(100, 200)))

    # After a call that was alone the first of many leaves alone, too; from then on they go in two halves: eight in all.
    # Where others take the processor in between, answers come in smaller parts, and some more follow.
    # One by one it would be two hundred.
    assert set(first) == set(second) == {"EVALSHA"}
    assert len(first) <= 20
    assert len(second) <= 20


class TalkativeRepository(RedisIdempotencyRepository):
    """Looks and notes before it asks, in round trips of their own."""

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        if await self.client.get("seen") is None:
            await self.client.set("seen", "1")
        return await super().reserve(requests)


async def test_a_get_and_a_set_beside_the_scripts_are_counted(redis_client: Redis) -> None:
    manager = await warm_manager(TalkativeRepository(redis_client, timeout=timedelta(seconds=5)))
    await redis_client.delete("seen")

    async with overheard(redis_client) as commands:
        await manager.run("order:1", _work)

    await manager.close()
    assert commands == ["GET", "SET", "EVALSHA", "EVALSHA"]


# The same through a worker.


@asynccontextmanager
async def worker_of(manager: IdempotencyManager, **service: Any) -> AsyncIterator[RunningWorker]:
    """A worker that is past its start, at which it asks how the store is."""
    router, broker = EventRouter(), FakeBroker()

    @router.on(OrderPlaced, name="handle")
    async def handle(event: OrderPlaced) -> str:
        return "done"

    broker.publish(OrderPlaced())
    async with running(IdempotentEventDispatcher(router, manager), broker, **service) as worker:
        await settled(worker)
        yield worker


async def trips_for(events: Sequence[OrderPlaced], worker: RunningWorker, client: Redis) -> list[str]:
    """What the worker sends to the store from the arrival of `events` to the commit of the last."""
    async with overheard(client) as commands:
        worker.broker.publish(*events)
        await settled(worker)
    return commands


async def settled(worker: RunningWorker) -> None:
    """Every message is committed."""
    broker = worker.broker
    await worker.until(lambda: broker.committed.get(TOPIC) == len(broker.logs[TOPIC]), seconds=30)


async def test_in_the_order_of_its_partition_an_event_costs_two_round_trips_and_its_duplicate_one(
    manager: IdempotencyManager, redis_client: Redis
) -> None:
    events = [OrderPlaced() for _ in range(10)]

    async with worker_of(manager, ordering="partition") as worker:
        fresh = await trips_for(events, worker, redis_client)
        again = await trips_for(events, worker, redis_client)

    assert fresh == ["EVALSHA"] * 20
    assert again == ["EVALSHA"] * 10
    assert worker.worker.report().tally.duplicates == 10


async def test_events_of_many_aggregates_share_the_round_trips_of_their_worker(
    manager: IdempotencyManager, redis_client: Redis
) -> None:
    events = [OrderPlaced(aggregate_id=f"order-{number}") for number in range(50)]

    async with worker_of(manager, ordering="key") as worker:
        fresh = await trips_for(events, worker, redis_client)
        again = await trips_for(events, worker, redis_client)

    assert {*fresh, *again} == {"EVALSHA"}
    # One by one it would be a hundred, and fifty.  On a quiet machine it is ten, and five.
    assert len(fresh) <= 20
    assert len(again) <= 10
    assert worker.worker.report().tally.duplicates == 50
