"""Workers with transactional handlers that stall in the middle of a transaction, and go on after their lease.

A trial is one job and two workers.  The first stops itself (SIGSTOP) at a point of the job's transaction, beyond its
lease and its session; the other one gets the job.  If the first has written its outcome already, or holds the file that
a SQLite database is, the other one has to wait for it; else it is done when the first goes on.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

from integr8s_idem.testing.crash_points import CrashPoint
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.crashes.books import Books, judge_books, judge_end, published_events, read_books
from tests.crashes.forks import Forked, Nursery
from tests.crashes.ground import Ground, Topics
from tests.crashes.jobs import Job
from tests.crashes.judging import last_words
from tests.crashes.points import run_trials
from tests.crashes.transacting import STEPS
from tests.crashes.transactional import KINDS, TransactionalTrial

POINTS: Final = (
    CrashPoint.IN_HANDLER_AFTER_EFFECT,
    CrashPoint.BEFORE_OUTCOME,
    CrashPoint.AFTER_OUTCOME,
    CrashPoint.BEFORE_TRANSACTION_COMMIT,
    CrashPoint.AFTER_TRANSACTION_COMMIT,
)
HOLDING: Final = frozenset({CrashPoint.AFTER_OUTCOME, CrashPoint.BEFORE_TRANSACTION_COMMIT})
"""The job's record is written, and not committed."""

SIDE_BY_SIDE: Final = 10


class ZombieTrial(TransactionalTrial):
    """One stall."""

    def __init__(self, ground: Ground, nursery: Nursery, number: int, *, bug: str = "") -> None:
        super().__init__(ground, nursery, number, points=[])
        # Every second one must be stopped by the database alone.
        self._bug = bug or ("deaf" if number // len(KINDS) % 2 else "")
        self._stalled_members: set[str] = set()
        self._point = POINTS[number // len(KINDS) % len(POINTS)]

    @property
    def _is_waited_for(self) -> bool:
        """Whether nobody can do anything before it goes on."""
        # Behind the commit it may hold the file as well: its relay wakes up.
        return self._kind == "sqlite" or self._point in HOLDING

    async def run(self) -> Figures:
        """The stall, then the verdict.

        Raises:
            ViolationError: What the zombie did counted beside what another one did, or was lost.
        """
        self._folder.mkdir()
        self._effects.prepare()
        async with self._opened(), self._ground.topic_set(self._order.prefix, partitions=1) as topics:
            await topics.publish([Job(work=f"{self._number}:plain", aggregate_id="one")])
            async with AsyncExitStack() as stack:
                zombie = await self._nursery.start(
                    replace(self._order, point=self._point.value, stalls=True, bug=self._bug)
                )
                # A process that is stopped hears of nothing but this.
                stack.callback(zombie.send_signal, signal.SIGCONT)
                await self._await(self._stalled, zombie)
                self._stalled_members = await topics.members(self._order.group)
                heir = await self._nursery.start(replace(self._order))
                await self._await(lambda: self._overtaken(topics), heir)
                before = await read_books(self._order.store["url"])
            await self._await(lambda: self._finished(topics), heir)
            await self._leave(zombie)
            await self._leave(heir)
            await self._look(topics)
            return Figures(self._figures | await self._judged(topics, before))

    async def _stalled(self) -> bool:
        return (self._folder / "stalled").exists()

    async def _overtaken(self, topics: Topics) -> bool:
        """Whether all has happened that can without the zombie."""
        if not self._is_waited_for:
            return await self._finished(topics)
        out = not await topics.members(self._order.group) & self._stalled_members
        leases = (await read_books(self._order.store["url"])).leases.values()
        return out and all(until < time.time() for until in leases)

    async def _judged(self, topics: Topics, before: Books) -> Figures:
        assert self._books is not None
        judge_books(before, await self._published(topics), STEPS)
        if before.entries and (before.entries, before.records) != (self._books.entries, self._books.records):
            raise ViolationError(f"what was done changed after the zombie woke: {before}, then {self._books}")
        committed = self._point is CrashPoint.AFTER_TRANSACTION_COMMIT
        if self._is_waited_for and bool(before.entries) != committed:
            raise ViolationError(f"seen before it was committed, or not after: {before.entries}")
        published = published_events(await topics.messages("job_done"))
        figures = judge_end(self._books, published, topics.published, steps=STEPS, in_order=True)
        begun = [line.attempt for line in self._effects.lines() if line.what == "begin"]
        if not (self._is_waited_for or committed) and begun[:2] != [1, 2]:
            raise ViolationError(f"nobody took the job over: runs {begun}")
        return Figures(figures | {"zombies": 1, f"zombies:{self._kind}": 1, "takeovers": len(begun) - 1})

    async def _await(self, fact: Callable[[], Awaitable[bool]], worker: Forked) -> None:
        await self._until(fact, worker)
        if not worker.running:
            raise ViolationError(f"a worker has ended:\n{last_words(self._folder)}")


def run(first: int, count: int) -> Figures:
    """The zombies numbered `first` to `first + count - 1`."""
    return asyncio.run(run_trials(range(first, first + count), ZombieTrial, SIDE_BY_SIDE, kinds=KINDS))


CAMPAIGN = Campaign(
    name="zombies-transactional",
    counts="zombies",
    says="a worker stops itself (SIGSTOP) in a handler's transaction, beyond its lease and its session, another one "
    "does what it can, then it goes on; on a real PostgreSQL or SQLite and a real Kafka",
    scenarios=(33,),
    in_test=2 * len(KINDS),
    target=240,
    batch=2 * len(POINTS) * len(KINDS),
    run=run,
)
