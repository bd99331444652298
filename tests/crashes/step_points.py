"""A handler of five steps whose process dies at any boundary of a step, on a real broker and a real store.

A trial is one job, which comes again with each life.  The first life ends by SIGKILL at the boundary that the trial's
number gives it; every second trial has another death, at some boundary from there on; the last life must settle all.
What the steps have done is told by a journal outside of all processes.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from integr8s_idem import IdempotencyRecord, IdempotencyStatus
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.crashes.forks import Nursery
from tests.crashes.ground import Ground, Topics
from tests.crashes.jobs import Job
from tests.crashes.judging import judge_letters, last_words
from tests.crashes.points import Trial, run_trials
from tests.crashes.step_judging import Boundary, JobStory
from tests.crashes.stepping import BOUNDARIES, StepJournal
from tests.support.homes import open_records
from tests.support.workers import header

SIDE_BY_SIDE: Final = 16

LEASE: Final = 3.0
"""Seconds.  A run whose lease is lost since the machine is busy has no death, and shows less."""
STORE_TIMEOUT: Final = 0.9

REDIS: Final = "redis"
"""That of the ground."""


def boundaries_of(number: int) -> list[Boundary]:
    """Where the lives of a trial end; as many trials in a row as there are boundaries have each once as the first."""
    dice = random.Random(number)
    row = list(BOUNDARIES)
    random.Random(number // len(row)).shuffle(row)
    first = row[number % len(row)]
    behind = BOUNDARIES[BOUNDARIES.index(first) :]
    return [first, dice.choice(behind)] if dice.random() < 0.5 else [first]


class StepsTrial(Trial):
    """One job."""

    def __init__(self, ground: Ground, nursery: Nursery, number: int, kinds: Sequence[str] = (REDIS,)) -> None:
        super().__init__(ground, nursery, number)
        self._kind = kinds[number % len(kinds)]
        self._order = replace(self._order, stepping=True, lease=LEASE)
        self._boundaries = boundaries_of(number)
        self._asks = self._dice.random() < 0.5
        self._journal = StepJournal(self._folder)
        self._deaths: list[Boundary] = []

    async def run(self) -> Figures:
        """Lives and deaths, then the verdict.

        Raises:
            ViolationError: A step was skipped, or done too often.
        """
        self._folder.mkdir()
        job = Job(work=f"{self._number}:{'asks' if self._asks else 'strict'}", aggregate_id="one")
        async with self._opened(), self._ground.topic_set(self._order.prefix, partitions=1) as topics:
            for boundary in self._boundaries:
                await topics.publish([job])
                await self._die_at(topics, boundary)
            await topics.publish([job])
            await self._settle_all(topics)
            return Figures(self._figures + await self._judged(topics, job))

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        if self._kind == REDIS:
            self._order = replace(self._order, store={**self._order.store, "timeout_seconds": STORE_TIMEOUT})
            yield
            return
        home = self._ground.homes[self._kind]
        self._order = replace(self._order, store=home.settings(self._folder, timeout_seconds=STORE_TIMEOUT))
        looking = home.settings(self._folder, timeout_seconds=30)
        async with open_records(looking, self._order.key_prefix) as self._store:
            yield

    async def _die_at(self, topics: Topics, boundary: Boundary) -> None:
        """A life that ends there, unless it does not come by."""
        step, moment = boundary
        worker = await self._nursery.start(replace(self._order, step=f"{step}:{moment.value}"))
        await self._until_finished(topics, worker)
        if worker.running:
            await self._leave(worker)
        status = await worker.ended
        if status == -signal.SIGKILL:
            self._deaths.append(boundary)
            self._figures.update({"kills": 1, f"kills:{moment.value}": 1})
        elif status == 0:
            self._figures["not_reached"] += 1
        else:
            raise ViolationError(f"a worker ended with {status}:\n{last_words(self._folder)}")

    async def _judged(self, topics: Topics, job: Job) -> Figures:
        records = [record async for record in self._store.scan(f"{self._order.key_prefix}:")]
        story = JobStory(self._journal.lines(), self._record_of_the_job(records), self._deaths)
        if not self._deaths and not story.cut_short:
            raise ViolationError(f"nobody died at {self._boundaries[0]}:\n{last_words(self._folder)}")
        stuck = [record.key for record in records if record.status is IdempotencyStatus.PROCESSING]
        if stuck and not story.given_up:  # of a job that was given up nobody needs a step any more
            raise ViolationError(f"records that nobody will settle: {stuck}")
        try:
            figures = story.judge(asks=self._asks)
        except ViolationError as error:
            raise ViolationError(f"{error}\n{last_words(self._folder)}") from error
        figures["dead_letter_copies"] = await judge_letters(topics, {job.work} if story.given_up else set())
        told = [header(letter, "error-message") for letter in await topics.messages("job.dlq")]
        if silent := [message for message in told if "StepInterruptedError: step " not in message]:
            raise ViolationError(f"letters that do not say what was interrupted: {silent}")
        return figures

    def _record_of_the_job(self, records: Iterable[IdempotencyRecord]) -> IdempotencyRecord:
        keys = {line.id for line in self._journal.lines() if line.what == "begin"}
        found = [record for record in records if record.key in keys]
        if len(found) != 1:
            raise ViolationError(f"one job ran under {keys}; there are {found}")
        return found[0]


def run(first: int, count: int, kinds: Sequence[str] = (REDIS,)) -> Figures:
    """The trials numbered `first` to `first + count - 1`; `kinds`: of stores, in turn."""
    trial = partial(StepsTrial, kinds=kinds)
    homes = [kind for kind in kinds if kind != REDIS]
    figures = asyncio.run(run_trials(range(first, first + count), trial, SIDE_BY_SIDE, kinds=homes))
    figures["rounds"] = count // len(BOUNDARIES)
    return figures


CAMPAIGN = Campaign(
    name="steps",
    counts="rounds",
    says=f"a handler of five steps is killed by SIGKILL at each of {len(BOUNDARIES)} boundaries, over one job each, "
    "and over half of them once more; on a real Redis and a real Kafka",
    scenarios=(115,),
    in_test=len(BOUNDARIES),
    at_least=1,
    target=100,
    batch=2 * len(BOUNDARIES),
    run=run,
)
