"""Campaign `zombies`: the holder of an event stalls beyond lease and session, another one finishes, the holder wakes.

Pairs of worker processes work side by side, each in a group of its own with one partition, so that one of
them holds the event and only a rebalance hands it to the other.
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
"""Where records wait for a disk: a busy one must not take the lease of the second run as well."""

SESSION: Final = 1.5
ENDLESS: Final = 300.0
"""Seconds that only a handler spends which nobody cancels: longer than anybody here waits."""

PAIRS: Final = 3
"""Pairs of processes that work side by side."""

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
    """Two workers of one group, what they are given, and what they did."""

    folder: Path
    group: str
    publisher: EventPublisher
    effects: Effects
    store: StoreTable
    """Settings of its store."""
    workers: list[ServiceProcess] = field(default_factory=list)
    given: list[str] = field(default_factory=list)

    def start_worker(self) -> ServiceProcess:
        """One more worker."""
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
        """SIGSTOP, but not while it writes into a file that only one can write into: nobody could go on."""
        worker.stop_signal()
        while self.store["kind"] == "sqlite" and _is_locked(self.store["path"]):
            worker.continue_signal()
            await asyncio.sleep(0.002)
            worker.stop_signal()

    async def joined(self) -> None:
        """Return once all of them are in the group."""
        await asyncio.gather(
            *(asyncio.to_thread(worker.wait_for_line, "assigned partitions") for worker in self.workers)
        )

    async def together(self) -> None:
        """Return once all of them are in one group again.

        Whoever was put out of it fetches until it is told: it would reserve the next event and give it back unbegun.
        """
        async with asyncio.timeout(60):
            bootstrap = servers.kafka().bootstrap
            while not await servers.is_settled(bootstrap, self.group, 2):  # noqa: ASYNC110  # the broker tells nobody
                await asyncio.sleep(0.1)

    async def give(self, *tasks: TaskGiven) -> None:
        """Ask for `tasks`."""
        self.given.extend(task.work for task in tasks)
        await self.publisher.publish(*tasks)

    async def until(self, what: str, work: str, attempt: int) -> int:
        """The process that wrote this line into the journal, once it is there."""

        def found() -> list[int]:
            return [
                line.pid
                for line in self.effects.lines()
                if (line.what, line.work, line.attempt) == (what, work, attempt)
            ]

        await eventually(found, state=self.snapshot)
        return found()[0]

    def of_process(self, pid: int) -> tuple[ServiceProcess, ServiceProcess]:
        """The worker of that process, and the other one."""
        one, two = self.workers
        return (one, two) if one.pid == pid else (two, one)

    async def record(self, task: TaskGiven) -> object:
        """What the store holds for `task`; two of them are equal if nothing was written between."""
        if self.store["kind"] != "redis":
            record = await self._read(task)
            # Where its end is kept as a time to live, that passes.
            return replace(record, expires_at=None)
        # Byte for byte: read as a record, its end is a time to live, which passes.
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
        """What the store holds of `keys`."""
        async with open_records({**self.store, "timeout_seconds": 30}, "idempotency") as store:
            return [record for record in await store.get(keys) if record is not None]

    def receipt(self, work: str, attempt: int) -> bytes:
        """What the run of `attempt` has returned, as the store holds it."""
        [end] = [
            line for line in self.effects.lines() if (line.what, line.work, line.attempt) == ("end", work, attempt)
        ]
        return json.dumps(self.effects.receipt(work, end)).encode()

    async def result(self, task: TaskGiven) -> tuple[str, int, bytes | None]:
        """Status, attempt and result of the record of `task`."""
        record = await self._read(task)
        return record.status.value, record.attempt, record.result.body if record.result else None

    async def offset(self) -> int:
        """How far the group has come."""
        known = await servers.committed(servers.kafka().bootstrap, self.group)
        return max([0, *known.values()])

    async def settled(self, at_least: int) -> None:
        """Return once everything that was given is committed; it never falls below `at_least`."""
        async with asyncio.timeout(60):
            while (offset := await self.offset()) < len(self.given):
                _demand(offset >= at_least, f"the group went back from {at_least} to {offset}")
                await asyncio.sleep(0.1)
        _demand(offset == len(self.given), f"the group is at {offset} after {len(self.given)} messages")

    def snapshot(self) -> str:
        """What was done and said, for whoever looks for a mistake."""
        return f"{self.effects.lines()}\n" + "\n".join(worker.output[-3000:] for worker in self.workers)


@asynccontextmanager
async def open_pair(
    kind: str = "redis", *, partitions: int = 1, lease: float | None = None, service: str = ""
) -> AsyncIterator[Pair]:
    """Two workers that have joined a group of their own, with a store of `kind`; killed at the end.

    Args:
        lease: Seconds; that of the campaign for stores of this kind if not given.
        service: More lines of the service's settings.
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
    """How one of them behaves."""

    name: str
    stopped_at: str
    """The line of the journal after which it is stopped."""
    woken_at: str
    """The line of the second run after which it goes on."""
    task: dict[str, Any]
    says: str = "lost the reservation"
    """What its log holds about the event once it is awake."""
    is_cancelled: bool = False
    """Its handler stands before its effect, and never comes to it."""


KINDS: Final = (
    # Its handler would go on for long: it is cancelled.
    Zombie("cancelled", "begin", "end", {"before": ENDLESS}, is_cancelled=True),
    # As it wakes, the second run goes on.
    Zombie("during the second run", "begin", "applied", {"before": ENDLESS, "rerun_after": 2.0}, is_cancelled=True),
    # It wakes inside its handler, which fails at once.
    Zombie("fails", "applied", "end", {"blocks_after": 0.3, "fails": True}, "failed at attempt 1"),
    # It wakes inside its handler, which ends at once.
    Zombie("completes late", "applied", "end", {"blocks_after": 0.3}),
    # The same, while the second run goes on: a store that believed it would settle what another one holds.
    Zombie("completes meanwhile", "applied", "applied", {"blocks_after": 0.3, "rerun_after": 2.0}),
    Zombie(
        "fails meanwhile",
        "applied",
        "applied",
        {"blocks_after": 0.3, "fails": True, "rerun_after": 2.0},
        "failed at attempt 1",
    ),
    # It wakes just before its effect: the sink refuses its fence.
    Zombie("acts late", "begin", "end", {"blocks": 0.3}),
)


async def wake_a_zombie(pair: Pair, number: int) -> None:
    """One stall beyond lease and session.

    Raises:
        ViolationError: What the zombie did counted.
    """
    zombie = KINDS[number % len(KINDS)]
    task = TaskGiven(work=f"{number}", **zombie.task)
    # Asked before: a handler that holds the loop would hold up the answer.
    lost_before = {worker.pid: await asyncio.to_thread(_leases_lost, worker) for worker in pair.workers}
    await pair.together()
    await pair.give(task)
    holder, other = pair.of_process(await pair.until(zombie.stopped_at, task.work, 1))
    await pair.stop(holder)
    try:
        await pair.until(zombie.woken_at, task.work, 2)
        if zombie.woken_at == "end":
            await pair.settled(0)
        before, offset = await pair.record(task), await pair.offset()
    finally:
        holder.continue_signal()
    await asyncio.to_thread(_wait_for_its_end, holder, task, zombie.says)
    await pair.until("end", task.work, 2)
    await pair.settled(offset)
    if zombie.woken_at == "end":
        _demand(await pair.record(task) == before, "the record changed after the zombie woke")
    _demand(
        await pair.result(task) == ("completed", 2, pair.receipt(task.work, 2)),
        f"the record says {await pair.result(task)}",
    )
    ends = [line.pid for line in pair.effects.lines() if (line.what, line.work) == ("end", task.work)]
    _demand(other.pid in ends, f"the second run is not the other worker's: {ends}")
    _demand(pair.effects.in_sink()[task.work] == 1, "the fenced sink does not hold it once")
    _demand(await asyncio.to_thread(_leases_lost, holder) > lost_before[holder.pid], "the zombie counts no lost lease")
    if zombie.is_cancelled:
        first = [(line.what, line.pid) for line in pair.effects.lines() if (line.work, line.attempt) == (task.work, 1)]
        _demand(first == [("begin", holder.pid), ("cancelled", holder.pid)], f"the zombie's run was {first}")


def _wait_for_its_end(holder: ServiceProcess, task: TaskGiven, says: str) -> None:
    give_up_at = time.monotonic() + 30
    while not any(says in line and task.event_id in line for line in holder.output.splitlines()):
        _demand(time.monotonic() < give_up_at, f"the zombie does not say {says!r} of {task.event_id}")
        time.sleep(0.02)


def _leases_lost(worker: ServiceProcess) -> float:
    """As the worker counts them for Prometheus."""
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


def _demand(fact: bool, otherwise: str) -> None:
    if not fact:
        raise ViolationError(otherwise)


async def _one_after_the_other(numbers: Iterable[int], store: str) -> Figures:
    figures = Figures()
    async with open_pair(store) as pair:
        for number in numbers:
            try:
                await wake_a_zombie(pair, number)
                figures.update(zombies=1, takeovers=1)
            except AssertionError as error:
                kind = KINDS[number % len(KINDS)].name
                raise ViolationError(f"zombie {number} ({kind}): {error}\n{pair.snapshot()}") from error
        figures.update(pair.effects.judge(pair.given))
        figures.update(pair.effects.judge_records(await pair.records(pair.effects.keys())))
        _demand(figures["completed"] == len(pair.given), f"completed only {figures['completed']} of {len(pair.given)}")
        figures.update({"refused_by_sink": pair.effects.refused(), f"zombies:{store}": figures["zombies"]})
    return figures


async def _side_by_side(first: int, count: int, kinds: Sequence[str]) -> Figures:
    pairs = -(-PAIRS // len(kinds)) * len(kinds)
    shares = [range(first + start, first + count, pairs) for start in range(min(pairs, count))]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_one_after_the_other(share, kinds[place % len(kinds)]))
            for place, share in enumerate(shares)
        ]
    total = Figures()
    for task in tasks:
        total.update(task.result())
    return total


def run(first: int, count: int, kinds: Sequence[str] = ("redis",)) -> Figures:
    """The zombies numbered `first` to `first + count - 1`, with stores of `kinds` in turn."""
    try:
        return asyncio.run(_side_by_side(first, count, kinds))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


CAMPAIGN: Final = Campaign(
    name="zombies",
    counts="zombies",
    says="a worker is stopped (SIGSTOP) beyond its lease and its session, another one finishes, then it goes on",
    scenarios=(33, 35, 36, 38),
    in_test=7,
    target=200,
    batch=14,
    run=run,
)
