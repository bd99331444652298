"""Campaign `rebalances`: members join and leave every two seconds under load.

Two to four members run in this process, on a real Kafka and a real Redis.  Half of the leaving members drain first; the
others are stopped with their handlers cancelled.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final

from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.kafka_faults import servers
from tests.kafka_faults.workload import Workload, open_workload
from tests.support.conditions import eventually

EVERY: Final = 2.0
"""Seconds between membership changes."""

GROUPS: Final = 2
"""Groups that run concurrently."""

PATIENCE: Final = 5
"""Number of changes within which at least one event must be handled."""


async def change_membership(workload: Workload, rng: random.Random) -> None:
    """Let a member join or leave, so that the group has two to four members."""
    count = len(workload.members)
    if count <= 2 or (count < 4 and rng.random() < 0.5):
        await workload.join()
    else:
        await workload.leave(rng.choice(workload.members), at_once=rng.random() < 0.5)


async def storm(numbers: Sequence[int]) -> Figures:
    """Perform the numbered changes, and check that all events are handled.

    Raises:
        ViolationError: A promise was broken.
    """
    async with open_workload(servers.kafka()) as workload:
        for _ in range(2):
            await workload.join()
        await eventually(lambda: all(member.worker.health().ready for member in workload.members))
        feeding = asyncio.create_task(workload.feed(every=0.1))
        try:
            done = [0]
            for number in numbers:
                await asyncio.gather(asyncio.sleep(EVERY), change_membership(workload, random.Random(number)))
                done.append(len(workload.effects.ended()))
                if len(done) > PATIENCE and done[-1] == done[-PATIENCE]:
                    raise ViolationError(f"no progress in {PATIENCE} changes: {workload.snapshot()}")
        finally:
            feeding.cancel()
            await asyncio.wait({feeding})
        await workload.all_settled()
        figures = await workload.judge()
    figures.update(rebalances=len(numbers), stale=sum(member.tally.stale for member in workload.past))
    return figures


async def _run_groups(first: int, count: int) -> Figures:
    shares = [range(first + start, first + count, GROUPS) for start in range(min(GROUPS, count))]
    total = Figures()
    for figures in await asyncio.gather(*map(_storm, shares)):
        total.update(figures)
    return total


async def _storm(numbers: Sequence[int]) -> Figures:
    try:
        return await storm(numbers)
    except AssertionError as error:
        raise ViolationError(f"rebalances {numbers[0]} to {numbers[-1]}: {error}") from error


def run(first: int, count: int) -> Figures:
    """Perform the membership changes numbered `first` to `first + count - 1`."""
    return asyncio.run(_run_groups(first, count))


CAMPAIGN: Final = Campaign(
    name="rebalances",
    counts="rebalances",
    says="every two seconds, a member joins, drains and leaves, or is stopped without draining, under load",
    scenarios=(62, 63),
    in_test=10,
    target=200,
    batch=40,
    run=run,
)
