"""FastStream applications that die at named points: on a real broker, a real Redis and a real database.

Messages reach the crash points in an order that depends on the shape from `tests.crashes.subscribing`.  A trial uses
a shape and a kind of database; it starts three applications that each die at a point, and a last one that does not.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from integr8s_idem import IdempotencyStatus
from integr8s_idem.testing.crash_points import CrashPoint
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.crashes.forks import ForkedWorker, ForkServer
from tests.crashes.ground import Servers, Topics, open_servers
from tests.crashes.jobs import Job
from tests.crashes.judging import log_tail
from tests.crashes.stores import open_database
from tests.crashes.subscribing import SHAPES, Shape
from tests.crashes.tills import TillOrder, allowed, attempts_of, concurrent_trials, judge_rows, repeats_in
from tests.crashes.transacting import tables

MODULE: Final = "tests.crashes.subscribing"
KINDS: Final = ("sqlite", "postgresql")
CRASHES: Final = 3
JOBS: Final = 4
"""New jobs for each application."""
COPIES: Final = 2
"""Duplicates of earlier jobs for each application."""
LEASE: Final = 2.5
"""Seconds; long enough that only crashes lose a lease, even on a busy machine."""
PATIENCE: Final = 60.0
"""Seconds after which an application is considered stuck."""


def _named(*names: str) -> tuple[CrashPoint, ...]:
    return tuple(CrashPoint(name) for name in names)


RESERVE: Final = _named("before_reserve", "in_reserve", "after_reserve", "before_handler")
EFFECT: Final = _named("in_handler_before_effect", "in_handler_after_effect")
COMMIT: Final = _named("before_transaction_commit", "in_transaction_commit", "after_transaction_commit")
PUBLISH: Final = _named("before_publish", "after_publish")
COMPLETE: Final = _named("before_complete", "in_complete", "after_complete")
OFFSET: Final = _named("before_commit", "in_commit", "after_commit")


def ordered_points(shape: Shape) -> tuple[CrashPoint, ...]:
    """Return all points, in the order in which a message reaches them."""
    publishes_first = shape.handler_publishes and not shape.handler_commits
    middle = (*PUBLISH, *COMMIT) if publishes_first else (*COMMIT, *PUBLISH)
    return (*RESERVE, *EFFECT, *middle, *COMPLETE, *OFFSET)


POINTS: Final = ordered_points(Shape())


class Trial:
    """An application and its successors."""

    def __init__(
        self,
        servers: Servers,
        fork_server: ForkServer,
        name: str,
        shape: str,
        kind: str,
        *,
        partitions: int,
        **changes: Any,
    ) -> None:
        """`changes`: overrides of the order."""
        self.servers = servers
        self.figures = Figures(kills=0, lost=0, repeats=0)
        self._fork_server = fork_server
        self._kind = kind
        self._partitions = partitions
        self._shape = SHAPES[shape]
        self.folder = servers.folder / name
        self._repeatable = 0
        self.order = TillOrder(
            bootstrap=servers.broker.bootstrap,
            store=servers.redis_settings,
            prefix=f"{name}.",
            folder=str(self.folder),
            lease=LEASE,
            shape=shape,
            **changes,
        )

    @asynccontextmanager
    async def resources(self) -> AsyncIterator[Topics]:
        """Provide topics, folder and database."""
        self.folder.mkdir()
        name = self.order.key_prefix.replace("-", "_")
        async with (
            open_database(self.servers.homes[self._kind], name, self.folder) as database,
            self.servers.topic_set(self.order.prefix, self._partitions) as topics,
        ):
            async with database.store.engine.begin() as connection:
                await connection.run_sync(tables.create_all)
            self.order = replace(self.order, database=database.url)
            yield topics

    async def crash(self, topics: Topics, point: CrashPoint, occurrence: int = 1) -> bool:
        """Run the application until it dies at `point` or all messages are settled, and return whether it died.

        Raises:
            ViolationError: It is stuck, or exited with an unexpected status.
        """
        order = replace(self.order, point=point.value, occurrence=occurrence)
        status = await self.run_until_settled(topics, await self._fork_server.start(order))
        if status == -signal.SIGKILL:
            self.figures.update({"kills": 1, f"kills:{point.value}": 1})
            self._repeatable += self._repeats_after(point, topics)
            return True
        self.figures.update({"not_reached": 1})
        return False

    def _repeats_after(self, point: CrashPoint, topics: Topics) -> int:
        """Return the maximum number of repeated rows after a crash at `point`."""
        if not repeats_in(ordered_points(self._shape), point):
            return 0
        return len(set(topics.published)) if self._shape.batch else 1

    async def settle(self, topics: Topics) -> None:
        """Run the last application."""
        await self.run_until_settled(topics, await self._fork_server.start(self.order))

    async def run_until_settled(self, topics: Topics, worker: ForkedWorker) -> int:
        """Wait until all messages are settled or `worker` has exited, and return its exit status.

        Raises:
            ViolationError: It is stuck, or exited with a status other than 0 and SIGKILL.
        """
        order, give_up_at = worker.order, time.monotonic() + PATIENCE
        while worker.running and not await topics.settled(order.group):
            if time.monotonic() > give_up_at:
                progress = await topics.progress(order.group)
                raise ViolationError(f"{order.point}: committed {progress}:\n{log_tail(self.folder)}")
            await asyncio.wait({worker.ended}, timeout=0.15)
        status = await self._stop(worker)
        if status not in (0, -signal.SIGKILL):
            raise ViolationError(f"{order.point}: exited with status {status}:\n{log_tail(self.folder)}")
        return status

    async def _stop(self, worker: ForkedWorker) -> int:
        if not worker.running:
            return await worker.ended
        try:
            return await worker.end(signal.SIGTERM)
        except TimeoutError:
            raise ViolationError(f"the application does not exit:\n{log_tail(self.folder)}") from None

    async def verdict(self, topics: Topics) -> dict[str, list[int]]:
        """Check the results, and return the attempts that wrote a row, by work.

        Raises:
            ViolationError: Work was lost, repeated without a reason, answered under several ids, or is stuck.
        """
        rows = await attempts_of(self.order.database)
        self.figures.update(judge_rows(rows, topics.published, repeatable=self._repeatable))
        await self._judge_answers(topics)
        records = [record async for record in self.servers.store.scan(f"{self.order.key_prefix}:")]
        statuses = {record.status for record in records}
        if statuses != {IdempotencyStatus.COMPLETED} or len(records) != len(rows):
            raise ViolationError(f"{len(rows)} jobs are done, but the records are {records}")
        self.figures["completed"] += len(records)
        return rows

    async def _judge_answers(self, topics: Topics) -> None:
        ids: defaultdict[str, set[str]] = defaultdict(set)
        answers = await topics.messages("job_done")
        for message in answers:
            receipt = json.loads(message.value)
            named = dict(message.headers).get("event_id", b"").decode()
            ids[receipt["work"]].add(receipt["event_id"] if self._shape.batch else named)
        unnamed = [work for work, found in ids.items() if "" in found]
        many = {work: found for work, found in ids.items() if len(found) > 1}
        missing = sorted(set(topics.published) - ids.keys())
        if unnamed or many or missing or len(set().union(*ids.values())) != len(ids):
            raise ViolationError(f"not answered: {missing}; answered without an id: {unnamed}; several ids: {many}")
        self.figures["answers"] += len(answers)


async def crash_once(
    servers: Servers, fork_server: ForkServer, shape: str, point: CrashPoint
) -> tuple[list[int], Figures]:
    """Crash an application at `point` during one job, publish a duplicate of the job, and start a successor.

    Returns:
        The attempts that wrote a row, and the figures.

    Raises:
        ViolationError: A promise was broken, or the application did not reach `point`.
    """
    trial = Trial(servers, fork_server, f"{shape}-{point.value}".replace("_", "-"), shape, "sqlite", partitions=1)
    async with trial.resources() as topics:
        job = Job(work="one")
        await topics.publish([job])
        if not await trial.crash(topics, point):
            raise ViolationError(f"{point.value} of {shape} was not reached")
        await topics.publish([job])
        await trial.settle(topics)
        attempts = (await trial.verdict(topics))["one"]
    points = ordered_points(SHAPES[shape])
    # A batch of one message is a run like any other.
    if attempts not in allowed(points, point):
        raise ViolationError(f"after a crash at {point.value} of {shape}: rows were written by the attempts {attempts}")
    return attempts, trial.figures


def points_of(number: int) -> Sequence[CrashPoint]:
    """Return the crash points of a trial."""
    return random.Random(number).sample(POINTS, CRASHES)


async def one_trial(servers: Servers, fork_server: ForkServer, number: int) -> Figures:
    """Run all applications of a trial and check the results.

    Raises:
        ViolationError: A promise was broken.
    """
    rng = random.Random(number)
    shape = list(SHAPES)[number % len(SHAPES)]
    kind = KINDS[(number + number // len(SHAPES)) % len(KINDS)]
    trial = Trial(servers, fork_server, f"fs{number}", shape, kind, partitions=2)
    jobs: list[Job] = []
    async with trial.resources() as topics:
        for turn, point in enumerate([*points_of(number), None]):
            new = [Job(work=f"{turn}.{index}", aggregate_id=f"{index}") for index in range(JOBS)]
            await topics.publish([*new, *rng.sample(jobs, min(COPIES, len(jobs)))])
            jobs += new
            if point is None:
                await trial.settle(topics)
            else:
                await trial.crash(topics, point, 1 if SHAPES[shape].batch else rng.randint(1, 3))
        await trial.verdict(topics)
    trial.figures.update({"trials": 1, f"kills:{shape}": trial.figures["kills"]})
    return trial.figures


async def run_on(servers: Servers, fork_server: ForkServer, numbers: range) -> Figures:
    """Run the trials on existing servers, and return the sum of their figures.

    Raises:
        ViolationError: A promise was broken; the message names the trial.
    """
    return await concurrent_trials(numbers, lambda number: one_trial(servers, fork_server, number))


def run(first: int, count: int) -> Figures:
    """Run the trials numbered `first` to `first + count - 1`."""

    async def trials() -> Figures:
        async with open_servers(kinds=KINDS) as servers, ForkServer(MODULE) as fork_server:
            return await run_on(servers, fork_server, range(first, first + count))

    return asyncio.run(trials())


CAMPAIGN = Campaign(
    name="faststream-crash-points",
    counts="kills",
    says="a FastStream application with Dishka kills itself with SIGKILL at a named point, on a real Redis, a real "
    "Kafka and a real PostgreSQL or SQLite",
    scenarios=(117,),
    in_test=len(SHAPES),
    at_least=2 * len(SHAPES),
    target=300,
    batch=2 * len(SHAPES) * len(KINDS),
    run=run,
)
