"""Does the store slow down as it fills?  Two million records in one server, ten thousand in another."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack
from typing import Final

from benchmarks.batches import refuses_twice
from benchmarks.contestants import LEASE, RETENTION, Store, must
from benchmarks.measuring import Flat, for_seconds
from benchmarks.places import RedisPlace, redis_place
from benchmarks.rounds import Comparison, Measured, Options, Stopwatch, Tell, Turn, compared
from integr8s_idem.records import Completed, ReserveRequest

KEYS: Final = ("growth_2m",)
FULL: Final = {"keys_2m": 2_000_000, "keys_10k": 10_000}
BATCH: Final = 500
COPIES: Final = 5_000
"""Made by one call of the script."""

# The library's own record under other names: a copy is what a completion would have left there.
_COPY: Final = """
for number = tonumber(ARGV[1]), tonumber(ARGV[2]) do
    redis.call('COPY', KEYS[1], string.format('%s%032x', ARGV[3], number))
end
"""
_PREFIX: Final = "idempotency:notifications-eu:announce:order_placed:id:old-"
_NEW: Final = "idempotency:notifications-eu:announce:order_placed:id:new-"


async def measured(options: Options, tell: Tell) -> Flat:
    """Each figure of this question."""
    async with AsyncExitStack() as stack:
        turns: dict[str, Turn] = {}
        for name, count in FULL.items():
            place = await stack.enter_async_context(redis_place())
            await _fill(place, count, tell)
            turns[name] = await _turn(place, count)
        told = await compared(Comparison("growth", turns, {KEYS[0]: ("keys_2m", "keys_10k")}), options, tell)
        return told | {"growth.server": place.version}


async def _fill(place: RedisPlace, count: int, tell: Tell) -> None:
    """So many completed records.  The file of the server is switched on when they are there, to be written once."""
    client = place.plain_client()
    await client.config_set("appendonly", "no")
    store = Store(await place.repository())
    await store.batch([f"{_PREFIX}{0:032x}"])
    copy = client.register_script(_COPY)
    for start in range(1, count, COPIES):
        await copy(keys=[f"{_PREFIX}{0:032x}"], args=[start, min(start + COPIES, count) - 1, _PREFIX])
    must(await client.dbsize() == count, f"{await client.dbsize()} keys, not {count}")
    await client.config_set("appendonly", "yes")
    while (await client.info("persistence"))["aof_rewrite_in_progress"]:  # noqa: ASYNC110  # the server tells nobody
        await asyncio.sleep(0.2)
    used = (await client.info("memory"))["used_memory"]
    tell(f"{count} records, {used / 1e6:.0f} MB")


async def _turn(place: RedisPlace, count: int) -> Turn:
    """Batches of new keys, which go again at the end of the turn: the number of keys stays what it is."""
    repository = await place.repository()
    store, client, numbers = Store(repository), place.plain_client(), itertools.count()
    last = f"{_PREFIX}{count - 1:032x}"
    [verdict] = await repository.reserve(
        [ReserveRequest(key=last, token=bytes(16), lease=LEASE, retention=RETENTION, owner="bench")]
    )
    must(isinstance(verdict, Completed), f"a copy is {verdict}")

    async def turn(seconds: float) -> Measured:
        going, written = for_seconds(seconds), list[str]()
        watch = Stopwatch()
        while going():
            keys = [f"{_NEW}{number:032x}" for number in itertools.islice(numbers, BATCH)]
            await store.batch(keys)
            written += keys
        found = watch.read(len(written))
        written.append(f"{_NEW}{next(numbers):032x}")
        await refuses_twice(store, written[-1:])
        for start in range(0, len(written), BATCH):
            await repository.delete(written[start : start + BATCH])
        must(await client.dbsize() == count, f"{await client.dbsize()} keys, not {count}")
        return found

    return turn
