"""What does a duplicate cost that this very process has completed before?

A redelivery after a rebalance or a producer's retry usually comes back to the worker that did the work.
"""

from __future__ import annotations

from typing import Any, Final

from redis.asyncio import Redis

from benchmarks.contestants import must
from benchmarks.guards import Guard, Ours, RawRedis
from benchmarks.measuring import Flat
from benchmarks.places import redis_place
from benchmarks.rounds import Comparison, Measured, Options, Tell, Turn, compared
from benchmarks.single import duplicate

KEYS: Final = ("local_duplicate",)


async def measured(options: Options, tell: Tell) -> Flat:
    """Each figure of this question."""
    async with redis_place() as place:
        guards: dict[str, Guard] = {"ours": Ours(await place.manager("bench", local=True)), "raw": RawRedis(place)}
        turns = {name: await duplicate(guard, f"{name}-local", 1) for name, guard in guards.items()}
        turns["ours"] = _unasked(place.plain_client(), turns["ours"])
        told = await compared(Comparison("local_c1", turns, {"local_duplicate": ("ours", "raw")}), options, tell)
        return told | {"local.server": place.version}


def _unasked(client: Redis, turn: Turn) -> Turn:
    """The turn, in which the server must not hear of anything."""

    async def quiet(seconds: float) -> Measured:
        before = await _scripts(client)
        found = await turn(seconds)
        must(await _scripts(client) == before, "the store was asked for what this process knows")
        return found

    return quiet


async def _scripts(client: Redis) -> int:
    """How often the server ran one: each verb of the store is a script."""
    told: dict[str, Any] = await client.info("commandstats")
    return sum(told.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha", "fcall"))
