"""A handler with five steps whose process dies at each boundary of a step, on a real broker and a real store.

A trial publishes the same job before each worker starts.  The first worker dies by SIGKILL at a boundary that is
derived from the trial's number.  In half of the trials, a second one dies at the same or a later boundary.  The last
worker must settle the job.  A journal outside the processes records the effects of the steps.
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
from tests.crashes.forks import ForkServer
from tests.crashes.ground import Servers, Topics
from tests.crashes.jobs import Job
from tests.crashes.judging import judge_dead_letters, log_tail
from tests.crashes.points import Trial, run_trials
from tests.crashes.step_judging import Boundary, JobStory
from tests.crashes.stepping import BOUNDARIES, StepJournal
from tests.support.homes import open_records
from tests.support.workers import header

CONCURRENT_TRIALS: Final = 16

LEASE: Final = 3.0
"""Seconds; long enough that a busy machine rarely loses a lease, which would make a trial less conclusive."""
STORE_TIMEOUT: Final = 0.9

REDIS: Final = "redis"
"""The kind of store that needs no additional servers."""


def boundaries_of(number: int) -> list[Boundary]:
    """Return the boundaries at which workers die; `len(BOUNDARIES)` trials in a row start with each boundary once."""
    rng = random.Random(number)
    boundaries = list(BOUNDARIES)
    random.Random(number // len(boundaries)).shuffle(boundaries)
    first = boundaries[number % len(boundaries)]
    later = BOUNDARIES[BOUNDARIES.index(first) :]
    return [first, rng.choice(later)] if rng.random() < 0.5 else [first]


class StepsTrial(Trial):
    """Workers that die in a step of one job, and a last one that settles it."""

    def __init__(self, servers: Servers, fork_server: ForkServer, number: int, kinds: Sequence[str] = (REDIS,)) -> None:
        super().__init__(servers, fork_server, number)
        self._kind = kinds[number % len(kinds)]
        self._order = replace(self._order, stepping=True, lease=LEASE)
        self._boundaries = boundaries_of(number)
        self._asks = self._rng.random() < 0.5
        self._journal = StepJournal(self._folder)
        self._crashes: list[Boundary] = []

    async def run(self) -> Figures:
        """Run all workers and check the results.

        Raises:
            ViolationError: A step was skipped, or repeated too often.
        """
        self._folder.mkdir()
        job = Job(work=f"{self._number}:{'asks' if self._asks else 'strict'}", aggregate_id="one")
        async with self._resources(), self._servers.topic_set(self._order.prefix, partitions=1) as topics:
            for boundary in self._boundaries:
                await topics.publish([job])
                await self._crash_at(topics, boundary)
            await topics.publish([job])
            await self._settle_all(topics)
            return Figures(self._figures + await self._judge(topics, job))

    @asynccontextmanager
    async def _resources(self) -> AsyncIterator[None]:
        if self._kind == REDIS:
            self._order = replace(self._order, store={**self._order.store, "timeout_seconds": STORE_TIMEOUT})
            yield
            return
        home = self._servers.homes[self._kind]
        self._order = replace(self._order, store=home.settings(self._folder, timeout_seconds=STORE_TIMEOUT))
        judging = home.settings(self._folder, timeout_seconds=30)
        async with open_records(judging, self._order.key_prefix) as self._store:
            yield

    async def _crash_at(self, topics: Topics, boundary: Boundary) -> None:
        """Run a worker until it dies at `boundary`, or until the job is settled."""
        step, moment = boundary
        worker = await self._fork_server.start(replace(self._order, step=f"{step}:{moment.value}"))
        await self._until_finished(topics, worker)
        if worker.running:
            await self._stop(worker)
        status = await worker.ended
        if status == -signal.SIGKILL:
            self._crashes.append(boundary)
            self._figures.update({"kills": 1, f"kills:{moment.value}": 1})
        elif status == 0:
            self._figures["not_reached"] += 1
        else:
            raise ViolationError(f"a worker exited with status {status}:\n{log_tail(self._folder)}")

    async def _judge(self, topics: Topics, job: Job) -> Figures:
        records = [record async for record in self._store.scan(f"{self._order.key_prefix}:")]
        story = JobStory(self._journal.lines(), self._record_of_the_job(records), self._crashes)
        if not self._crashes and not story.cut_short:
            raise ViolationError(f"{self._boundaries[0]} was not reached:\n{log_tail(self._folder)}")
        stuck = [record.key for record in records if record.status is IdempotencyStatus.PROCESSING]
        if stuck and not story.given_up:  # steps of a failed job may stay unfinished
            raise ViolationError(f"records that are still PROCESSING: {stuck}")
        try:
            figures = story.judge(asks=self._asks)
        except ViolationError as error:
            raise ViolationError(f"{error}\n{log_tail(self._folder)}") from error
        figures["dead_letter_copies"] = await judge_dead_letters(topics, {job.work} if story.given_up else set())
        errors = [header(dead_letter, "error-message") for dead_letter in await topics.messages("job.dlq")]
        if unclear := [error for error in errors if "StepInterruptedError: step " not in error]:
            raise ViolationError(f"dead letters that do not name the interrupted step: {unclear}")
        return figures

    def _record_of_the_job(self, records: Iterable[IdempotencyRecord]) -> IdempotencyRecord:
        keys = {line.id for line in self._journal.lines() if line.what == "begin"}
        found = [record for record in records if record.key in keys]
        if len(found) != 1:
            raise ViolationError(f"one job ran under the keys {keys}; its records are {found}")
        return found[0]


def run(first: int, count: int, kinds: Sequence[str] = (REDIS,)) -> Figures:
    """Run the trials numbered `first` to `first + count - 1`, alternating between the kinds of stores."""
    trial = partial(StepsTrial, kinds=kinds)
    homes = [kind for kind in kinds if kind != REDIS]
    figures = asyncio.run(run_trials(range(first, first + count), trial, CONCURRENT_TRIALS, kinds=homes))
    figures["rounds"] = count // len(BOUNDARIES)
    return figures


CAMPAIGN = Campaign(
    name="steps",
    counts="rounds",
    says=f"a handler with five steps is killed with SIGKILL at each of {len(BOUNDARIES)} boundaries, for one job each, "
    "and for half of the jobs a second time; on a real Redis and a real Kafka",
    scenarios=(115,),
    in_test=len(BOUNDARIES),
    at_least=1,
    target=100,
    batch=2 * len(BOUNDARIES),
    run=run,
)
