"""What does a duplicate cost in the process that completed its key?

A redelivery after a rebalance or a producer's retry usually reaches the worker that did the work.
"""

from __future__ import annotations

from typing import Any, Final

from redis.asyncio import Redis

from benchmarks.contestants import ensure
from benchmarks.guards import Guard, Integr8sIdem, RawRedis
from benchmarks.measuring import Flat
from benchmarks.places import redis_environment
from benchmarks.rounds import Comparison, Measured, Options, Progress, Turn, compare
from benchmarks.single import duplicate

KEYS: Final = ("local_duplicate",)


async def measure(options: Options, progress: Progress) -> Flat:
    """Measure each figure of this benchmark."""
    async with redis_environment() as env:
        guards: dict[str, Guard] = {
            "integr8s_idem": Integr8sIdem(await env.manager("bench", local=True)),
            "raw": RawRedis(env),
        }
        turns = {name: await duplicate(guard, f"{name}-local", 1) for name, guard in guards.items()}
        turns["integr8s_idem"] = _without_store_calls(env.plain_client(), turns["integr8s_idem"])
        results = await compare(
            Comparison("local_c1", turns, {"local_duplicate": ("integr8s_idem", "raw")}), options, progress
        )
        return results | {"local.server": env.version}


def _without_store_calls(client: Redis, turn: Turn) -> Turn:
    """Wrap a turn with a check that it does not call the store."""

    async def checked(seconds: float) -> Measured:
        before = await _script_calls(client)
        found = await turn(seconds)
        ensure(await _script_calls(client) == before, "the store was called for a key in local memory")
        return found

    return checked


async def _script_calls(client: Redis) -> int:
    """Return how many scripts the server has run; each method of the store is a script."""
    info: dict[str, Any] = await client.info("commandstats")
    return sum(info.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha", "fcall"))
