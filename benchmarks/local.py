"""What does a duplicate cost that this very process has completed before?

A redelivery after a rebalance or a producer's retry usually comes back to the worker that did the work.
"""

from __future__ import annotations

from typing import Final

from benchmarks.guards import Guard, Ours, RawRedis
from benchmarks.measuring import Flat
from benchmarks.places import redis_place
from benchmarks.rounds import Comparison, Options, Tell, compared
from benchmarks.single import duplicate

KEYS: Final = ("local_duplicate",)


async def measured(options: Options, tell: Tell) -> Flat:
    """Each figure of this question."""
    async with redis_place() as place:
        guards: dict[str, Guard] = {"ours": Ours(await place.manager("bench", local=True)), "raw": RawRedis(place)}
        turns = {name: await duplicate(guard, f"{name}-local", 1) for name, guard in guards.items()}
        told = await compared(Comparison("local_c1", turns, {"local_duplicate": ("ours", "raw")}), options, tell)
        return told | {"local.server": place.version}
