"""Does the cost model foretell what one worker and two workers do on one Kafka and one Redis?

Workers are processes of their own in one group, which begin together.  The processors are shared with both servers
and with whatever else runs here, so what others took meanwhile is told, and left out of what is foretold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import psutil
import uvloop

from benchmarks.contestants import must
from benchmarks.kafka import LONGEST_TURN, NOOP, PARTITIONS, Handler, Topic, filled_topic, new_scope, router_of
from benchmarks.measuring import Flat
from benchmarks.places import open_place
from benchmarks.rounds import Options, Tell, spread_of
from benchmarks.tables import ROOT
from integr8s_idem import IdempotencyConfig, IdempotencyManager, IdempotentEventDispatcher
from integr8s_idem.cli.garbage_collection import collect_rarely
from integr8s_idem.config import KafkaSettings
from integr8s_idem.worker.consumer import make_consumer
from tests.support.kafka.broker import Kafka, KafkaBroker

EVENTS: Final = 15_000
WORKERS: Final = (1, 2)
ROUNDS: Final = 5
FORETELLING: Final = ("whole_us", "redis_us", "broker_us")
"""What a rate is foretold by."""


# A worker.


async def _work(bootstrap: str, redis: str, group: str, scope: str) -> None:
    """Joins, waits for a line to begin, and tells how far it is, until there is no more input."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    go, handler = asyncio.Event(), Handler(0)

    def held_back(settings: KafkaSettings, name: str) -> Any:
        consumer = make_consumer(settings, name)
        fetch = consumer.getmany

        async def getmany(*partitions: Any, **how: Any) -> Any:
            if not go.is_set():
                await asyncio.sleep(0.02)
                return {}
            return await fetch(*partitions, **how)

        consumer.getmany = getmany  # type: ignore[method-assign]
        return consumer

    async with open_place(redis) as repository:
        topic = Topic(Kafka(bootstrap), repository, 0)
        manager = IdempotencyManager(IdempotencyConfig(), repository, scope=scope)
        dispatcher = IdempotentEventDispatcher(router_of(handler), manager)
        async with topic.worker(dispatcher, NOOP, handler, held_back, group) as worker:

            def tell() -> None:
                report = worker.report()
                told = {"partitions": report.partitions, "handled": report.tally.handled, "cpu": time.process_time()}
                print(json.dumps(told), flush=True)

            telling = asyncio.create_task(_telling(tell))
            await reader.readline()
            go.set()
            await reader.read()
            telling.cancel()
        await manager.close()


async def _telling(tell: Any) -> None:
    while True:
        tell()
        await asyncio.sleep(0.02)


class Worker:
    """One such process, as its parent sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.told: dict[str, float] = {"partitions": 0, "handled": 0, "cpu": 0.0}

    async def listen(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.told = json.loads(line)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")

    async def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()


# The parent of all.


@dataclass(frozen=True)
class Ran:
    """All events by so many workers."""

    rate: float
    worker_us: float
    others: float
    """Processors that were taken by others."""


async def _ran(topic: Topic, redis: tuple[str, int], number: int) -> Ran:
    async with _workers(topic, redis[0], number) as workers:
        await _until(lambda: all(worker.told["partitions"] == PARTITIONS / number for worker in workers))
        assert isinstance(topic.kafka, KafkaBroker)
        ours = [psutil.Process(pid) for pid in (topic.kafka.pid, redis[1], *(w.process.pid for w in workers))]
        ours.append(psutil.Process())
        cpu, busy, spent, start = _cpu(workers), _busy(), _spent(ours), time.perf_counter()
        for worker in workers:
            worker.go()
        await _until(lambda: sum(worker.told["handled"] for worker in workers) >= topic.events)
        seconds = time.perf_counter() - start
        others = (_busy() - busy - (_spent(ours) - spent)) / seconds
        must(sum(worker.told["handled"] for worker in workers) == topic.events, "some were handled twice")
        return Ran(topic.events / seconds, (_cpu(workers) - cpu) / topic.events * 1e6, max(others, 0.0))


@asynccontextmanager
async def _workers(topic: Topic, redis: str, number: int) -> AsyncIterator[list[Worker]]:
    group, scope = f"bench-{uuid4().hex}", new_scope()
    begun = [sys.executable, "-m", "benchmarks.deployments", "--work", topic.kafka.bootstrap, redis, group, scope]
    workers = [
        Worker(
            await asyncio.create_subprocess_exec(
                *begun, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        )
        for _ in range(number)
    ]
    async with asyncio.TaskGroup() as listening, AsyncExitStack() as ends:
        for worker in workers:
            listening.create_task(worker.listen())
            ends.push_async_callback(worker.end)
        yield workers


async def _until(done: Any) -> None:
    async with asyncio.timeout(LONGEST_TURN):
        while not done():  # noqa: ASYNC110  # processes tell by lines
            await asyncio.sleep(0.005)


def _cpu(workers: list[Worker]) -> float:
    return sum(worker.told["cpu"] for worker in workers)


def _busy() -> float:
    """Seconds of all processors that were not idle, or not ours to have."""
    told = psutil.cpu_times()
    return float(sum(told) - told.idle - told.iowait - told.guest - told.guest_nice)


def _spent(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def foretold(costs: Mapping[str, Any], workers: int, processors: float) -> float:
    """Events a second of so many workers, who share so many processors with Redis and Kafka.

    None of them has more than one processor; all together not more than there are.
    """
    each, redis, broker = (costs[f"cost.{name}"] for name in FORETELLING)
    alone = 1e6 / each * min(1.0, processors)
    return float(min(workers * alone, 1e6 / redis, processors * 1e6 / (each + redis + broker)))


def known_costs(known: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was found on this machine.

    Raises:
        SystemExit: Nothing was found yet; it says what to run first.
    """
    if missing := [f"cost.{name}" for name in FORETELLING if f"cost.{name}" not in known]:
        raise SystemExit(
            f"There is nothing to foretell by: {', '.join(missing)}. "
            "Run `python -m benchmarks --only costs --json FILE` first and give the same FILE again, "
            "or ask both at once: `--only costs --only deployments`."
        )
    return known


async def measured(options: Options, tell: Tell) -> Flat:
    """Rates, and what the costs that this machine came to foretell."""
    costs = known_costs(options.known)
    told: Flat = {}
    processors = len(psutil.Process().cpu_affinity())
    async with filled_topic(int(EVENTS * options.seconds), tell) as (topic, place):
        redis = (place.url, place.server.pid)
        found: dict[int, list[Ran]] = {number: [] for number in WORKERS}
        for turn in range(min(options.rounds, ROUNDS)):
            for number in WORKERS:
                ran = await _ran(topic, redis, number)
                found[number].append(ran)
                tell(f"round {turn + 1}: {number} workers {ran.rate:.0f}/s, others took {ran.others:.2f} processors")
    for number, runs in found.items():
        expected = [foretold(costs, number, processors - ran.others) for ran in runs]
        told |= spread_of(f"deployment.{number}.rate", [ran.rate for ran in runs])
        told |= spread_of(f"deployment.{number}.foretold", expected)
        told |= spread_of(
            f"deployment.{number}.ratio", [ran.rate / rate for ran, rate in zip(runs, expected, strict=True)]
        )
        told |= spread_of(f"deployment.{number}.others", [ran.others for ran in runs])
        told |= spread_of(f"deployment.{number}.worker_us", [ran.worker_us for ran in runs])
    return told | {
        "deployment.events": topic.events,
        "deployments.server": topic.server(place),
        "deployments.rounds": len(found[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deployments", description="One worker of `measured`.")
    parser.add_argument("--work", nargs=4, required=True, metavar=("KAFKA", "REDIS", "GROUP", "SCOPE"))
    collect_rarely()  # as `integr8s-idem run` does
    uvloop.run(_work(*parser.parse_args().work))


if __name__ == "__main__":
    main()
