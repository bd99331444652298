"""Does the cost model predict the throughput of one worker and of two workers on one Kafka and one Redis?

Workers are separate processes in one group, which start together. They share the processors with both servers and with
other load on the machine; the processor time of that load is reported, and subtracted before the prediction.
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

from benchmarks.contestants import ensure
from benchmarks.kafka import LONGEST_TURN, NOOP, PARTITIONS, Handler, Topic, filled_topic, new_scope, router_of
from benchmarks.measuring import Flat
from benchmarks.places import open_redis_store
from benchmarks.rounds import Options, Progress, spread_of
from benchmarks.tables import ROOT
from integr8s_idem import IdempotencyConfig, IdempotencyManager, IdempotentEventDispatcher
from integr8s_idem.cli.garbage_collection import collect_rarely
from integr8s_idem.config import KafkaSettings
from integr8s_idem.worker.consumer import make_consumer
from tests.support.kafka.broker import Kafka, KafkaBroker

EVENTS: Final = 15_000
WORKERS: Final = (1, 2)
ROUNDS: Final = 5
PREDICTORS: Final = ("whole_us", "redis_us", "broker_us")
"""Costs that the prediction uses."""


# A worker.


async def _work(bootstrap: str, redis: str, group: str, scope: str) -> None:
    """Join the group, start at the first line of input, and report progress until the input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    go, handler = asyncio.Event(), Handler(0)

    def make_paused_consumer(settings: KafkaSettings, name: str) -> Any:
        consumer = make_consumer(settings, name)
        fetch = consumer.getmany

        async def getmany(*partitions: Any, **options: Any) -> Any:
            if not go.is_set():
                await asyncio.sleep(0.02)
                return {}
            return await fetch(*partitions, **options)

        consumer.getmany = getmany  # type: ignore[method-assign]
        return consumer

    async with open_redis_store(redis) as repository:
        topic = Topic(Kafka(bootstrap), repository, 0)
        manager = IdempotencyManager(IdempotencyConfig(), repository, scope=scope)
        dispatcher = IdempotentEventDispatcher(router_of(handler), manager)
        async with topic.worker(dispatcher, NOOP, handler, make_paused_consumer, group) as worker:

            def report_state() -> None:
                report = worker.report()
                state = {"partitions": report.partitions, "handled": report.tally.handled, "cpu": time.process_time()}
                print(json.dumps(state), flush=True)

            reporting = asyncio.create_task(_report_regularly(report_state))
            await reader.readline()
            go.set()
            await reader.read()
            reporting.cancel()
        await manager.close()


async def _report_regularly(report_state: Any) -> None:
    while True:
        report_state()
        await asyncio.sleep(0.02)


class Worker:
    """A worker process, seen by its parent."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.state: dict[str, float] = {"partitions": 0, "handled": 0, "cpu": 0.0}

    async def listen(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.state = json.loads(line)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")

    async def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self.process.wait()


# The parent process.


@dataclass(frozen=True)
class Run:
    """Results of one run."""

    rate: float
    worker_us: float
    others: float
    """Processors used by other load."""


async def _run_workers(topic: Topic, redis: tuple[str, int], number: int) -> Run:
    async with _workers(topic, redis[0], number) as workers:
        await _until(lambda: all(worker.state["partitions"] == PARTITIONS / number for worker in workers))
        assert isinstance(topic.kafka, KafkaBroker)
        processes = [psutil.Process(pid) for pid in (topic.kafka.pid, redis[1], *(w.process.pid for w in workers))]
        processes.append(psutil.Process())
        cpu, busy, used, start = _cpu(workers), _busy_seconds(), _cpu_seconds(processes), time.perf_counter()
        for worker in workers:
            worker.go()
        await _until(lambda: sum(worker.state["handled"] for worker in workers) >= topic.events)
        seconds = time.perf_counter() - start
        others = (_busy_seconds() - busy - (_cpu_seconds(processes) - used)) / seconds
        ensure(sum(worker.state["handled"] for worker in workers) == topic.events, "some events were handled twice")
        return Run(topic.events / seconds, (_cpu(workers) - cpu) / topic.events * 1e6, max(others, 0.0))


@asynccontextmanager
async def _workers(topic: Topic, redis: str, number: int) -> AsyncIterator[list[Worker]]:
    group, scope = f"bench-{uuid4().hex}", new_scope()
    command = [sys.executable, "-m", "benchmarks.deployments", "--work", topic.kafka.bootstrap, redis, group, scope]
    workers = [
        Worker(
            await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
        )
        for _ in range(number)
    ]
    async with asyncio.TaskGroup() as listeners, AsyncExitStack() as stack:
        for worker in workers:
            listeners.create_task(worker.listen())
            stack.push_async_callback(worker.end)
        yield workers


async def _until(done: Any) -> None:
    async with asyncio.timeout(LONGEST_TURN):
        while not done():  # noqa: ASYNC110  # state arrives asynchronously as lines
            await asyncio.sleep(0.005)


def _cpu(workers: list[Worker]) -> float:
    return sum(worker.state["cpu"] for worker in workers)


def _busy_seconds() -> float:
    """Return the busy seconds of all processors."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def predicted_rate(costs: Mapping[str, Any], workers: int, processors: float) -> float:
    """Predict the events per second of `workers` that share `processors` with Redis and Kafka.

    Each of these processes uses at most one processor.
    """
    worker_us, redis, broker = (costs[f"cost.{name}"] for name in PREDICTORS)
    alone = 1e6 / worker_us * min(1.0, processors)
    return float(min(workers * alone, 1e6 / redis, processors * 1e6 / (worker_us + redis + broker)))


def known_costs(known: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the costs measured on this machine.

    Raises:
        SystemExit: There are none yet; the message says what to run first.
    """
    if missing := [f"cost.{name}" for name in PREDICTORS if f"cost.{name}" not in known]:
        raise SystemExit(
            f"The prediction needs costs that have not been measured: {', '.join(missing)}. "
            "Run `python -m benchmarks --only costs --json FILE` first and pass the same FILE again, "
            "or run both at once: `--only costs --only deployments`."
        )
    return known


async def measure(options: Options, progress: Progress) -> Flat:
    """Measure rates, and compare them with the prediction from this machine's costs."""
    costs = known_costs(options.known)
    results: Flat = {}
    processors = len(psutil.Process().cpu_affinity())
    async with filled_topic(int(EVENTS * options.seconds), progress) as (topic, env):
        redis = (env.url, env.server.pid)
        found: dict[int, list[Run]] = {number: [] for number in WORKERS}
        for turn in range(min(options.rounds, ROUNDS)):
            for number in WORKERS:
                run = await _run_workers(topic, redis, number)
                found[number].append(run)
                progress(
                    f"round {turn + 1}: {number} workers {run.rate:.0f}/s, other load used {run.others:.2f} processors"
                )
    for number, runs in found.items():
        expected = [predicted_rate(costs, number, processors - run.others) for run in runs]
        results |= spread_of(f"deployment.{number}.rate", [run.rate for run in runs])
        results |= spread_of(f"deployment.{number}.foretold", expected)
        results |= spread_of(
            f"deployment.{number}.ratio", [run.rate / rate for run, rate in zip(runs, expected, strict=True)]
        )
        results |= spread_of(f"deployment.{number}.others", [run.others for run in runs])
        results |= spread_of(f"deployment.{number}.worker_us", [run.worker_us for run in runs])
    return results | {
        "deployment.events": topic.events,
        "deployments.server": topic.server(env),
        "deployments.rounds": len(found[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deployments", description="Run one worker of `measure`."
    )
    parser.add_argument("--work", nargs=4, required=True, metavar=("KAFKA", "REDIS", "GROUP", "SCOPE"))
    collect_rarely()  # as `integr8s-idem run` does
    uvloop.run(_work(*parser.parse_args().work))


if __name__ == "__main__":
    main()
