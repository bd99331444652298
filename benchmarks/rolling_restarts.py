"""Measure how long a rolling restart of three workers stalls their partitions, with and without static membership.

    python -m benchmarks.rolling_restarts [--rounds 3] [--downtime 2] [--slow 0] [--json FILE]

Three processes run `integr8s-idem run` with the default settings, on a real Kafka and a real Redis on this machine.
Each of six partitions receives an event every 50 ms.  One worker after another is stopped with SIGTERM, started again
after a downtime, and followed by the next when it handles events again.  With `--slow`, one event in 200 takes that
many seconds; events do not wait for each other, but a rebalance waits for those that are being handled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from aiokafka import AIOKafkaProducer

from integr8s_idem import BaseEvent, EventRouter, Platform, Service
from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from tests.support.conditions import eventually
from tests.support.kafka.broker import KafkaBroker
from tests.support.processes import ServiceProcess
from tests.support.redis import RedisServer

PARTITIONS: Final = 6
WORKERS: Final = 3
INTERVAL: Final = 0.05
"""Seconds between two events of a partition."""

SETTLING: Final = 5.0
"""Seconds between the restart of one worker and the next."""

STALLED: Final = 0.5
"""Seconds without an event after which a partition counts as stalled."""

JOURNAL: Final = "ROLLING_RESTARTS_JOURNAL"
"""Environment variable with the path of the file that all workers append to."""

SLOW: Final = "ROLLING_RESTARTS_SLOW"
"""Environment variable with the seconds that a slow event takes."""

SLOW_SHARE: Final = 200
"""One of this many events is slow."""

_PATIENCE: Final = 180.0


class Tick(BaseEvent):
    """An event that says when it was sent, and to which partition."""

    event_type: Literal["tick"] = "tick"
    sent: float
    partition: int
    is_slow: bool = False


router = EventRouter()


@router.on(Tick)
async def note(event: Tick) -> None:
    """Append to the journal, which all workers share: short lines are written at once."""
    if event.is_slow:
        await asyncio.sleep(float(os.environ[SLOW]))
        return
    _append(f"{event.partition} {event.sent} {time.time()} {os.getpid()}\n")


def _append(line: str) -> None:
    with Path(os.environ[JOURNAL]).open("a", encoding="ascii") as journal:
        journal.write(line)


platform = Platform(
    Service("ticks", providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)])
)


@dataclass(frozen=True)
class Handled:
    """A line of the journal; times in seconds since the Unix epoch, of the same clock."""

    partition: int
    sent: float
    at: float
    pid: int


def journal_of(file: Path) -> list[Handled]:
    """Read the journal so far."""
    # The last line may not be complete.
    text = file.read_text().rpartition("\n")[0] if file.exists() else ""
    rows = [line.split() for line in text.splitlines()]
    return [Handled(int(row[0]), float(row[1]), float(row[2]), int(row[3])) for row in rows]


@dataclass(frozen=True)
class Stalls:
    """What one rolling restart has cost."""

    stalled_seconds: float
    """Sum over all partitions of the pauses between two events that are longer than `STALLED`."""
    longest_seconds: float
    """The longest of these pauses."""
    late_share: float
    """Share of the events that were handled more than a second after they were sent."""
    p99_seconds: float
    """99th percentile of the time from sending an event until it was handled."""
    restart_seconds: float
    """Duration of the rolling restart."""
    events: int


def stalls_of(journal: Sequence[Handled], begin: float, end: float) -> Stalls:
    """Return the stalls between two times, from all lines of the journal."""
    at, delays = defaultdict[int, list[float]](lambda: [begin]), []
    for handled in journal:
        if begin <= handled.sent < end:
            at[handled.partition].append(handled.at)
            delays.append(handled.at - handled.sent)
    pauses = [later - earlier for times in at.values() for earlier, later in pairwise(sorted(times))]
    stalls = [pause for pause in pauses if pause > STALLED]
    delays.sort()
    return Stalls(
        sum(stalls),
        max(stalls, default=0.0),
        sum(delay > 1 for delay in delays) / len(delays),
        delays[int(len(delays) * 0.99)],
        end - begin,
        len(delays),
    )


class Workers:
    """Three worker processes."""

    def __init__(
        self, folder: Path, broker: KafkaBroker, redis_url: str, stack: ExitStack, *, static: bool, slow: float
    ) -> None:
        self.journal = folder / "journal"
        self._folder = folder
        self._static = static
        self._slow = slow
        self._stack = stack
        self._processes: dict[int, ServiceProcess] = {}
        self._settings = folder / "settings.toml"
        self._settings.write_text(
            f'[kafka]\nbootstrap_servers = "{broker.bootstrap}"\n[store]\nurl = "{redis_url}"\n'
            '[telemetry]\nmetrics_enabled = false\n[services.ticks]\nordering = "none"\n'
        )

    def start(self, number: int) -> None:
        """Start a worker; a static one has the same id each time."""
        env = {JOURNAL: str(self.journal), SLOW: str(self._slow)}
        if self._static:
            env["INTEGR8S_IDEM_KAFKA__GROUP_INSTANCE_ID"] = f"worker-{number}"
        process = ServiceProcess(
            "benchmarks.rolling_restarts:platform",
            "--settings",
            str(self._settings),
            log=self._folder / f"worker-{number}.log",
            env=env,
        )
        self._processes[number] = self._stack.enter_context(process)

    async def handle_all(self) -> None:
        """Wait until each worker handles events."""
        await self._until(lambda pids: {process.pid for process in self._processes.values()} <= pids)

    async def restart(self, number: int, downtime: float) -> None:
        """Restart a worker, and wait until it handles events."""
        old = self._processes[number]
        old.terminate()
        await eventually(lambda: not old.running)
        await asyncio.sleep(downtime)
        self.start(number)
        new = self._processes[number].pid
        await self._until(lambda pids: new in pids)

    async def _until(self, condition: Callable[[set[int]], bool]) -> None:
        await eventually(lambda: condition({handled.pid for handled in journal_of(self.journal)}), within=_PATIENCE)


@asynccontextmanager
async def ticking(broker: KafkaBroker, *, slow: bool) -> AsyncIterator[None]:
    """Send an event to each partition at every interval inside the block."""
    producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap)
    await producer.start()

    async def send() -> None:
        due, number = asyncio.get_running_loop().time(), 0
        while True:
            for partition in range(PARTITIONS):
                number += 1
                is_slow = slow and number % SLOW_SHARE == 0
                event = Tick(sent=time.time(), partition=partition, is_slow=is_slow)
                await producer.send("tick", encode_event(event), headers=event_headers(event), partition=partition)
            due += INTERVAL
            await asyncio.sleep(max(due - asyncio.get_running_loop().time(), 0))

    sending = asyncio.create_task(send())
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.wait({sending})
        await producer.stop()


async def measure(folder: Path, redis: RedisServer, *, static: bool, downtime: float, slow: float) -> Stalls:
    """Restart three workers one after another, on a new broker."""
    redis.flush()
    with ExitStack() as stack:
        broker = KafkaBroker(folder)
        stack.callback(broker.kill)
        broker.start()
        await broker.create_topics({"tick": PARTITIONS})
        workers = Workers(folder, broker, redis.url, stack, static=static, slow=slow)
        async with ticking(broker, slow=slow > 0):
            for number in range(WORKERS):
                workers.start(number)
            await workers.handle_all()
            await asyncio.sleep(2 * SETTLING)
            begin = time.time()
            for number in range(WORKERS):
                await workers.restart(number, downtime)
                await asyncio.sleep(SETTLING)
            end = time.time()
            await asyncio.sleep(SETTLING)
        return stalls_of(journal_of(workers.journal), begin, end)


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rolling_restarts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--downtime", type=float, default=2.0, help="seconds between the end and the start of a worker")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that one event in 200 takes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, list[Stalls]] = {"dynamic": [], "static": []}
    with tempfile.TemporaryDirectory() as folder, RedisServer() as redis:
        for _ in range(options.rounds):
            for kind, rounds in found.items():
                place = Path(tempfile.mkdtemp(dir=folder))
                static = kind == "static"
                stalls = await measure(place, redis, static=static, downtime=options.downtime, slow=options.slow)
                rounds.append(stalls)
                print(kind, json.dumps(asdict(stalls)), flush=True)
    for kind, rounds in found.items():
        medians = {name: statistics.median(asdict(each)[name] for each in rounds) for name in asdict(rounds[0])}
        print(f"median, {kind}: {json.dumps({name: round(value, 3) for name, value in medians.items()})}")
    if options.json is not None:
        options.json.write_text(json.dumps({kind: [asdict(each) for each in rounds] for kind, rounds in found.items()}))


if __name__ == "__main__":
    asyncio.run(main())
