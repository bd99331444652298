"""Three workers of a group under load, killed one after the other at random moments, on real servers."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import Final

from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.crashes.forks import ForkServer
from tests.crashes.ground import open_servers
from tests.crashes.worker_group import WorkerGroup

WORKERS: Final = 3
JOBS_A_SECOND: Final = 60.0
CALM: Final = (0.2, 1.8)
"""Range of seconds between two kills: both shorter and longer than a session."""


def run(first: int, count: int) -> Figures:
    """Perform the kills numbered `first` to `first + count - 1` in one run; the number seeds moment and victim."""
    try:
        return asyncio.run(_kills(range(first, first + count)))
    except (AssertionError, TimeoutError) as error:
        raise ViolationError(f"kills {first} to {first + count - 1}: {error}") from error


async def _kills(numbers: range) -> Figures:
    async with open_servers() as servers, ForkServer() as fork_server:
        rng = random.Random(numbers.start)
        async with WorkerGroup.open(servers, fork_server, f"random{numbers.start}", rng, size=WORKERS) as worker_group:
            async with worker_group.load(JOBS_A_SECOND):
                for number in numbers:
                    await _kill(worker_group, random.Random(number))
            await worker_group.wait_until_settled()
            return await worker_group.verdict()


async def _kill(worker_group: WorkerGroup, rng: random.Random) -> None:
    """Kill one worker; with a probability of 25 %, stop another one with SIGTERM first."""
    if rng.random() < 0.25:
        await worker_group.replace(rng.randrange(WORKERS), (rng.uniform(*CALM), signal.SIGTERM))
    pause = rng.uniform(*CALM)
    await worker_group.replace(rng.randrange(WORKERS), (pause, signal.SIGKILL))


CAMPAIGN = Campaign(
    name="random-kills",
    counts="kills",
    says="one of three workers under load is killed at a random moment, on a real Redis and a real Kafka",
    scenarios=(63,),
    in_test=10,
    target=500,
    batch=30,
    run=run,
)
