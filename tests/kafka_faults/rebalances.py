"""Campaign `rebalances`: members join and leave every two seconds while events flow.

Two to four members in this process, on a real Kafka and a real Redis.  Half of those that leave drain first,
the others are stopped with their handlers cancelled.
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
"""Seconds between two changes of the membership."""

GROUPS: Final = 2
"""Groups side by side."""

PATIENCE: Final = 5
"""Changes within which something must have been handled."""


async def change_membership(workload: Workload, chance: random.Random) -> None:
    """Somebody joins or leaves, so that two to four stay."""
    count = len(workload.members)
    if count <= 2 or (count < 4 and chance.random() < 0.5):
        await workload.join()
    else:
        await workload.leave(chance.choice(workload.members), at_once=chance.random() < 0.5)


async def storm(numbers: Sequence[int]) -> Figures:
    """As many changes as there are numbers, and then everything that was asked for.

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


async def _side_by_side(first: int, count: int) -> Figures:
    shares = [range(first + start, first + count, GROUPS) for start in range(min(GROUPS, count))]
    total = Figures()
    for figures in await asyncio.gather(*map(_named, shares)):
        total.update(figures)
    return total


async def _named(numbers: Sequence[int]) -> Figures:
    try:
        return await storm(numbers)
    except AssertionError as error:
        raise ViolationError(f"rebalances {numbers[0]} to {numbers[-1]}: {error}") from error


def run(first: int, count: int) -> Figures:
    """The changes numbered `first` to `first + count - 1`."""
    return asyncio.run(_side_by_side(first, count))


CAMPAIGN: Final = Campaign(
    name="rebalances",
    counts="rebalances",
    says="every two seconds a member joins, drains and leaves, or is stopped at once, while events flow",
    scenarios=(62, 63),
    in_test=10,
    target=200,
    batch=40,
    run=run,
)
