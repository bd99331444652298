"""Workers that die at named crash points, on a real broker and a real Redis.

A trial runs four workers, one after the other.  Before each of them, new jobs of every kind and duplicates of earlier
jobs are published.  The first three die by SIGKILL at points that are derived from the trial's number; the last one
must settle everything.  Between two workers, the completed records are read from the store: none of them may run again.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, Protocol

from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.testing.crash_points import CrashPoint
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.crashes.forks import ForkedWorker, ForkServer
from tests.crashes.ground import Servers, Topics, open_servers
from tests.crashes.jobs import Job, jobs_of_each_kind
from tests.crashes.judging import CompletedKeys, judge, log_tail
from tests.crashes.orders import Order
from tests.support.effects import Effects

CRASHES: Final = 3
"""Workers of a trial that die: their points are three neighbors in a shuffled list of all points."""

COPIES: Final = 3
"""Duplicates of earlier jobs that are published before each worker starts."""

TRIES: Final = 3
"""Attempts to reach one point: another worker may take the jobs that lead to it."""

CONCURRENT_TRIALS: Final = 16
"""Trials that run concurrently; they mostly wait for sessions and leases to end."""

PATIENCE: Final = 60.0
"""Seconds after which a worker is considered stuck."""

DRAIN_POINTS: Final = frozenset({CrashPoint.IN_DRAIN, CrashPoint.BEFORE_LEAVE, CrashPoint.AFTER_LEAVE})
REVOKE_POINTS: Final = frozenset({CrashPoint.BEFORE_REVOKE, CrashPoint.AFTER_REVOKE})
FREQUENT_POINTS: Final = frozenset(
    CrashPoint(name)
    for name in (
        *("before_reserve", "in_reserve", "after_reserve", "before_complete", "in_complete", "after_complete"),
        *("before_handler", "in_handler_before_effect", "in_handler_after_effect", "after_handler"),
    )
)
"""Points that every worker reaches at least three times, however its messages are batched."""

TRANSACTION_POINTS: Final = frozenset(
    CrashPoint(name)
    for name in (
        *("before_outcome", "in_outcome", "after_outcome", "before_claim", "in_claim", "after_claim"),
        *("before_transaction_commit", "in_transaction_commit", "after_transaction_commit"),
        *("before_send", "after_send", "before_forget", "in_forget", "after_forget"),
    )
)
"""Points reached only by transactional handlers and the relay."""

REQUEST_POINTS: Final = frozenset(CrashPoint(name) for name in ("before_response", "in_response", "after_response"))
"""Points reached only by HTTP applications."""

POINTS: Final = tuple(point for point in CrashPoint if point not in TRANSACTION_POINTS | REQUEST_POINTS)

ORDERINGS: Final[tuple[Literal["partition", "key", "none"], ...]] = ("partition", "key", "none")


def run(first: int, count: int) -> Figures:
    """Run the trials numbered `first` to `first + count - 1`."""
    return asyncio.run(run_trials(range(first, first + count), Trial, CONCURRENT_TRIALS))


class Runnable(Protocol):
    """A trial."""

    async def run(self) -> Figures: ...


async def run_trials(
    numbers: Iterable[int],
    trial: Callable[[Servers, ForkServer, int], Runnable],
    side_by_side: int,
    *,
    kinds: Iterable[str] = (),
    module: str = "tests.crashes.worker",
) -> Figures:
    """Run the trials on new servers, including those for stores of `kinds`, and return the sum of their figures.

    `module` defines the workers.

    Raises:
        ViolationError: A promise was broken; the message names the trial.
    """
    async with open_servers(kinds=kinds) as servers, ForkServer(module) as fork_server:
        return await run_on(servers, fork_server, numbers, trial, side_by_side)


async def run_on(
    servers: Servers,
    fork_server: ForkServer,
    numbers: Iterable[int],
    trial: Callable[[Servers, ForkServer, int], Runnable],
    side_by_side: int,
) -> Figures:
    """Run the trials on existing servers."""
    figures = Figures(kills=0, lost=0, repeats=0, fenced_repeats=0)
    slots = asyncio.Semaphore(side_by_side)

    async def one(number: int) -> None:
        async with slots:
            try:
                figures.update(await trial(servers, fork_server, number).run())
            except AssertionError as error:
                raise ViolationError(f"trial {number}: {error}") from error

    try:
        async with asyncio.TaskGroup() as group:
            for number in numbers:
                group.create_task(one(number))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return figures


def points_of(number: int) -> list[CrashPoint]:
    """Return the crash points of a trial; eleven trials, starting at a multiple of eleven, cover each point once."""
    points = list(POINTS)
    trials = len(points) // CRASHES
    random.Random(number // trials).shuffle(points)
    start = number % trials * CRASHES
    return points[start : start + CRASHES]


class Trial:
    """Workers that die at crash points, and a last one that settles everything."""

    def __init__(self, servers: Servers, fork_server: ForkServer, number: int) -> None:
        self._servers = servers
        self._fork_server = fork_server
        self._number = number
        self._rng = random.Random(number)
        self._folder: Path = servers.folder / f"trial-{number}"
        self._effects = Effects(self._folder)
        self._order = Order(
            bootstrap=servers.broker.bootstrap,
            store=servers.redis_settings,
            prefix=f"crash{number}.",
            folder=str(self._folder),
            ordering=self._rng.choice(ORDERINGS),
        )
        self._slowness = self._order.lease
        """A slow job takes about half of this many seconds."""
        self._patience = PATIENCE
        self._points = points_of(number)
        self._store: IdempotencyRepository = servers.store
        self._jobs: list[Job] = []
        """Jobs published so far."""
        self._figures = Figures(trials=1)

    async def run(self) -> Figures:
        """Run all workers and check the results.

        Raises:
            ViolationError: A promise was broken.
        """
        self._folder.mkdir()
        self._effects.prepare()
        async with self._resources(), self._servers.topic_set(self._order.prefix) as topics:
            for crash, point in enumerate(self._points):
                await self._crash(topics, f"{self._number}.{crash}", point)
            seen = self._completed_so_far()
            await self._publish(topics, f"{self._number}.last")
            await self._settle_all(topics)
            await self._check(topics)
            self._figures["completed_before_the_end"] += seen
            self._figures.update(await self._verdict(topics))
        return self._figures

    async def _crash(self, topics: Topics, name: str, point: CrashPoint) -> None:
        """Start workers until one dies at `point`."""
        for attempt in range(TRIES):
            await self._publish(topics, f"{name}.{attempt}")
            died = await self._run_worker(topics, point)
            await self._check(topics)
            if died:
                return

    @asynccontextmanager
    async def _resources(self) -> AsyncIterator[None]:
        """Provide what the trial needs in addition to its topics."""
        self._completed = CompletedKeys(self._store, self._effects, f"{self._order.key_prefix}:")
        yield

    def _completed_so_far(self) -> int:
        return len(self._completed)

    async def _check(self, topics: Topics) -> None:
        """Check the intermediate state; no worker is running."""
        await self._completed.check(no_worker_running=True)

    async def _verdict(self, topics: Topics) -> Figures:
        """Check the final state."""
        return await judge(topics, self._effects, self._order.key_prefix, self._store)

    async def _finished(self, topics: Topics) -> bool:
        """Return whether all work is settled."""
        return await topics.settled(self._order.group)

    async def _publish(self, topics: Topics, name: str) -> None:
        new = list(jobs_of_each_kind(self._rng, name, self._slowness))
        await topics.publish([*new, *self._rng.sample(self._jobs, min(COPIES, len(self._jobs)))])
        self._jobs += new

    async def _run_worker(self, topics: Topics, point: CrashPoint) -> bool:
        """Run a worker until it dies at `point` or all work is settled, and return whether it died."""
        async with AsyncExitStack() as stack:
            worker = await self._start(point, self._occurrence(point))
            if self._has_companion(point):
                stack.push_async_callback(self._stop, await self._start())
            if point in DRAIN_POINTS | REVOKE_POINTS:
                await self._until(lambda: self._has_started_work(worker), worker)
            if point in DRAIN_POINTS:
                worker.send_signal(signal.SIGTERM)
            elif point in REVOKE_POINTS:
                stack.push_async_callback(self._stop, await self._start())
            await self._until_finished(topics, worker)
            if worker.running:
                await self._stop(worker)
            status = await worker.ended
        if status == -signal.SIGKILL:
            self._figures.update({"kills": 1, f"kills:{point.value}": 1})
            return True
        if status == 0:
            self._figures.update({"not_reached": 1, f"not_reached:{point.value}": 1})
            return False
        raise ViolationError(f"a worker exited with status {status}:\n{log_tail(self._folder)}")

    def _has_companion(self, point: CrashPoint) -> bool:
        """Return whether a second worker, which does not die, runs from the start."""
        return False

    def _occurrence(self, point: CrashPoint) -> int:
        occurrence = self._rng.randint(1, 3)
        return occurrence if point in FREQUENT_POINTS else 1

    async def _settle_all(self, topics: Topics) -> None:
        worker = await self._start()
        began = time.monotonic()
        await self._until_finished(topics, worker)
        self._figures["settled_after_ms"] += int((time.monotonic() - began) * 1000)
        if await self._stop(worker) != 0:
            raise ViolationError(f"the last worker did not exit cleanly:\n{log_tail(self._folder)}")

    async def _start(self, point: CrashPoint | None = None, occurrence: int = 1) -> ForkedWorker:
        point_name = point.value if point is not None else ""
        return await self._fork_server.start(replace(self._order, point=point_name, occurrence=occurrence))

    async def _stop(self, worker: ForkedWorker) -> int:
        try:
            return await worker.end(signal.SIGTERM)
        except TimeoutError:
            raise ViolationError(f"a worker does not drain:\n{log_tail(self._folder)}") from None

    async def _has_started_work(self, worker: ForkedWorker) -> bool:
        pid = await worker.pid
        return any(line.pid == pid for line in self._effects.lines())

    async def _until_finished(self, topics: Topics, worker: ForkedWorker) -> None:
        try:
            await self._until(lambda: self._finished(topics), worker)
        except ViolationError as error:
            raise ViolationError(f"committed: {await topics.progress(self._order.group)}; {error}") from None

    async def _until(self, condition: Callable[[], Awaitable[bool]], worker: ForkedWorker) -> None:
        """Wait until `condition` holds or `worker` has exited."""
        give_up_at = time.monotonic() + self._patience
        for _ in _forever():
            if await condition() or not worker.running:
                return
            if time.monotonic() > give_up_at:
                raise ViolationError(f"stuck for {self._patience:g} s:\n{log_tail(self._folder)}")
            await asyncio.wait({worker.ended}, timeout=0.15)


def _forever() -> Iterator[None]:
    while True:
        yield


CAMPAIGN = Campaign(
    name="crash-points",
    counts="kills",
    says="a process kills itself with SIGKILL at a named point, on a real Redis and a real Kafka",
    scenarios=(17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27),
    in_test=33,
    at_least=88,
    target=5_000,
    batch=66,
    run=run,
)
