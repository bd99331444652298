"""Three workers of a group under load; one after the other dies at a random moment, on real servers."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import Final

from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.crashes.crew import Crew
from tests.crashes.forks import Nursery
from tests.crashes.ground import open_ground

WORKERS: Final = 3
JOBS_A_SECOND: Final = 60.0
CALM: Final = (0.2, 1.8)
"""Seconds between two kills: shorter and longer than a session."""


def run(first: int, count: int) -> Figures:
    """The kills numbered `first` to `first + count - 1`, in one go: moments and victims go by the number."""
    try:
        return asyncio.run(_kills(range(first, first + count)))
    except (AssertionError, TimeoutError) as error:
        raise ViolationError(f"kills {first} to {first + count - 1}: {error}") from error


async def _kills(numbers: range) -> Figures:
    async with open_ground() as ground, Nursery() as nursery:
        dice = random.Random(numbers.start)
        async with Crew.hired(ground, nursery, f"random{numbers.start}", dice, size=WORKERS) as crew:
            async with crew.load(JOBS_A_SECOND):
                for number in numbers:
                    await _kill(crew, random.Random(number))
            await crew.quiet()
            return await crew.verdict()


async def _kill(crew: Crew, dice: random.Random) -> None:
    """SIGKILL to one; every fourth time somebody is told to drain before."""
    if dice.random() < 0.25:
        await crew.replace(dice.randrange(WORKERS), (dice.uniform(*CALM), signal.SIGTERM))
    pause = dice.uniform(*CALM)
    await crew.replace(dice.randrange(WORKERS), (pause, signal.SIGKILL))


CAMPAIGN = Campaign(
    name="random-kills",
    counts="kills",
    says="SIGKILL to one of three workers under load at a random moment, on a real Redis and a real Kafka",
    scenarios=(63,),
    in_test=10,
    target=500,
    batch=30,
    run=run,
)
