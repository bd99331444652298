"""FastStream applications that die at named points: on a real broker, a real Redis and a real database.

Each shape of `tests.crashes.subscribing` has its own way: the order in which its messages pass by the points.  A trial
of the campaign has a shape, a kind of database and three lives that each end at a point, and a last one.
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
from tests.crashes.forks import Forked, Nursery
from tests.crashes.ground import Ground, Topics, open_ground
from tests.crashes.jobs import Job
from tests.crashes.judging import last_words
from tests.crashes.stores import open_database
from tests.crashes.subscribing import SHAPES, Shape
from tests.crashes.tills import TillOrder, allowed, attempts_of, judge_rows, repeats_in, trials_side_by_side
from tests.crashes.transacting import tables

MODULE: Final = "tests.crashes.subscribing"
KINDS: Final = ("sqlite", "postgresql")
LIVES: Final = 3
JOBS: Final = 4
"""New ones of each life."""
AGAIN: Final = 2
"""Copies of earlier ones that come with each life."""
LEASE: Final = 2.5
"""Seconds; on a busy machine, too, it is to be lost by deaths alone."""
PATIENCE: Final = 60.0
"""Seconds for a life; a trial that takes longer is stuck."""


def _named(*names: str) -> tuple[CrashPoint, ...]:
    return tuple(CrashPoint(name) for name in names)


RESERVE: Final = _named("before_reserve", "in_reserve", "after_reserve", "before_handler")
EFFECT: Final = _named("in_handler_before_effect", "in_handler_after_effect")
COMMIT: Final = _named("before_transaction_commit", "in_transaction_commit", "after_transaction_commit")
PUBLISH: Final = _named("before_publish", "after_publish")
COMPLETE: Final = _named("before_complete", "in_complete", "after_complete")
OFFSET: Final = _named("before_commit", "in_commit", "after_commit")


def way_of(shape: Shape) -> tuple[CrashPoint, ...]:
    """All points, in the order in which a message passes by them."""
    publishes_first = shape.handler_publishes and not shape.handler_commits
    middle = (*PUBLISH, *COMMIT) if publishes_first else (*COMMIT, *PUBLISH)
    return (*RESERVE, *EFFECT, *middle, *COMPLETE, *OFFSET)


POINTS: Final = way_of(Shape())


class Trial:
    """One application and its successors."""

    def __init__(
        self, ground: Ground, nursery: Nursery, name: str, shape: str, kind: str, *, partitions: int, **changes: Any
    ) -> None:
        """`changes`: to its order."""
        self.ground = ground
        self.figures = Figures(kills=0, lost=0, repeats=0)
        self._nursery = nursery
        self._kind = kind
        self._partitions = partitions
        self._shape = SHAPES[shape]
        self.folder = ground.folder / name
        self._repeatable = 0
        self.order = TillOrder(
            bootstrap=ground.broker.bootstrap,
            store=ground.redis_settings,
            prefix=f"{name}.",
            folder=str(self.folder),
            lease=LEASE,
            shape=shape,
            **changes,
        )

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Topics]:
        """Its topics; with what else it needs."""
        self.folder.mkdir()
        name = self.order.key_prefix.replace("-", "_")
        async with (
            open_database(self.ground.homes[self._kind], name, self.folder) as database,
            self.ground.topic_set(self.order.prefix, self._partitions) as topics,
        ):
            async with database.store.engine.begin() as connection:
                await connection.run_sync(tables.create_all)
            self.order = replace(self.order, database=database.url)
            yield topics

    async def die(self, topics: Topics, point: CrashPoint, occurrence: int = 1) -> bool:
        """A life that ends at `point`, or when all is settled; whether it died.

        Raises:
            ViolationError: It is stuck, or ended otherwise.
        """
        order = replace(self.order, point=point.value, occurrence=occurrence)
        status = await self.live(topics, await self._nursery.start(order))
        if status == -signal.SIGKILL:
            self.figures.update({"kills": 1, f"kills:{point.value}": 1})
            self._repeatable += self._repeats_after(point, topics)
            return True
        self.figures.update({"not_reached": 1})
        return False

    def _repeats_after(self, point: CrashPoint, topics: Topics) -> int:
        """How many rows at most."""
        if not repeats_in(way_of(self._shape), point):
            return 0
        return len(set(topics.published)) if self._shape.batch else 1

    async def settle(self, topics: Topics) -> None:
        """The last life."""
        await self.live(topics, await self._nursery.start(self.order))

    async def live(self, topics: Topics, worker: Forked) -> int:
        """The life of `worker`, until all is settled; its exit status.

        Raises:
            ViolationError: It is stuck, or ended otherwise than by a death or well.
        """
        order, give_up_at = worker.order, time.monotonic() + PATIENCE
        while worker.running and not await topics.settled(order.group):
            if time.monotonic() > give_up_at:
                behind = await topics.behind(order.group)
                raise ViolationError(f"{order.point}: committed {behind}:\n{last_words(self.folder)}")
            await asyncio.wait({worker.ended}, timeout=0.15)
        status = await self._ended(worker)
        if status not in (0, -signal.SIGKILL):
            raise ViolationError(f"{order.point}: ended with {status}:\n{last_words(self.folder)}")
        return status

    async def _ended(self, worker: Forked) -> int:
        if not worker.running:
            return await worker.ended
        try:
            return await worker.end(signal.SIGTERM)
        except TimeoutError:
            raise ViolationError(f"does not stop:\n{last_words(self.folder)}") from None

    async def verdict(self, topics: Topics) -> dict[str, list[int]]:
        """By work, the attempts whose row is there, if all is as it must be.

        Raises:
            ViolationError: Something was lost, repeated for no reason, answered under several ids, or is stuck.
        """
        rows = await attempts_of(self.order.database)
        self.figures.update(judge_rows(rows, topics.published, repeatable=self._repeatable))
        await self._judge_answers(topics)
        records = [record async for record in self.ground.store.scan(f"{self.order.key_prefix}:")]
        statuses = {record.status for record in records}
        if statuses != {IdempotencyStatus.COMPLETED} or len(records) != len(rows):
            raise ViolationError(f"{len(rows)} jobs are done, and their records are {records}")
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
            raise ViolationError(f"no answer to {missing}; without an id {unnamed}; by several ids, or shared: {many}")
        self.figures["answers"] += len(answers)


async def lone_death(ground: Ground, nursery: Nursery, shape: str, point: CrashPoint) -> tuple[list[int], Figures]:
    """One job, one death, a copy of the job, and a successor.

    Returns:
        The attempts whose row is there, and what was counted.

    Raises:
        ViolationError: A promise was broken, or nobody died.
    """
    trial = Trial(ground, nursery, f"{shape}-{point.value}".replace("_", "-"), shape, "sqlite", partitions=1)
    async with trial.opened() as topics:
        job = Job(work="one")
        await topics.publish([job])
        if not await trial.die(topics, point):
            raise ViolationError(f"nobody died at {point.value} of {shape}")
        await topics.publish([job])
        await trial.settle(topics)
        attempts = (await trial.verdict(topics))["one"]
    way = way_of(SHAPES[shape])
    # A batch of one is a run like any other.
    if attempts not in allowed(way, point):
        raise ViolationError(f"after a death at {point.value} of {shape}: rows by the attempts {attempts}")
    return attempts, trial.figures


def points_of(number: int) -> Sequence[CrashPoint]:
    """Where the lives of a trial end."""
    return random.Random(number).sample(POINTS, LIVES)


async def one_trial(ground: Ground, nursery: Nursery, number: int) -> Figures:
    """Lives and deaths, then the verdict.

    Raises:
        ViolationError: A promise was broken.
    """
    dice = random.Random(number)
    shape = list(SHAPES)[number % len(SHAPES)]
    kind = KINDS[(number + number // len(SHAPES)) % len(KINDS)]
    trial = Trial(ground, nursery, f"fs{number}", shape, kind, partitions=2)
    jobs: list[Job] = []
    async with trial.opened() as topics:
        for life, point in enumerate([*points_of(number), None]):
            new = [Job(work=f"{life}.{place}", aggregate_id=f"{place}") for place in range(JOBS)]
            await topics.publish([*new, *dice.sample(jobs, min(AGAIN, len(jobs)))])
            jobs += new
            if point is None:
                await trial.settle(topics)
            else:
                await trial.die(topics, point, 1 if SHAPES[shape].batch else dice.randint(1, 3))
        await trial.verdict(topics)
    trial.figures.update({"trials": 1, f"kills:{shape}": trial.figures["kills"]})
    return trial.figures


async def run_on(ground: Ground, nursery: Nursery, numbers: range) -> Figures:
    """What came of all trials, on servers that are there.

    Raises:
        ViolationError: A promise was broken; it names the trial.
    """
    return await trials_side_by_side(numbers, lambda number: one_trial(ground, nursery, number))


def run(first: int, count: int) -> Figures:
    """The trials numbered `first` to `first + count - 1`."""

    async def trials() -> Figures:
        async with open_ground(kinds=KINDS) as ground, Nursery(MODULE) as nursery:
            return await run_on(ground, nursery, range(first, first + count))

    return asyncio.run(trials())


CAMPAIGN = Campaign(
    name="faststream-crash-points",
    counts="kills",
    says="a FastStream application with Dishka that killed itself by SIGKILL at a named point, on a real Redis, a real "
    "Kafka and a real PostgreSQL or SQLite",
    scenarios=(117,),
    in_test=len(SHAPES),
    at_least=2 * len(SHAPES),
    target=300,
    batch=2 * len(SHAPES) * len(KINDS),
    run=run,
)
