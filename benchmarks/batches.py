"""What does an event cost in a batch of 500, beside redis-py's pipelines of as many?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, Protocol

from benchmarks.bare import BareRedis
from benchmarks.contestants import Store, must
from benchmarks.guards import RECEIPT
from benchmarks.measuring import Flat, for_seconds
from benchmarks.places import redis_place
from benchmarks.rounds import Comparison, Measured, Options, Stopwatch, Tell, Turn, compared, fresh_keys
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.records import Reserved

KEYS: Final = ("batch500_fresh",)
BATCH: Final = 500


class Batches(Protocol):
    """Fails if a key of a batch is not new, or not completed."""

    async def batch(self, keys: Sequence[str]) -> None: ...


class ManagerBatches:
    """`acquire_batch` and `confirm_batch`: for those who have many pieces of work in hand."""

    def __init__(self, manager: IdempotencyManager) -> None:
        self._manager = manager

    async def batch(self, keys: Sequence[str]) -> None:
        verdicts = await self._manager.acquire_batch(keys)
        held = [verdict for verdict in verdicts.values() if isinstance(verdict, Reserved)]
        must(len(held) == len(keys), f"{len(held)} of {len(keys)} were reserved")
        done = await self._manager.confirm_batch(dict.fromkeys(held, RECEIPT))
        must(all(done), "not all are done")


async def measured(options: Options, tell: Tell) -> Flat:
    """Each figure of this question."""
    async with redis_place() as place:
        takers: dict[str, Batches] = {
            "verbs": Store(await place.repository()),
            "manager_batch": ManagerBatches(await place.manager("bench")),
            "raw_pipeline": BareRedis(place.plain_client()),
        }
        turns = {name: _turn(taker, f"idempotency:bench:order_placed:{name}") for name, taker in takers.items()}
        told = await compared(
            Comparison("batch500", turns, {"batch500_fresh": ("verbs", "raw_pipeline")}), options, tell
        )
        return told | {"batches.server": place.version}


def _turn(taker: Batches, name: str) -> Turn:
    keys = fresh_keys(name)

    async def turn(seconds: float) -> Measured:
        going, done = for_seconds(seconds), 0
        watch = Stopwatch()
        while going():
            await taker.batch(list(itertools.islice(keys, BATCH)))
            done += BATCH
        found = watch.read(done)
        await refuses_twice(taker, [next(keys)])
        return found

    return turn


async def refuses_twice(taker: Batches, keys: list[str]) -> None:
    """Raises AssertionError: what is new is not taken, or what is done is taken again."""
    await taker.batch(keys)
    try:
        await taker.batch(keys)
    except AssertionError:
        return
    raise AssertionError(f"{type(taker).__name__} lets a duplicate through")
