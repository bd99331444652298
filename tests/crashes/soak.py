"""Half an hour of work with a fault every thirty seconds; one worker lives through all of it and is weighed.

What is measured, and how well: the elder weighs itself every two seconds, right after a full garbage collection and
with free memory given back to the system, so that neither garbage nor an allocator's reserve counts; caches with a
bound are filled before.  After a warm-up of a third, a line goes through the medians of twenty stretches of time; the
slope is in the figures together with its standard error.  A slope is a breach if it exceeds the limit by more than
two errors.  The number of blocks that Python holds is measured beside it: it is free of what the C library and the
system do with pages.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.crashes.crew import Crew
from tests.crashes.forks import Forked, Nursery
from tests.crashes.ground import Ground, open_ground
from tests.crashes.judging import last_words
from tests.crashes.samples import Sample, Slope, samples_of, slope

WORKERS: Final = 2
"""Beside the elder."""
JOBS_A_SECOND: Final = 30.0
EVERY: Final = 30.0
"""Seconds from fault to fault."""
STALL: Final = 2.0
"""Seconds for which something hangs."""
LIMIT: Final = 1024 * 1024
"""Bytes an hour."""
ENOUGH_TO_JUDGE: Final = 20
"""Minutes from which on the slope is held against the limit; below it is only told."""


def run(first: int, count: int) -> Figures:
    """Minutes `first` to `first + count - 1`, in one go."""
    try:
        return asyncio.run(_minutes(first, count))
    except (AssertionError, TimeoutError) as error:
        raise ViolationError(f"soak from minute {first}: {error}") from error


async def _minutes(first: int, count: int) -> Figures:
    kept = {"appendonly": "yes", "appendfsync": "everysec"}
    async with (
        open_ground(kept) as ground,
        Nursery() as nursery,
        Crew.hired(ground, nursery, f"soak{first}", random.Random(first), size=WORKERS) as crew,
    ):
        elder = await crew.start(samples=str(crew.folder / "samples"))
        async with crew.load(JOBS_A_SECOND):
            await Faults(ground, crew, elder, random.Random(first)).go_on_for(count * 60)
        await crew.quiet()
        crew.workers.append(elder)
        figures = await crew.verdict()
    figures["minutes"] = count
    return figures


class Faults:
    """One after the other, in turn."""

    def __init__(self, ground: Ground, crew: Crew, elder: Forked, dice: random.Random) -> None:
        self._ground = ground
        self._crew = crew
        self._elder = elder
        self._dice = dice

    async def go_on_for(self, seconds: float) -> None:
        """Faults until then.

        Raises:
            ViolationError: The elder is gone, or nothing is done any more, or it grows; or a key that was completed
            has been run again.
        """
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._kill_one,
            self._stall_one,
            self._stall_redis,
            self._restart_redis,
            self._stall_broker,
            self._stall_elder,
        ]
        began, done = time.monotonic(), 0
        for number in range(int(seconds / EVERY)):
            await asyncio.wait({self._elder.ended}, timeout=max(0.0, began + (number + 0.5) * EVERY - time.monotonic()))
            await kinds[number % len(kinds)]()
            self._crew.figures["faults"] += 1
            await self._crew.completed.look()
            before, done = done, len(self._crew.effects.done())
            if not self._elder.running or (number and done == before):
                raise ViolationError(f"after fault {number}: {done} done:\n{last_words(self._crew.folder)}")
        await asyncio.wait({self._elder.ended}, timeout=max(0.0, began + seconds - time.monotonic()))
        self._crew.figures.update(weighed(self._crew.folder / "samples", judged=seconds >= ENOUGH_TO_JUDGE * 60))

    async def _kill_one(self) -> None:
        await self._crew.replace(self._dice.randrange(WORKERS), (0.0, signal.SIGKILL))

    async def _stall_one(self) -> None:
        await self._stall(self._crew.workers[self._dice.randrange(WORKERS)])

    async def _stall_elder(self) -> None:
        await self._stall(self._elder)

    async def _stall(self, worker: Forked) -> None:
        worker.send_signal(signal.SIGSTOP)
        await asyncio.sleep(STALL)
        worker.send_signal(signal.SIGCONT)

    async def _stall_redis(self) -> None:
        self._ground.redis.pause()
        await asyncio.sleep(STALL)
        self._ground.redis.resume()

    async def _restart_redis(self) -> None:
        # In good order: a killed one may lose what it has not written yet, which is another test's matter.
        await asyncio.to_thread(self._ground.redis.restart)

    async def _stall_broker(self) -> None:
        os.kill(self._ground.broker.pid, signal.SIGSTOP)
        await asyncio.sleep(STALL)
        os.kill(self._ground.broker.pid, signal.SIGCONT)


def weighed(path: Path, *, judged: bool) -> Figures:
    """What the samples say, as whole numbers.

    Raises:
        ViolationError: Memory grows faster than `LIMIT`, or descriptors or tasks grow.
    """
    samples = samples_of(path)
    late = samples[len(samples) // 3 :]
    memory = _slope(late, lambda sample: sample.rss)
    blocks = _slope(late, lambda sample: sample.blocks)
    told = Figures(
        samples=len(samples),
        rss_kib=int(statistics.median(sample.rss for sample in late) / 1024),
        rss_kib_an_hour=round(memory.per_hour / 1024),
        rss_error_kib_an_hour=round(memory.error / 1024),
        blocks_an_hour=round(blocks.per_hour),
        blocks_error_an_hour=round(blocks.error),
    )
    counts: dict[str, Callable[[Sample], float]] = {
        "descriptors": lambda sample: sample.descriptors,
        "tasks": lambda sample: sample.tasks,
    }
    for name, count in counts.items():
        early = statistics.median(map(count, late[: len(late) // 2]))
        end = statistics.median(map(count, late[-(len(late) // 4) :]))
        told[f"{name}_early"], told[f"{name}_end"] = round(early), round(end)
        if judged and end > early + 2:
            raise ViolationError(f"{name} grow: {dict(told)}")
    if judged and memory.per_hour - 2 * memory.error > LIMIT:
        raise ViolationError(f"memory grows: {dict(told)}")
    return told


def _slope(samples: list[Sample], value: Callable[[Sample], float]) -> Slope:
    return slope([(sample.at, value(sample)) for sample in samples])


CAMPAIGN = Campaign(
    name="soak",
    counts="minutes",
    says="a minute of work with a fault every thirty seconds; one worker lives through all of it and is weighed",
    scenarios=(112,),
    in_test=0,
    target=30,
    batch=30,
    run=run,
)
