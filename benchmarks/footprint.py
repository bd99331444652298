"""How much memory does a completed record take in Redis, for a service with default settings?"""

from __future__ import annotations

import asyncio
from typing import Final, Literal

from opentelemetry.sdk.trace import TracerProvider
from redis.asyncio import Redis

from benchmarks.contestants import ensure
from benchmarks.measuring import Flat
from benchmarks.places import RedisEnvironment, redis_environment
from benchmarks.rounds import Options, Progress, spread_of
from integr8s_idem import BaseEvent, EventRouter, IdempotencyConfig, IdempotencyManager, IdempotentEventDispatcher
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver

KEYS: Final = ("redis_bytes_per_key",)
EVENTS: Final = 1_000
KEY_BYTES: Final = 90
"""Length of a default key: prefix, service, handler, event type, the name of the field, its UUID."""

router: Final = EventRouter()


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str


@router.on(OrderPlaced)
async def announce(event: OrderPlaced) -> None:
    """Return nothing, as most handlers do."""


async def measure(options: Options, progress: Progress) -> Flat:
    """Measure each figure of this benchmark."""
    async with redis_environment() as env:
        client = env.plain_client()
        before = await _used_memory(client)
        await _handle_events(env)
        keys = await _records(env, client)
        sizes = [await client.memory_usage(key) or 0 for key in keys]
        results = spread_of(KEYS[0], [float(size) for size in sizes])
        results[f"{KEYS[0]}.records"] = results.pop(f"{KEYS[0]}.rounds")
        results["redis_bytes_per_key.key_bytes"] = len(keys[0])
        # Includes the server's own tables.
        results["redis_bytes_per_key.of_used_memory"] = round((await _used_memory(client) - before) / EVENTS)
        progress(f"{KEYS[0]} = {results[KEYS[0]]}, with keys of {len(keys[0])} bytes")
        return results | {"footprint.server": env.version, "footprint.rounds": 1}


async def _handle_events(env: RedisEnvironment) -> None:
    """Handle events with a dispatcher whose spans are all recorded."""
    provider = TracerProvider(shutdown_on_exit=False)
    observer = OpenTelemetryObserver("notifications-eu", tracer_provider=provider)
    manager = IdempotencyManager(IdempotencyConfig(), await env.repository(), observer, scope="notifications-eu")
    dispatcher = IdempotentEventDispatcher(router, manager)
    for _ in range(EVENTS // 50):
        await asyncio.gather(*(dispatcher.dispatch(OrderPlaced(order_id=str(number))) for number in range(50)))
    await manager.close()
    provider.shutdown()


async def _records(env: RedisEnvironment, client: Redis) -> list[str]:
    """Return the keys of all records, after checking the contents of each."""
    keys = sorted([key.decode() async for key in client.scan_iter("idempotency:*", count=1_000)])
    ensure(len(keys) == EVENTS, f"{len(keys)} of {EVENTS} records")
    ensure({len(key) for key in keys} == {KEY_BYTES}, f"{keys[0]} has {len(keys[0])} bytes, not {KEY_BYTES}")
    for record in await (await env.repository()).get(keys):
        ensure(record is not None and record.status is IdempotencyStatus.COMPLETED, f"{record} is not completed")
        assert record is not None
        is_empty = record.result is None or record.result.body == b"null"
        ensure(record.fingerprint and record.trace and is_empty, f"{record} has unexpected contents")
    return keys


async def _used_memory(client: Redis) -> int:
    results = await client.info("memory")
    used: int = results["used_memory"]
    return used
