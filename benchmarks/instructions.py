"""How many instructions does a guarded event take? `python -m benchmarks.instructions` counts them.

Times vary by a tenth on a machine with other load, and small savings drown in that. Instructions do not depend on it,
except through the sizes of batches: a guarded event of a worker varies by a hundredth or two, a single call by a
twentieth, an event whose handler waits by a tenth. valgrind executes the service, and counts only while the events are
handled; all paths take four minutes. It does not count what the kernel executes, and each instruction counts the same,
whether its data is in a cache or not.
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
from benchmarks.guards import BareRequests, Integr8sIdem
from benchmarks.kafka import BY_PARTITION, NOOP, ONE_MS, Handler, OrderPlaced, new_scope, requests_for_fetched
from benchmarks.places import RedisEnvironment, redis_environment
from benchmarks.tables import ROOT
from integr8s_idem.engine.leases import LeaseKeeper
from integr8s_idem.engine.work import Work
from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.records import Reserved
from integr8s_idem.stores import IdempotencyRepository

EVENTS: Final = 4_000
CALLERS: Final = 64
PAUSE: Final = 0.001
"""Seconds for which the handlers of `waiting` paths wait."""
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


async def _waiting(env: RedisEnvironment, events: int) -> Callable[[], Awaitable[None]]:
    services, records = Services(env), records_of(events)
    return lambda: services.handle(records, ONE_MS, handler=Handler(events, PAUSE))


async def _waiting_plain(env: RedisEnvironment, events: int) -> Callable[[], Awaitable[None]]:
    services, records = Services(env), records_of(events)
    return lambda: services.handle(records, ONE_MS, guarded=False, handler=Handler(events, PAUSE))


async def _waiting_with_parts(env: RedisEnvironment, events: int) -> Callable[[], Awaitable[None]]:
    services, records, repository = Services(env), records_of(events), await env.repository()
    reserved = await (await env.manager(new_scope())).reserve("any")
    assert isinstance(reserved, Reserved)
    handler = HandlerWithParts(events, PAUSE, repository, reserved)
    after_fetch = requests_for_fetched(BareRequests(repository))
    return lambda: services.handle(records, ONE_MS, guarded=False, handler=handler, after_fetch=after_fetch)


class HandlerWithParts(Handler):
    """Makes the key of each event, and holds a lease while it waits: what a guard cannot do without, but its requests.

    It makes no attempts or runs, decides nothing, records no results, and cannot cancel work with a lost lease.
    """

    def __init__(self, events: int, pause: float, repository: IdempotencyRepository, reserved: Reserved) -> None:
        super().__init__(events, pause)
        self._leases = LeaseKeeper(repository, "bench", _never)
        self._reserved = reserved
        self._asked_at = self._leases.now()
        self._resolver = KeyResolver()

    async def handle(self, event: OrderPlaced) -> None:
        keyed = self._resolver.resolve("ship", event)
        lease = self._leases.hold(self._reserved, self._asked_at, Work(keyed.key, keyed.fingerprint))
        with lease:
            await super().handle(event)
        lease.drop()


async def _never(_: Work) -> Reserved | None:
    return None


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
    "waiting": _waiting,
    "waiting_plain": _waiting_plain,
    "waiting_with_parts": _waiting_with_parts,
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
