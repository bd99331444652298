"""How many instructions does a guarded event take? `python -m benchmarks.instructions` counts them.

Times vary by a tenth on a machine with other load, and small savings drown in that. Instructions do not depend on it,
except through the sizes of batches: a guarded event of a worker varies by a hundredth or two, a single call by a
twentieth. valgrind executes the service, and counts only while the events are handled; all paths take three minutes.
It does not count what the kernel executes, and each instruction counts the same, whether its data is in a cache or not.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypeAlias

import uvloop

from benchmarks.frames import Services, records_of
from benchmarks.guards import Integr8sIdem
from benchmarks.kafka import BY_PARTITION, NOOP, new_scope
from benchmarks.places import RedisEnvironment, redis_environment
from benchmarks.tables import ROOT

EVENTS: Final = 4_000
CALLERS: Final = 64
_TOTAL: Final = re.compile(r"^totals: (\d+)$", re.MULTILINE)

Prepared: TypeAlias = Callable[[RedisEnvironment, int], Awaitable[Callable[[], Awaitable[None]]]]
"""Prepares a number of events, and returns a function that handles them."""


async def _guarded(env: RedisEnvironment, events: int) -> Callable[[], Awaitable[None]]:
    services, records = Services(env), records_of(events)
    return lambda: services.handle(records, NOOP)


async def _by_partition(env: RedisEnvironment, events: int) -> Callable[[], Awaitable[None]]:
    services, records = Services(env), records_of(events)
    return lambda: services.handle(records, BY_PARTITION)


async def _plain(env: RedisEnvironment, events: int) -> Callable[[], Awaitable[None]]:
    services, records = Services(env), records_of(events)
    return lambda: services.handle(records, NOOP, guarded=False)


async def _new_keys(env: RedisEnvironment, events: int) -> Callable[[], Awaitable[None]]:
    guard = Integr8sIdem(await env.manager(new_scope()))
    return lambda: _call_all(guard, events)


async def _duplicates(env: RedisEnvironment, events: int) -> Callable[[], Awaitable[None]]:
    guard = Integr8sIdem(await env.manager(new_scope()))
    await _call_all(guard, events)
    return lambda: _call_all(guard, events)


async def _local_duplicates(env: RedisEnvironment, events: int) -> Callable[[], Awaitable[None]]:
    guard = Integr8sIdem(await env.manager(new_scope(), local=True))
    await _call_all(guard, events)
    return lambda: _call_all(guard, events)


async def _call_all(guard: Integr8sIdem, events: int) -> None:
    numbers = count()

    async def call() -> None:
        while (number := next(numbers)) < events:
            await guard.once(f"key-{number}")

    await asyncio.gather(*[call() for _ in range(CALLERS)])


PATHS: Final[dict[str, Prepared]] = {
    "guarded": _guarded,
    "by_partition": _by_partition,
    "plain": _plain,
    "new_keys": _new_keys,
    "duplicates": _duplicates,
    "local_duplicates": _local_duplicates,
}


async def _execute(path: str, events: int) -> None:
    """Handle events once to fill the caches, and once more while valgrind counts."""
    async with redis_environment() as env:
        await (await PATHS[path](env, events))()
        handle = await PATHS[path](env, events)
        gc.collect()
        gc.disable()
        with _counting():
            await handle()


@contextmanager
def _counting() -> Iterator[None]:
    _control("on")
    try:
        yield
    finally:
        _control("off")


def _control(state: str) -> None:
    subprocess.run(["callgrind_control", "-i", state, str(os.getpid())], check=True, capture_output=True)


def total_of(report: str) -> int:
    """Return the number of instructions in a report of callgrind.

    Raises:
        ValueError: The report has no total.
    """
    found = _TOTAL.search(report)
    if found is None:
        raise ValueError("the report has no total")
    return int(found[1])


def instructions(path: str, events: int) -> float:
    """Return the instructions that each event takes in user space.

    Raises:
        SystemExit: valgrind is not installed, or the service has failed.
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise SystemExit("valgrind is not installed. On Debian: apt-get install valgrind")
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        command = [valgrind, "--quiet", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={report}"]
        child = [sys.executable, "-m", "benchmarks.instructions", "--execute", path, "--events", str(events)]
        # The order of sets of strings depends on the seed.
        done = subprocess.run([*command, *child], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": "0"}, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{path}: the service has failed, see above")
        return total_of(report.read_text()) / events


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description="Count instructions.")
    parser.add_argument("paths", nargs="*", metavar="path", help=f"of {', '.join(PATHS)}; all if none is given")
    parser.add_argument("--events", type=int, default=EVENTS, help="how many are counted (default: %(default)s)")
    parser.add_argument("--execute", choices=PATHS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.execute:
        uvloop.run(_execute(arguments.execute, arguments.events))
        return
    if unknown := set(arguments.paths) - set(PATHS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Choose of {', '.join(PATHS)}")
    for path in arguments.paths or PATHS:
        print(f"{path:20}{instructions(path, arguments.events):>12,.0f} instructions per event", flush=True)


if __name__ == "__main__":
    main()
