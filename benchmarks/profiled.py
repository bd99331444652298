"""Where does a guarded service spend its time?  `python -m benchmarks.profiled` draws it into docs/explanation/.

A worker in a process of its own handles a topic again and again, on a real Kafka and a real Redis, and py-spy looks at
it from outside, so that looking costs it nothing.  What was seen is drawn as a flame graph.
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
from benchmarks.places import open_place
from benchmarks.tables import ROOT
from integr8s_idem.cli.garbage_collection import collect_rarely
from tests.support.kafka.broker import Kafka

GRAPH: Final = ROOT / "docs" / "explanation" / "speed-flames.svg"
TURNS: Final = 8
SAMPLES_A_SECOND: Final = 400
IMPORTING: Final = "_find_and_load"


async def _serve(bootstrap: str, redis: str, events: int) -> None:
    """What is looked at."""
    async with open_place(redis) as repository:
        topic = Topic(Kafka(bootstrap), repository, events)
        for _ in range(TURNS):
            await topic.idempotent(1.0)


async def _looked_at(found: Path) -> None:
    spy = Path(sys.executable).with_name("py-spy")
    async with filled_topic(EVENTS, print) as (topic, place):
        asked = ["record", "--format", "raw", "--rate", str(SAMPLES_A_SECOND), "--output", str(found), "--"]
        served = [sys.executable, "-m", "benchmarks.profiled", "--serve", topic.kafka.bootstrap, place.url, str(EVENTS)]
        looking = await asyncio.create_subprocess_exec(str(spy), *asked, *served, cwd=ROOT)
        if await looking.wait() != 0:
            raise SystemExit("py-spy found nothing: may it trace its own child here?")


def stacks(raw: str) -> Counter[Stack]:
    """What py-spy wrote: `function (file:line);… number` a line.  Without what importing took, and without lines."""
    found: Counter[Stack] = Counter()
    for line in raw.splitlines():
        told, _, number = line.rpartition(" ")
        frames = tuple(map(_frame, told.split(";")))
        if not any(frame.startswith(IMPORTING) for frame in frames):
            found[_from_the_loop_on(frames)] += int(number)
    return found


def _frame(told: str) -> str:
    """`function (file)`, the file as one would import it: nothing of this machine."""
    name, _, place = told.partition(" (")
    file = place.rpartition(":")[0]
    for root in ("site-packages/", f"{ROOT}/", f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/"):
        file = file.rpartition(root)[2]
    return f"{name} ({file.lstrip('/')})"


def _from_the_loop_on(frames: Sequence[str]) -> Stack:
    """The event loop is the beginning of all that is looked at."""
    start = next((place for place, frame in enumerate(frames) if "uvloop" in frame), -1)
    rest = frames[start + 1 :]
    while rest and ("uvloop" in rest[0] or "asyncio/runners" in rest[0]):
        rest = rest[1:]
    return tuple(rest) or ("event loop",)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiled", description=__doc__)
    parser.add_argument("--serve", nargs=3, metavar=("KAFKA", "REDIS", "EVENTS"), help="be what is looked at")
    told = parser.parse_args()
    if told.serve:
        bootstrap, redis, events = told.serve
        collect_rarely()  # as `integr8s-idem run` does
        uvloop.run(_serve(bootstrap, redis, int(events)))
        return
    with TemporaryDirectory(prefix="idem-bench-profile-") as folder:
        raw = Path(folder) / "stacks"
        asyncio.run(_looked_at(raw))
        found = stacks(raw.read_text(encoding="utf-8"))
    title = f"A guarded service with a no-op handler: {sum(found.values())} looks, {SAMPLES_A_SECOND} a second"
    GRAPH.write_text(flame_graph(title, found), encoding="utf-8")
    print(f"{GRAPH.relative_to(ROOT)}: {GRAPH.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
