"""Campaign `stalled-starts`: workers are stopped while reserved events wait for their handlers.

A trial has two or three processes that share a store and do the same work through one entry point.  Handlers block
their threads.  One process after another is stopped (SIGSTOP) at a random moment and resumed later.  In some trials, no
process is stopped, but one handler blocks the event loop of its process for longer than the lease.  Most stalls outlast
the leases of the waiting events, so that another process takes them over.  Every start is written to a journal; no
handler may have started after its lease had ended, measured at the check before the call.
"""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from sqlalchemy import func, select

from integr8s_idem.stores.sql import sql_engine
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.crashes.forks import ForkedWorker, ForkServer
from tests.crashes.judging import log_tail
from tests.crashes.transacting import entries, tables
from tests.stalled_starts.entries import ENTRIES, TRANSACTIONAL
from tests.stalled_starts.journal import Journal, Lines, boot_time
from tests.stalled_starts.orders import StallOrder
from tests.stalled_starts.verdict import Stall, judge_records, judge_starts, longest_pause
from tests.support.homes import Home, at_hand, open_home, open_records

ALL: Final = ("redis", "postgresql", "sqlite", "mysql")
KINDS: Final = at_hand(*ALL)
"""Kinds of stores; the trials alternate between them."""

SQL_KINDS: Final = tuple(kind for kind in KINDS if kind != "redis")
STALL_KINDS: Final = ("long", "long", "long", "short", "blocked")
"""Kinds of stalls; the trials alternate between them."""

IN_THREADS: Final = frozenset({"decorator-plain", "confluent"})
"""Entry points whose handlers do not block an event loop."""

RENEWING: Final = tuple(entry for entry in ENTRIES if entry != TRANSACTIONAL)
"""Entry points whose leases are renewed while events wait; those of transactional handlers are not."""

CONTROL_EVERY: Final = 20
"""Every one of this many trials is a control without a stall."""

CONTROL_TRIES: Final = 3
"""Attempts of a control: a bug that starves renewals makes leases end in each of them."""

CONCURRENT_TRIALS: Final = 6
"""Trials that run concurrently; they mostly wait for leases to end."""

PATIENCE: Final = 60.0
"""Seconds after which a trial is considered stuck."""

POLL_SECONDS: Final = 0.01


@dataclass(frozen=True)
class Servers:
    """Servers that trials share, and a folder for their files."""

    homes: Mapping[str, Home]
    folder: Path

    async def prepare(self) -> None:
        """Create the tables of transactional handlers."""
        for kind, home in self.homes.items():
            if kind in SQL_KINDS and home.server is not None:
                await create_tables(home.settings(self.folder)["url"])


async def create_tables(url: str) -> None:
    """Create the tables of transactional handlers."""
    engine = sql_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(tables.create_all)
    await engine.dispose()


@contextmanager
def open_servers(kinds: Iterable[str]) -> Iterator[Servers]:
    """Start servers for these kinds of stores, and stop them at the end of the block."""
    with ExitStack() as stack:
        homes = {kind: stack.enter_context(open_home(kind)) for kind in kinds}
        yield Servers(homes, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="idem-stalls-"))))


@dataclass(frozen=True)
class Plan:
    """The parameters of a trial."""

    kind: str
    stall_kind: str
    """`long`, `short`, `blocked` or `control`."""
    order: StallOrder
    workers: int
    pauses: list[float] = field(default_factory=list)
    """Duration of each stall by a signal, in seconds."""


def plan_of(number: int) -> Plan:
    """Return the plan of a trial by its number."""
    rng = random.Random(number)
    entry, kind = _entry_and_kind(number)
    stall_kind = STALL_KINDS[number % len(STALL_KINDS)]
    if number % CONTROL_EVERY == CONTROL_EVERY - 1:
        turn = number // CONTROL_EVERY
        # Advance the kind with each entry point, and once more after a round of all entry points.
        kind = KINDS[(turn + turn // len(RENEWING)) % len(KINDS)]
        return control_of(number, RENEWING[turn % len(RENEWING)], kind)
    if stall_kind == "blocked" and entry in IN_THREADS:
        stall_kind = "long"
    lease = round(rng.uniform(1.2 if kind == "redis" else 1.6, 2.0), 2)
    workers = rng.choice((2, 2, 3))
    order = StallOrder(
        bootstrap="",
        store={},
        prefix=f"stall{number}.",
        folder="",
        entry=entry,
        lease=lease,
        ordering=rng.choice(("none", "key")),
        works=rng.randint(16, 40),
        concurrency=rng.choice((2, 4, 8, 16, 32, 64)),
        seconds=round(rng.uniform(0.005, 0.1), 3),
    )
    if stall_kind == "blocked":
        blocked_seconds = lease * rng.uniform(1.2, 1.6)
        order = replace(order, blocked_work=rng.randrange(8), blocked_seconds=blocked_seconds)
        return Plan(kind, stall_kind, order, workers)
    least, most = (1.2, 2.0) if stall_kind == "long" else (0.1, 0.3)
    return Plan(kind, stall_kind, order, workers, [lease * rng.uniform(least, most) for _ in range(workers - 1)])


def control_of(number: int, entry: str, kind: str) -> Plan:
    """Return a trial without a stall: handlers are slow, and events wait for several leases."""
    order = StallOrder(
        bootstrap="",
        store={},
        prefix=f"control{number}.",
        folder="",
        entry=entry,
        lease=1.6,
        ordering="none",
        works=64,
        concurrency=64,
        seconds=0.05,
    )
    return Plan(kind, "control", order, 2)


def _entry_and_kind(number: int) -> tuple[str, str]:
    names = list(ENTRIES)
    entry, turn = names[number % len(names)], number // len(names)
    kinds = SQL_KINDS if entry == TRANSACTIONAL else KINDS
    return entry, kinds[turn % len(kinds)]


class Trial:
    """Processes that stall while events wait for their handlers."""

    def __init__(self, servers: Servers, fork_server: ForkServer, number: int, plan: Plan) -> None:
        self._fork_server = fork_server
        self._rng = random.Random(f"moments of {number}")
        self.plan = plan
        self._folder = servers.folder / f"trial-{plan.order.prefix}{number}"
        self._folder.mkdir()
        self._settings = servers.homes[self.plan.kind].settings(self._folder)
        self._order = replace(
            self.plan.order, store={**self._settings, "timeout_seconds": 0.5}, folder=str(self._folder)
        )
        self._journal = Journal(self._folder)
        self._workers: list[ForkedWorker] = []
        self._stalls: list[Stall] = []

    async def run(self) -> Figures:
        """Run and stall the workers, and check the results.

        Raises:
            ViolationError: A handler started after its lease had ended, or work was lost.
        """
        if self._order.entry == TRANSACTIONAL and self.plan.kind == "sqlite":
            await create_tables(f"sqlite+aiosqlite:///{self._settings['path']}")
        try:
            async with asyncio.timeout(PATIENCE):
                await self._run_workers()
        except TimeoutError:
            raise ViolationError(f"{self._name}: stuck\n{log_tail(self._folder)}") from None
        finally:
            for worker in self._workers:
                if worker.running:
                    await worker.end(signal.SIGKILL)
        try:
            return await self._judge()
        except ViolationError as error:
            raise ViolationError(f"{self._name}: {error}") from error

    @property
    def _name(self) -> str:
        return f"{self._order.entry} on {self.plan.kind}, {self.plan.stall_kind}"

    async def _run_workers(self) -> None:
        for index in range(self.plan.workers):
            self._workers.append(await self._fork_server.start(replace(self._order, is_reversed=index % 2 == 1)))
            if self.plan.kind == "sqlite":
                # Opening the file writes to it, which would block while a stopped process has locked it.
                await self._until(lambda lines: len(lines.ready) == len(self._workers), self._workers[-1])
        for worker, seconds in zip(self._workers, self.plan.pauses, strict=False):
            await self._stall(worker, seconds)
        statuses = await asyncio.gather(*(asyncio.shield(worker.ended) for worker in self._workers))
        if any(statuses):
            raise ViolationError(f"{self._name}: workers exited with the statuses {statuses}\n{log_tail(self._folder)}")

    async def _stall(self, worker: ForkedWorker, seconds: float) -> None:
        pid, starts = worker.pid.result(), self._rng.randint(0, 4)
        await self._until(lambda lines: pid in lines.ready and lines.starts_of(pid) >= starts, worker)
        await asyncio.sleep(self._rng.uniform(0, 2 * self._order.seconds))
        if not worker.running:
            return
        begin = boot_time()
        worker.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        worker.send_signal(signal.SIGCONT)
        self._stalls.append(Stall(pid, begin, boot_time() + POLL_SECONDS))

    async def _until(self, condition: Callable[[Lines], bool], worker: ForkedWorker) -> None:
        while worker.running and not condition(self._journal.read()):  # noqa: ASYNC110  # files send no notifications
            await asyncio.sleep(POLL_SECONDS)

    async def _judge(self) -> Figures:
        lines = self._journal.read()
        if self.plan.stall_kind == "blocked":
            self._stalls = [
                Stall(start.pid, start.at, start.at + self._order.blocked_seconds)
                for start in lines.starts
                if start.attempt == 1 and start.work == f"work-{self._order.blocked_work}"
            ]
        # A blocked event loop excuses no late start: nothing can run between a check and the call.
        figures = judge_starts(lines, self._stalls if self.plan.pauses else [])
        keys = list({start.key for start in lines.starts})
        async with open_records({**self._settings, "timeout_seconds": 30}, self._order.key_prefix) as store:
            records = [record for record in await store.get(keys) if record is not None]
        figures.update(judge_records(lines, self._order.names, records))
        if self._order.entry == TRANSACTIONAL:
            await self._judge_rows(keys)
        if self.plan.stall_kind == "control" and figures["takeovers"]:
            pause = longest_pause(lines)
            raise ViolationError(
                f"{figures['takeovers']} takeovers although no process stalled (longest pause {pause:.2f} s)"
            )
        return self._labeled(figures)

    async def _judge_rows(self, keys: list[str]) -> None:
        """Check that every transactional handler has written one row."""
        url = self._settings.get("url") or f"sqlite+aiosqlite:///{self._settings['path']}"
        engine = sql_engine(url)
        async with engine.connect() as connection:
            counted = (
                select(entries.c.key, func.count().label("number"))
                .where(entries.c.key.in_(keys))
                .group_by(entries.c.key)
            )
            rows = {row.key: row.number for row in await connection.execute(counted)}
        await engine.dispose()
        wrong = {key: rows.get(key, 0) for key in keys if rows.get(key, 0) != 1}
        if wrong:
            raise ViolationError(f"rows of transactional handlers by key: {wrong}")

    def _labeled(self, figures: Figures) -> Figures:
        plan, entry = self.plan, self._order.entry
        figures["stalls"] = len(self._stalls)
        figures[f"stalls_{plan.stall_kind}"] = len(self._stalls)
        figures["controls"] = int(plan.stall_kind == "control")
        for name in ("stalls", "stalls_between", "takeovers", "starts_prevented", "violations"):
            figures[f"{name}:{entry}"] = figures[f"{name}:{plan.kind}"] = figures[name]
        figures[f"takeovers_{plan.stall_kind}"] = figures["takeovers"]
        return Figures({name: count for name, count in figures.items() if count or name in ALWAYS})


ALWAYS: Final = frozenset({"stalls", "lost", "violations", "stalls_between"})
"""Figures that are recorded even if they are zero."""


async def run_trials(servers: Servers, numbers: Iterable[int], plans: Mapping[int, Plan] | None = None) -> Figures:
    """Run these trials, several at a time.

    Raises:
        ViolationError: A promise was broken; the message names the trial.
    """
    figures, slots = Figures(stalls=0, lost=0, violations=0), asyncio.Semaphore(CONCURRENT_TRIALS)
    planned = {number: (plans or {}).get(number) or plan_of(number) for number in numbers}

    async def one(fork_server: ForkServer, number: int) -> None:
        async with slots:
            try:
                figures.update(await Trial(servers, fork_server, number, planned[number]).run())
            except AssertionError as error:
                raise ViolationError(f"trial {number}: {error}") from error

    await servers.prepare()
    async with ForkServer("tests.stalled_starts.worker") as fork_server:
        try:
            async with asyncio.TaskGroup() as group:
                for number, plan in planned.items():
                    if plan.stall_kind != "control":
                        group.create_task(one(fork_server, number))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        # Run controls one after the other, with retries: a busy machine may stall a process for a whole lease.
        for number, plan in planned.items():
            for attempt in range(CONTROL_TRIES) if plan.stall_kind == "control" else ():
                order = replace(plan.order, prefix=f"{plan.order.prefix}{attempt}.")
                planned[number] = replace(plan, order=order)
                try:
                    await one(fork_server, number)
                    break
                except ViolationError:
                    if attempt == CONTROL_TRIES - 1:
                        raise
    return figures


def run(first: int, count: int) -> Figures:
    """Run the trials numbered `first` to `first + count - 1`."""
    with open_servers(KINDS) as servers:
        return asyncio.run(run_trials(servers, range(first, first + count)))


CAMPAIGN = Campaign(
    name="stalled-starts",
    counts="stalls",
    says="a process is stopped (SIGSTOP), or its event loop is blocked by a handler, while reserved events wait for "
    "their handlers; by every entry point, on a real Redis, PostgreSQL, SQLite or MariaDB",
    scenarios=(33, 34, 37, 121),
    in_test=12,
    target=1_000,
    batch=len(ENTRIES) * len(STALL_KINDS),
    run=run,
)
