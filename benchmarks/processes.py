"""What do two worker processes under a supervisor cost, compared with one?

Contestants are `integr8s-idem run` and `integr8s-idem run --processes 2`, with default telemetry. Each turn reads all
events of one topic in a new group and a new scope. A figure compares events per CPU second of all processes of the
contestant, supervisor included, without broker and Redis: wall-clock time would tell how many processors are free.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from struct import Struct
from tempfile import TemporaryDirectory
from typing import Final
from uuid import uuid4

import psutil

from benchmarks.contestants import ensure
from benchmarks.kafka import LONGEST_TURN, PARTITIONS, Topic, filled_topic, new_scope
from benchmarks.measuring import Flat, spread
from benchmarks.places import RedisEnvironment
from benchmarks.rounds import Comparison, Measured, Options, Progress, compare
from benchmarks.tables import ROOT
from tests.support.processes import ServiceProcess

KEYS: Final = ("processes_2",)
EVENTS: Final = 30_000
FOLDER: Final = "BENCH_PROCESSES_FOLDER"
"""Environment variable with the folder of the file `go` and of the counts."""
COUNT: Final = Struct("<q")
"""A count in a file of its process."""
SETTLED_SECONDS: Final = 0.5
"""Pause after the last handler, in which outcomes and offsets are written; it is not counted in rates."""


@dataclass
class _Place:
    """Runs turns on one topic and one Redis, and keeps their rates by wall-clock time."""

    topic: Topic
    env: RedisEnvironment
    rates: dict[int, list[float]]

    async def turn(self, _: float, *, number: int) -> Measured:
        """Measure CPU seconds, as the time of the turn, of `number` processes and their supervisor."""
        with TemporaryDirectory(prefix="idem-bench-processes-") as name:
            folder = Path(name)
            (folder / "settings.toml").write_text(self._settings())
            with ServiceProcess(
                "benchmarks.processes_app:platform",
                f"--settings={folder / 'settings.toml'}",
                "--json",
                f"--processes={number}",
                log=folder / "log",
                env={FOLDER: name},
                folder=ROOT,
            ) as process:
                return await self._measure(process, folder, number)

    async def _measure(self, process: ServiceProcess, folder: Path, number: int) -> Measured:
        assigned = f"assigned partitions: {PARTITIONS // number}"
        await _until(lambda: not process.running or process.output.count(assigned) >= number)
        ensure(process.running, process.output)
        supervisor = psutil.Process(process.pid)
        processes = [supervisor, *supervisor.children()]
        ensure(len(processes) == (number + 1 if number > 1 else 1), f"{len(processes)} processes, {process.output}")
        cpu, start = _cpu_seconds(processes), time.perf_counter()
        (folder / "go").touch()
        await _until(lambda: _handled(folder) >= self.topic.events)
        seconds = time.perf_counter() - start
        await asyncio.sleep(SETTLED_SECONDS)
        used = _cpu_seconds(processes) - cpu
        ensure(_handled(folder) == self.topic.events, f"{_handled(folder)} of {self.topic.events} handled")
        process.terminate()
        ensure(await asyncio.to_thread(process.wait, LONGEST_TURN) == 0, process.output)
        self.rates.setdefault(number, []).append(self.topic.events / seconds)
        return Measured(self.topic.events, used, used)

    def _settings(self) -> str:
        return f"""
[kafka]
bootstrap_servers = "{self.topic.kafka.bootstrap}"
topic_prefix = "bench."
retention_check = "off"
[store]
url = "{self.env.url}"
[idempotency]
key_prefix = "{new_scope()}"
[services.bench]
group_id = "bench-{uuid4().hex}"
ordering = "none"
concurrency = 1000
max_in_flight = 2000
[telemetry]
metrics_port = 0
"""


async def _until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONGEST_TURN):
        while not done():  # noqa: ASYNC110  # another process reports by files
            await asyncio.sleep(0.01)


def _handled(folder: Path) -> int:
    return sum(int(COUNT.unpack(file.read_bytes())[0]) for file in folder.glob("*.count"))


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def measure(options: Options, progress: Progress) -> Flat:
    """Measure the figure of this benchmark."""
    async with filled_topic(int(EVENTS * options.seconds), progress) as (topic, env):
        place = _Place(topic, env, {})
        turns = {"one_process": partial(place.turn, number=1), "two_processes": partial(place.turn, number=2)}
        comparison = Comparison("processes", turns, {KEYS[0]: ("two_processes", "one_process")})
        results = await compare(comparison, options, progress)
        for number, rates in place.rates.items():
            progress(f"{number} processes: {spread(rates).median:.0f} events per second of wall-clock time")
            results[f"processes.{number}.wall_rate"] = spread(rates).median
        return results | {"processes.server": topic.server(env), "processes.events": topic.events}
