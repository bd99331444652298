"""Does the store slow down as it fills? One server holds two million records, another ten thousand."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from typing import Final

from benchmarks.batches import check_duplicates_are_refused
from benchmarks.contestants import LEASE, RETENTION, Store, ensure
from benchmarks.measuring import Flat, running_for
from benchmarks.places import RedisEnvironment, redis_environment
from benchmarks.rounds import Comparison, Measured, Options, Progress, Stopwatch, Turn, compare
from integr8s_idem.records import Completed, ReserveRequest

KEYS: Final = ("growth_2m",)
RECORDS: Final = {"keys_2m": 2_000_000, "keys_10k": 10_000}
BATCH: Final = 500
COPIES: Final = 5_000
"""Copies made by one call of the script."""

# Copies of a record that the library wrote are identical to records of completed keys.
_COPY: Final = """
for number = tonumber(ARGV[1]), tonumber(ARGV[2]) do
    redis.call('COPY', KEYS[1], string.format('%s%032x', ARGV[3], number))
end
"""
_PREFIX: Final = "idempotency:notifications-eu:announce:order_placed:id:old-"
_NEW: Final = "idempotency:notifications-eu:announce:order_placed:id:new-"


async def measure(options: Options, progress: Progress) -> Flat:
    """Measure each figure of this benchmark."""
    async with AsyncExitStack() as stack:
        turns: dict[str, Turn] = {}
        for name, count in RECORDS.items():
            env = await stack.enter_async_context(redis_environment())
            await _fill(env, count, progress)
            turns[name] = await _turn(env, count)
        results = await compare(Comparison("growth", turns, {KEYS[0]: ("keys_2m", "keys_10k")}), options, progress)
        return results | {"growth.server": env.version}


async def _fill(env: RedisEnvironment, count: int, progress: Progress) -> None:
    """Create `count` completed records. The append-only file is enabled afterwards, so that it is written once."""
    client = env.plain_client()
    await client.config_set("appendonly", "no")
    store = Store(await env.repository())
    await store.batch([f"{_PREFIX}{0:032x}"])
    copy = client.register_script(_COPY)
    for start in range(1, count, COPIES):
        await copy(keys=[f"{_PREFIX}{0:032x}"], args=[start, min(start + COPIES, count) - 1, _PREFIX])
    ensure(await client.dbsize() == count, f"{await client.dbsize()} keys, not {count}")
    await client.config_set("appendonly", "yes")
    while (await client.info("persistence"))["aof_rewrite_in_progress"]:  # noqa: ASYNC110  # the server sends no notification
        await asyncio.sleep(0.2)
    used = (await client.info("memory"))["used_memory"]
    progress(f"{count} records, {used / 1e6:.0f} MB")


async def _turn(env: RedisEnvironment, count: int) -> Turn:
    """Create a turn of batches of new keys, which are deleted at its end, so that the store does not grow."""
    repository = await env.repository()
    store, client, numbers = Store(repository), env.plain_client(), itertools.count()
    last = f"{_PREFIX}{count - 1:032x}"
    [verdict] = await repository.reserve(
        [ReserveRequest(key=last, token=bytes(16), lease=LEASE, retention=RETENTION, owner="bench")]
    )
    ensure(isinstance(verdict, Completed), f"a copied record returns {verdict}")

    async def turn(seconds: float) -> Measured:
        running, written = running_for(seconds), list[str]()
        watch = Stopwatch()
        while running():
            keys = [f"{_NEW}{number:032x}" for number in itertools.islice(numbers, BATCH)]
            await store.batch(keys)
            written += keys
        measured = watch.read(len(written))
        written.append(f"{_NEW}{next(numbers):032x}")
        await check_duplicates_are_refused(store, written[-1:])
        for start in range(0, len(written), BATCH):
            await repository.delete(written[start : start + BATCH])
        ensure(await client.dbsize() == count, f"{await client.dbsize()} keys, not {count}")
        return measured

    return turn
