"""Where does a guarded service spend its time? `python -m benchmarks.profiled` draws a flame graph.

A worker in a separate process handles a topic repeatedly, on a real Kafka and a real Redis. py-spy samples it from
outside, so that profiling does not slow it down. The graph is written to docs/explanation/.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import uvloop

from benchmarks.flames import Stack, flame_graph
from benchmarks.kafka import EVENTS, Topic, filled_topic
from benchmarks.places import open_redis_store
from benchmarks.tables import ROOT
from integr8s_idem.cli.garbage_collection import collect_rarely
from tests.support.kafka.broker import Kafka

GRAPH: Final = ROOT / "docs" / "explanation" / "speed-flames.svg"
TURNS: Final = 8
SAMPLES_PER_SECOND: Final = 400
IMPORTING: Final = "_find_and_load"


async def _serve(bootstrap: str, redis: str, events: int) -> None:
    """Run the profiled service."""
    async with open_redis_store(redis) as repository:
        topic = Topic(Kafka(bootstrap), repository, events)
        for _ in range(TURNS):
            await topic.idempotent(1.0)


async def _profile(found: Path) -> None:
    spy = Path(sys.executable).with_name("py-spy")
    async with filled_topic(EVENTS, print) as (topic, env):
        options = ["record", "--format", "raw", "--rate", str(SAMPLES_PER_SECOND), "--output", str(found), "--"]
        command = [
            sys.executable,
            "-m",
            "benchmarks.profiled",
            "--serve",
            topic.kafka.bootstrap,
            env.url,
            str(EVENTS),
        ]
        process = await asyncio.create_subprocess_exec(str(spy), *options, *command, cwd=ROOT)
        if await process.wait() != 0:
            raise SystemExit("py-spy failed. Check that it is allowed to trace its child process on this system.")


def stacks(raw: str) -> Counter[Stack]:
    """Parse the output of py-spy, lines of `function (file:line);… count`. Imports and line numbers are dropped."""
    found: Counter[Stack] = Counter()
    for line in raw.splitlines():
        frame_list, _, number = line.rpartition(" ")
        frames = tuple(map(_frame, frame_list.split(";")))
        if not any(frame.startswith(IMPORTING) for frame in frames):
            found[_without_event_loop(frames)] += int(number)
    return found


def _frame(text: str) -> str:
    """Format a frame as `function (file)`, with the path relative to its package root."""
    name, _, location = text.partition(" (")
    file = location.rpartition(":")[0]
    for root in ("site-packages/", f"{ROOT}/", f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/"):
        file = file.rpartition(root)[2]
    return f"{name} ({file.lstrip('/')})"


def _without_event_loop(frames: Sequence[str]) -> Stack:
    """Drop the frames up to and including the event loop."""
    start = next((index for index, frame in enumerate(frames) if "uvloop" in frame), -1)
    rest = frames[start + 1 :]
    while rest and ("uvloop" in rest[0] or "asyncio/runners" in rest[0]):
        rest = rest[1:]
    return tuple(rest) or ("event loop",)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiled", description=__doc__)
    parser.add_argument("--serve", nargs=3, metavar=("KAFKA", "REDIS", "EVENTS"), help="run the profiled service")
    arguments = parser.parse_args()
    if arguments.serve:
        bootstrap, redis, events = arguments.serve
        collect_rarely()  # as `integr8s-idem run` does
        uvloop.run(_serve(bootstrap, redis, int(events)))
        return
    with TemporaryDirectory(prefix="idem-bench-profile-") as folder:
        raw = Path(folder) / "stacks"
        asyncio.run(_profile(raw))
        found = stacks(raw.read_text(encoding="utf-8"))
    title = f"A guarded service with a no-op handler: {sum(found.values())} samples, {SAMPLES_PER_SECOND} per second"
    GRAPH.write_text(flame_graph(title, found), encoding="utf-8")
    print(f"{GRAPH.relative_to(ROOT)}: {GRAPH.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
