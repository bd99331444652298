"""Half an hour of work with a fault every thirty seconds; the memory of one worker that survives it is measured.

The survivor takes a sample every two seconds, right after a full garbage collection and with free memory returned to
the system, so that neither garbage nor an allocator's reserve counts; bounded caches are filled beforehand.  The first
third is warm-up.  After it, a line is fitted to the medians of twenty intervals; the slope is recorded with its
standard error.  It is a violation if the slope exceeds the limit by more than two standard errors.  The number of
blocks that Python has allocated is recorded too, since it is independent of the C library and of the system's paging.
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
from tests.crashes.forks import ForkedWorker, ForkServer
from tests.crashes.ground import Servers, open_servers
from tests.crashes.judging import log_tail
from tests.crashes.samples import Sample, Slope, samples_of, slope
from tests.crashes.worker_group import WorkerGroup

WORKERS: Final = 2
"""Number of workers in addition to the survivor."""
JOBS_A_SECOND: Final = 30.0
EVERY: Final = 30.0
"""Seconds between faults."""
STALL: Final = 2.0
"""Duration of a stall in seconds."""
LIMIT: Final = 1024 * 1024
"""Bytes per hour."""
ENOUGH_TO_JUDGE: Final = 20
"""Minutes from which on the slope is compared with the limit; in shorter runs it is only recorded."""


def run(first: int, count: int) -> Figures:
    """Run the minutes `first` to `first + count - 1` in one go."""
    try:
        return asyncio.run(_minutes(first, count))
    except (AssertionError, TimeoutError) as error:
        raise ViolationError(f"soak from minute {first}: {error}") from error


async def _minutes(first: int, count: int) -> Figures:
    kept = {"appendonly": "yes", "appendfsync": "everysec"}
    async with (
        open_servers(kept) as servers,
        ForkServer() as fork_server,
        WorkerGroup.open(servers, fork_server, f"soak{first}", random.Random(first), size=WORKERS) as worker_group,
    ):
        survivor = await worker_group.start(samples=str(worker_group.folder / "samples"))
        async with worker_group.load(JOBS_A_SECOND):
            await Faults(servers, worker_group, survivor, random.Random(first)).inject_for(count * 60)
        await worker_group.wait_until_settled()
        worker_group.workers.append(survivor)
        figures = await worker_group.verdict()
    figures["minutes"] = count
    return figures


class Faults:
    """Injects one kind of fault after the other."""

    def __init__(self, servers: Servers, worker_group: WorkerGroup, survivor: ForkedWorker, rng: random.Random) -> None:
        self._servers = servers
        self._worker_group = worker_group
        self._survivor = survivor
        self._rng = rng

    async def inject_for(self, seconds: float) -> None:
        """Inject faults for this many seconds.

        Raises:
            ViolationError: The survivor exited or grows, work stopped, or a completed key ran again.
        """
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._kill_one,
            self._stall_one,
            self._stall_redis,
            self._restart_redis,
            self._stall_broker,
            self._stall_survivor,
        ]
        began, done = time.monotonic(), 0
        for number in range(int(seconds / EVERY)):
            await asyncio.wait(
                {self._survivor.ended}, timeout=max(0.0, began + (number + 0.5) * EVERY - time.monotonic())
            )
            await kinds[number % len(kinds)]()
            self._worker_group.figures["faults"] += 1
            await self._worker_group.completed.check()
            before, done = done, len(self._worker_group.effects.done())
            if not self._survivor.running or (number and done == before):
                raise ViolationError(f"after fault {number}: {done} done:\n{log_tail(self._worker_group.folder)}")
        await asyncio.wait({self._survivor.ended}, timeout=max(0.0, began + seconds - time.monotonic()))
        self._worker_group.figures.update(
            judge_samples(self._worker_group.folder / "samples", judged=seconds >= ENOUGH_TO_JUDGE * 60)
        )

    async def _kill_one(self) -> None:
        await self._worker_group.replace(self._rng.randrange(WORKERS), (0.0, signal.SIGKILL))

    async def _stall_one(self) -> None:
        await self._stall(self._worker_group.workers[self._rng.randrange(WORKERS)])

    async def _stall_survivor(self) -> None:
        await self._stall(self._survivor)

    async def _stall(self, worker: ForkedWorker) -> None:
        worker.send_signal(signal.SIGSTOP)
        await asyncio.sleep(STALL)
        worker.send_signal(signal.SIGCONT)

    async def _stall_redis(self) -> None:
        self._servers.redis.pause()
        await asyncio.sleep(STALL)
        self._servers.redis.resume()

    async def _restart_redis(self) -> None:
        # A clean shutdown: a killed Redis may lose unsynced writes, which another test covers.
        await asyncio.to_thread(self._servers.redis.restart)

    async def _stall_broker(self) -> None:
        os.kill(self._servers.broker.pid, signal.SIGSTOP)
        await asyncio.sleep(STALL)
        os.kill(self._servers.broker.pid, signal.SIGCONT)


def judge_samples(path: Path, *, judged: bool) -> Figures:
    """Return the trends of the samples as whole numbers.

    Args:
        path: The file with the samples.
        judged: Whether to raise an error if something grows.

    Raises:
        ViolationError: Memory grows faster than `LIMIT`, or descriptors or tasks grow.
    """
    samples = samples_of(path)
    late = samples[len(samples) // 3 :]
    memory = _slope(late, lambda sample: sample.rss)
    blocks = _slope(late, lambda sample: sample.blocks)
    figures = Figures(
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
        figures[f"{name}_early"], figures[f"{name}_end"] = round(early), round(end)
        if judged and end > early + 2:
            raise ViolationError(f"{name} grow: {dict(figures)}")
    if judged and memory.per_hour - 2 * memory.error > LIMIT:
        raise ViolationError(f"memory grows: {dict(figures)}")
    return figures


def _slope(samples: list[Sample], value: Callable[[Sample], float]) -> Slope:
    return slope([(sample.at, value(sample)) for sample in samples])


CAMPAIGN = Campaign(
    name="soak",
    counts="minutes",
    says="a minute of work with a fault every thirty seconds; the memory of one worker that survives it is measured",
    scenarios=(112,),
    in_test=0,
    target=30,
    batch=30,
    run=run,
)
