"""What does an event cost in a batch of 500, compared with redis-py pipelines of the same size?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, Protocol

from benchmarks.bare import BareRedis
from benchmarks.contestants import Store, ensure
from benchmarks.guards import RECEIPT
from benchmarks.measuring import Flat, running_for
from benchmarks.places import redis_environment
from benchmarks.rounds import Comparison, Measured, Options, Progress, Stopwatch, Turn, compare, fresh_keys
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.records import Reserved

KEYS: Final = ("batch500_fresh",)
BATCH: Final = 500


class BatchContestant(Protocol):
    """Reserves and completes batches of keys; fails if a key is not new."""

    async def batch(self, keys: Sequence[str]) -> None: ...


class ManagerBatches:
    """`acquire_batch` and `confirm_batch` of the manager."""

    def __init__(self, manager: IdempotencyManager) -> None:
        self._manager = manager

    async def batch(self, keys: Sequence[str]) -> None:
        verdicts = await self._manager.acquire_batch(keys)
        reserved = [verdict for verdict in verdicts.values() if isinstance(verdict, Reserved)]
        ensure(len(reserved) == len(keys), f"{len(reserved)} of {len(keys)} were reserved")
        completed = await self._manager.confirm_batch(dict.fromkeys(reserved, RECEIPT))
        ensure(all(completed), "not all were completed")


async def measure(options: Options, progress: Progress) -> Flat:
    """Measure each figure of this benchmark."""
    async with redis_environment() as env:
        contestants: dict[str, BatchContestant] = {
            "verbs": Store(await env.repository()),
            "manager_batch": ManagerBatches(await env.manager("bench")),
            "raw_pipeline": BareRedis(env.plain_client()),
        }
        turns = {
            name: _turn(contestant, f"idempotency:bench:order_placed:{name}")
            for name, contestant in contestants.items()
        }
        results = await compare(
            Comparison("batch500", turns, {"batch500_fresh": ("verbs", "raw_pipeline")}), options, progress
        )
        return results | {"batches.server": env.version}


def _turn(contestant: BatchContestant, name: str) -> Turn:
    keys = fresh_keys(name)

    async def turn(seconds: float) -> Measured:
        running, done = running_for(seconds), 0
        watch = Stopwatch()
        while running():
            await contestant.batch(list(itertools.islice(keys, BATCH)))
            done += BATCH
        measured = watch.read(done)
        await check_duplicates_are_refused(contestant, [next(keys)])
        return measured

    return turn


async def check_duplicates_are_refused(contestant: BatchContestant, keys: list[str]) -> None:
    """Raise AssertionError if new keys are refused, or completed keys are accepted again."""
    await contestant.batch(keys)
    try:
        await contestant.batch(keys)
    except AssertionError:
        return
    raise AssertionError(f"{type(contestant).__name__} lets a duplicate through")
