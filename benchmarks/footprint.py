"""How much of Redis does a completed record take, as a service with its defaults leaves it?"""

from __future__ import annotations

import asyncio
from typing import Final, Literal

from opentelemetry.sdk.trace import TracerProvider
from redis.asyncio import Redis

from benchmarks.contestants import must
from benchmarks.measuring import Flat
from benchmarks.places import RedisPlace, redis_place
from benchmarks.rounds import Options, Tell, spread_of
from integr8s_idem import BaseEvent, EventRouter, IdempotencyConfig, IdempotencyManager, IdempotentEventDispatcher
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver

KEYS: Final = ("redis_bytes_per_key",)
EVENTS: Final = 1_000
KEY_BYTES: Final = 90
"""Of a default key: prefix, service, handler, type, what names the event, its UUID."""

router: Final = EventRouter()


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str


@router.on(OrderPlaced)
async def announce(event: OrderPlaced) -> None:
    """It has no result, as most handlers have none."""


async def measured(options: Options, tell: Tell) -> Flat:
    """Each figure of this question."""
    async with redis_place() as place:
        client = place.plain_client()
        before = await _used(client)
        await _handled(place)
        keys = await _records(place, client)
        sizes = [await client.memory_usage(key) or 0 for key in keys]
        told = spread_of(KEYS[0], [float(size) for size in sizes])
        told[f"{KEYS[0]}.records"] = told.pop(f"{KEYS[0]}.rounds")
        told["redis_bytes_per_key.key_bytes"] = len(keys[0])
        # With what the server's own tables need for one more key.
        told["redis_bytes_per_key.of_used_memory"] = round((await _used(client) - before) / EVENTS)
        tell(f"{KEYS[0]} = {told[KEYS[0]]}, with keys of {len(keys[0])} bytes")
        return told | {"footprint.server": place.version, "footprint.rounds": 1}


async def _handled(place: RedisPlace) -> None:
    """Events through a dispatcher whose spans are all recorded."""
    provider = TracerProvider(shutdown_on_exit=False)
    observer = OpenTelemetryObserver("notifications-eu", tracer_provider=provider)
    manager = IdempotencyManager(IdempotencyConfig(), await place.repository(), observer, scope="notifications-eu")
    dispatcher = IdempotentEventDispatcher(router, manager)
    for _ in range(EVENTS // 50):
        await asyncio.gather(*(dispatcher.dispatch(OrderPlaced(order_id=str(number))) for number in range(50)))
    await manager.close()
    provider.shutdown()


async def _records(place: RedisPlace, client: Redis) -> list[str]:
    """The keys of all records; each must hold all that it should."""
    keys = sorted([key.decode() async for key in client.scan_iter("idempotency:*", count=1_000)])
    must(len(keys) == EVENTS, f"{len(keys)} of {EVENTS} records")
    must({len(key) for key in keys} == {KEY_BYTES}, f"{keys[0]} has {len(keys[0])} bytes, not {KEY_BYTES}")
    for record in await (await place.repository()).get(keys):
        must(record is not None and record.status is IdempotencyStatus.COMPLETED, f"{record} is not completed")
        assert record is not None
        nothing = record.result is None or record.result.body == b"null"
        must(record.fingerprint and record.trace and nothing, f"{record} holds more or less than it should")
    return keys


async def _used(client: Redis) -> int:
    told = await client.info("memory")
    used: int = told["used_memory"]
    return used
