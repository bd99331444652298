"""Campaign `zombies`: the worker of an event stalls beyond lease and session, another one finishes, the first resumes.

Pairs of worker processes run concurrently.  Each pair is a group with one partition, so that one worker holds the
event, and the other one gets it only by a rebalance.
"""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen
from uuid import uuid4

from integr8s_idem import EventPublisher, IdempotencyRecord
from integr8s_idem.config import KafkaSettings, RedisStoreSettings
from integr8s_idem.stores.redis import redis_client
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.kafka_faults import servers
from tests.kafka_faults.application import TaskGiven
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.homes import StoreTable, as_toml, open_records
from tests.support.processes import ServiceProcess

LEASE: Final = 1.0
LEASE_IN_FILES: Final = 2.0
"""Lease with stores that write to a disk: a busy disk must not cost the second run its lease too."""

SESSION: Final = 1.5
ENDLESS: Final = 300.0
"""Duration of handlers that must be cancelled: longer than all timeouts of the campaign."""

PAIRS: Final = 3
"""Pairs of processes that run concurrently."""

_SETTINGS: Final = """
[kafka]
bootstrap_servers = "{bootstrap}"
topic_prefix = "{prefix}"
session_timeout_seconds = {session}
heartbeat_interval_seconds = 0.3
rebalance_timeout_seconds = 8
request_timeout_seconds = 5
metadata_max_age_seconds = 2
{store}
[idempotency]
processing_timeout_seconds = {lease}
default_ttl_seconds = 3600
[services.tasks]
group_id = "{prefix}tasks"
commit_interval_seconds = 0.1
{service}
retry_initial_seconds = 0.1
retry_max_seconds = 0.5
drain_timeout_seconds = 5
[telemetry]
metrics_port = 0
"""


@dataclass
class Pair:
    """Two workers of one group, their tasks, and the effects of these."""

    folder: Path
    group: str
    publisher: EventPublisher
    effects: Effects
    store: StoreTable
    """Store settings of the workers."""
    workers: list[ServiceProcess] = field(default_factory=list)
    given: list[str] = field(default_factory=list)

    def start_worker(self) -> ServiceProcess:
        """Start another worker."""
        worker = ServiceProcess(
            "tests.kafka_faults.application:platform",
            "--settings",
            str(self.folder / "settings.toml"),
            "--json",
            log=self.folder / f"worker-{len(self.workers)}.log",
            env={"FAULTS_EFFECTS": str(self.folder)},
        )
        self.workers.append(worker)
        return worker

    async def stop(self, worker: ServiceProcess) -> None:
        """Stop a worker with SIGSTOP, but not while it locks the SQLite file: that would block the other worker."""
        worker.stop_signal()
        while self.store["kind"] == "sqlite" and _is_locked(self.store["path"]):
            worker.continue_signal()
            await asyncio.sleep(0.002)
            worker.stop_signal()

    async def joined(self) -> None:
        """Wait until all workers have joined the group."""
        await asyncio.gather(
            *(asyncio.to_thread(worker.wait_for_line, "assigned partitions") for worker in self.workers)
        )

    async def together(self) -> None:
        """Wait until all workers are in the group again.

        An evicted worker fetches until it learns of its eviction: it would reserve the next event, and then release it
        without a run.
        """
        async with asyncio.timeout(60):
            bootstrap = servers.kafka().bootstrap
            while not await servers.is_settled(bootstrap, self.group, 2):  # noqa: ASYNC110  # the broker sends no notification
                await asyncio.sleep(0.1)

    async def give(self, *tasks: TaskGiven) -> None:
        """Publish `tasks`."""
        self.given.extend(task.work for task in tasks)
        await self.publisher.publish(*tasks)

    async def until(self, what: str, work: str, attempt: int) -> int:
        """Wait for this line in the journal, and return the process that wrote it."""

        def found() -> list[int]:
            return [
                line.pid
                for line in self.effects.lines()
                if (line.what, line.work, line.attempt) == (what, work, attempt)
            ]

        await eventually(found, state=self.snapshot)
        return found()[0]

    def of_process(self, pid: int) -> tuple[ServiceProcess, ServiceProcess]:
        """Return the worker of that process, and the other one."""
        one, two = self.workers
        return (one, two) if one.pid == pid else (two, one)

    async def record(self, task: TaskGiven) -> object:
        """Return the stored record of `task`, in a form that is equal as long as nothing is written."""
        if self.store["kind"] != "redis":
            record = await self._read(task)
            # Some stores return only the remaining ttl, which decreases.
            return replace(record, expires_at=None)
        # The raw value: the record would contain the remaining ttl, which decreases.
        async with redis_client(RedisStoreSettings(url=self.store["url"])) as client:
            dumped = await client.dump(self._key(task))
            assert dumped is not None
            return bytes(dumped)

    def _key(self, task: TaskGiven) -> str:
        return next(line.key for line in self.effects.lines() if line.work == task.work)

    async def _read(self, task: TaskGiven) -> IdempotencyRecord:
        [record] = await self.records([self._key(task)])
        return record

    async def records(self, keys: Sequence[str]) -> list[IdempotencyRecord]:
        """Return the stored records of `keys`."""
        async with open_records({**self.store, "timeout_seconds": 30}, "idempotency") as store:
            return [record for record in await store.get(keys) if record is not None]

    def receipt(self, work: str, attempt: int) -> bytes:
        """Return the result of the run `attempt` in its stored form."""
        [end] = [
            line for line in self.effects.lines() if (line.what, line.work, line.attempt) == ("end", work, attempt)
        ]
        return json.dumps(self.effects.receipt(work, end)).encode()

    async def result(self, task: TaskGiven) -> tuple[str, int, bytes | None]:
        """Return status, attempt and result of the record of `task`."""
        record = await self._read(task)
        return record.status.value, record.attempt, record.result.body if record.result else None

    async def offset(self) -> int:
        """Return the committed offset of the group."""
        known = await servers.committed(servers.kafka().bootstrap, self.group)
        return max([0, *known.values()])

    async def settled(self, at_least: int) -> None:
        """Wait until all tasks are committed, and check that the offset never falls below `at_least`."""
        async with asyncio.timeout(60):
            while (offset := await self.offset()) < len(self.given):
                _require(offset >= at_least, f"the committed offset moved back from {at_least} to {offset}")
                await asyncio.sleep(0.1)
        _require(offset == len(self.given), f"the committed offset is {offset} after {len(self.given)} messages")

    def snapshot(self) -> str:
        """Return effects and logs, for error messages."""
        return f"{self.effects.lines()}\n" + "\n".join(worker.output[-3000:] for worker in self.workers)


@asynccontextmanager
async def open_pair(
    kind: str = "redis", *, partitions: int = 1, lease: float | None = None, service: str = ""
) -> AsyncIterator[Pair]:
    """Start two workers in a new group with a store of `kind`, and kill them at the end.

    Args:
        kind: The kind of store.
        partitions: Number of partitions.
        lease: Lease in seconds; by default, that of the campaign for this kind of store.
        service: Additional lines of the service's settings.
    """
    kafka = servers.kafka()
    prefix = f"z{uuid4().hex[:10]}."
    await kafka.create_topics({f"{prefix}task_given": partitions})
    with tempfile.TemporaryDirectory(prefix="idem-zombies-") as name:
        folder = Path(name)
        if lease is None:
            lease = LEASE if kind == "redis" else LEASE_IN_FILES
        store = servers.home(kind).settings(folder, timeout_seconds=0.3 * lease)
        settings = {"bootstrap": kafka.bootstrap, "prefix": prefix, "store": as_toml(store)}
        (folder / "settings.toml").write_text(
            _SETTINGS.format(**settings, lease=lease, session=SESSION, service=service)
        )
        effects = Effects(folder)
        effects.prepare()
        publisher = EventPublisher(KafkaSettings(bootstrap_servers=kafka.bootstrap, topic_prefix=prefix))
        pair = Pair(folder, f"{prefix}tasks", publisher, effects, store)
        try:
            for _ in range(2):
                pair.start_worker()
            await pair.joined()
            yield pair
        finally:
            for worker in pair.workers:
                worker.kill()
            await publisher.close()


@dataclass(frozen=True)
class Zombie:
    """A kind of zombie."""

    name: str
    stopped_at: str
    """Line of the journal after which it is stopped."""
    resumed_at: str
    """Line of the second run after which it is resumed."""
    task: dict[str, Any]
    log_message: str = "lost the reservation"
    """Text that it logs about the event after it has resumed."""
    is_cancelled: bool = False
    """Whether its handler is cancelled before the effect."""


KINDS: Final = (
    # Its long-running handler is cancelled.
    Zombie("cancelled", "begin", "end", {"before": ENDLESS}, is_cancelled=True),
    # It resumes during the second run.
    Zombie("during the second run", "begin", "applied", {"before": ENDLESS, "rerun_after": 2.0}, is_cancelled=True),
    # It resumes inside its handler, which fails immediately.
    Zombie("fails", "applied", "end", {"blocks_after": 0.3, "fails": True}, "failed at attempt 1"),
    # It resumes inside its handler, which returns immediately.
    Zombie("completes late", "applied", "end", {"blocks_after": 0.3}),
    # It completes during the second run: a store without token checks would complete the other worker's reservation.
    Zombie("completes meanwhile", "applied", "applied", {"blocks_after": 0.3, "rerun_after": 2.0}),
    Zombie(
        "fails meanwhile",
        "applied",
        "applied",
        {"blocks_after": 0.3, "fails": True, "rerun_after": 2.0},
        "failed at attempt 1",
    ),
    # It resumes just before its effect: the sink rejects its fence.
    Zombie("acts late", "begin", "end", {"blocks": 0.3}),
)


async def run_zombie(pair: Pair, number: int) -> None:
    """Stall a worker beyond lease and session, and check that its late writes are rejected.

    Raises:
        ViolationError: A write of the zombie was accepted.
    """
    zombie = KINDS[number % len(KINDS)]
    task = TaskGiven(work=f"{number}", **zombie.task)
    # Read before the task is given: a handler that blocks the loop would delay the response.
    lost_before = {worker.pid: await asyncio.to_thread(_leases_lost, worker) for worker in pair.workers}
    await pair.together()
    await pair.give(task)
    holder, other = pair.of_process(await pair.until(zombie.stopped_at, task.work, 1))
    await pair.stop(holder)
    try:
        await pair.until(zombie.resumed_at, task.work, 2)
        if zombie.resumed_at == "end":
            await pair.settled(0)
        before, offset = await pair.record(task), await pair.offset()
    finally:
        holder.continue_signal()
    await asyncio.to_thread(_wait_for_log, holder, task, zombie.log_message)
    await pair.until("end", task.work, 2)
    await pair.settled(offset)
    if zombie.resumed_at == "end":
        _require(await pair.record(task) == before, "the record changed after the zombie resumed")
    _require(
        await pair.result(task) == ("completed", 2, pair.receipt(task.work, 2)),
        f"the record contains {await pair.result(task)}",
    )
    ends = [line.pid for line in pair.effects.lines() if (line.what, line.work) == ("end", task.work)]
    _require(other.pid in ends, f"the second run did not happen in the other worker: {ends}")
    _require(pair.effects.in_sink()[task.work] == 1, "the effect is not in the fenced sink exactly once")
    _require(
        await asyncio.to_thread(_leases_lost, holder) > lost_before[holder.pid], "the zombie counted no lost lease"
    )
    if zombie.is_cancelled:
        first = [(line.what, line.pid) for line in pair.effects.lines() if (line.work, line.attempt) == (task.work, 1)]
        _require(first == [("begin", holder.pid), ("cancelled", holder.pid)], f"the zombie's run was {first}")


def _wait_for_log(holder: ServiceProcess, task: TaskGiven, message: str) -> None:
    give_up_at = time.monotonic() + 30
    while not any(message in line and task.event_id in line for line in holder.output.splitlines()):
        _require(time.monotonic() < give_up_at, f"the zombie does not log {message!r} for {task.event_id}")
        time.sleep(0.02)


def _leases_lost(worker: ServiceProcess) -> float:
    """Return the number of lost leases from the worker's metrics."""
    found = re.search(r"http://[\d.]+:\d+", worker.wait_for_line("metrics and health on"))
    assert found is not None
    with urlopen(f"{found[0]}/metrics", timeout=20) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("idempotency_reservations_lost_total"))


def _is_locked(path: str) -> bool:
    with closing(sqlite3.connect(path, timeout=0.1, isolation_level=None)) as file:
        try:
            file.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        return False


def _require(condition: bool, violation: str) -> None:
    if not condition:
        raise ViolationError(violation)


async def _run_sequentially(numbers: Iterable[int], store: str) -> Figures:
    figures = Figures()
    async with open_pair(store) as pair:
        for number in numbers:
            try:
                await run_zombie(pair, number)
                figures.update(zombies=1, takeovers=1)
            except AssertionError as error:
                kind = KINDS[number % len(KINDS)].name
                raise ViolationError(f"zombie {number} ({kind}): {error}\n{pair.snapshot()}") from error
        figures.update(pair.effects.judge(pair.given))
        figures.update(pair.effects.judge_records(await pair.records(pair.effects.keys())))
        _require(figures["completed"] == len(pair.given), f"completed only {figures['completed']} of {len(pair.given)}")
        figures.update({"refused_by_sink": pair.effects.refused(), f"zombies:{store}": figures["zombies"]})
    return figures


async def _run_pairs(first: int, count: int, kinds: Sequence[str]) -> Figures:
    pairs = -(-PAIRS // len(kinds)) * len(kinds)
    shares = [range(first + start, first + count, pairs) for start in range(min(pairs, count))]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_run_sequentially(share, kinds[index % len(kinds)])) for index, share in enumerate(shares)
        ]
    total = Figures()
    for task in tasks:
        total.update(task.result())
    return total


def run(first: int, count: int, kinds: Sequence[str] = ("redis",)) -> Figures:
    """Run the zombies numbered `first` to `first + count - 1`, alternating between stores of `kinds`."""
    try:
        return asyncio.run(_run_pairs(first, count, kinds))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


CAMPAIGN: Final = Campaign(
    name="zombies",
    counts="zombies",
    says="a worker is stopped (SIGSTOP) for longer than its lease and session, another one finishes, then it resumes",
    scenarios=(33, 35, 36, 38),
    in_test=7,
    target=200,
    batch=14,
    run=run,
)
