"""Workers with transactional handlers that stall in the middle of a transaction, and resume after their lease.

A trial has one job and two workers.  The first worker stops itself (SIGSTOP) at a point of the job's transaction, for
longer than its lease and its session.  The second worker gets the job.  If the first one has already written its
outcome, or has locked the SQLite file, the second one has to wait; otherwise it completes the job before the first one
resumes.
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
from tests.crashes.forks import ForkedWorker, ForkServer
from tests.crashes.ground import Servers, Topics
from tests.crashes.jobs import Job
from tests.crashes.judging import log_tail
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
"""Points at which the job's record has been written but not committed."""

CONCURRENT_TRIALS: Final = 10


class ZombieTrial(TransactionalTrial):
    """A trial with one stalled worker."""

    def __init__(self, servers: Servers, fork_server: ForkServer, number: int, *, bug: str = "") -> None:
        super().__init__(servers, fork_server, number, points=[])
        # In half of the trials, only the database stops the zombie.
        self._bug = bug or ("ignores_lost_leases" if number // len(KINDS) % 2 else "")
        self._stalled_members: set[str] = set()
        self._point = POINTS[number // len(KINDS) % len(POINTS)]

    @property
    def _blocks_others(self) -> bool:
        """Whether the successor has to wait until the zombie resumes."""
        # The file may be locked after the commit too, by the relay.
        return self._kind == "sqlite" or self._point in HOLDING

    async def run(self) -> Figures:
        """Run both workers and check the results.

        Raises:
            ViolationError: The work was done by the zombie and by its successor, or was lost.
        """
        self._folder.mkdir()
        self._effects.prepare()
        async with self._resources(), self._servers.topic_set(self._order.prefix, partitions=1) as topics:
            await topics.publish([Job(work=f"{self._number}:plain", aggregate_id="one")])
            async with AsyncExitStack() as stack:
                zombie = await self._fork_server.start(
                    replace(self._order, point=self._point.value, stalls=True, bug=self._bug)
                )
                # A stopped process handles no signal but SIGCONT and SIGKILL.
                stack.callback(zombie.send_signal, signal.SIGCONT)
                await self._await(self._stalled, zombie)
                self._stalled_members = await topics.members(self._order.group)
                successor = await self._fork_server.start(replace(self._order))
                await self._await(lambda: self._overtaken(topics), successor)
                before = await read_books(self._order.store["url"])
            await self._await(lambda: self._finished(topics), successor)
            await self._stop(zombie)
            await self._stop(successor)
            await self._check(topics)
            return Figures(self._figures | await self._judge(topics, before))

    async def _stalled(self) -> bool:
        return (self._folder / "stalled").exists()

    async def _overtaken(self, topics: Topics) -> bool:
        """Return whether everything that does not depend on the zombie has happened."""
        if not self._blocks_others:
            return await self._finished(topics)
        out = not await topics.members(self._order.group) & self._stalled_members
        leases = (await read_books(self._order.store["url"])).leases.values()
        return out and all(until < time.time() for until in leases)

    async def _judge(self, topics: Topics, before: Books) -> Figures:
        assert self._books is not None
        judge_books(before, await self._published(topics), STEPS)
        if before.entries and (before.entries, before.records) != (self._books.entries, self._books.records):
            raise ViolationError(f"completed work changed after the zombie resumed: {before}, then {self._books}")
        committed = self._point is CrashPoint.AFTER_TRANSACTION_COMMIT
        if self._blocks_others and bool(before.entries) != committed:
            raise ViolationError(f"visible before the commit, or invisible after it: {before.entries}")
        published = published_events(await topics.messages("job_done"))
        figures = judge_end(self._books, published, topics.published, steps=STEPS, in_order=True)
        attempts = [line.attempt for line in self._effects.lines() if line.what == "begin"]
        if not (self._blocks_others or committed) and attempts[:2] != [1, 2]:
            raise ViolationError(f"the job was not taken over: attempts {attempts}")
        return Figures(figures | {"zombies": 1, f"zombies:{self._kind}": 1, "takeovers": len(attempts) - 1})

    async def _await(self, condition: Callable[[], Awaitable[bool]], worker: ForkedWorker) -> None:
        await self._until(condition, worker)
        if not worker.running:
            raise ViolationError(f"a worker exited early:\n{log_tail(self._folder)}")


def run(first: int, count: int) -> Figures:
    """Run the trials numbered `first` to `first + count - 1`."""
    return asyncio.run(run_trials(range(first, first + count), ZombieTrial, CONCURRENT_TRIALS, kinds=KINDS))


CAMPAIGN = Campaign(
    name="zombies-transactional",
    counts="zombies",
    says="a worker stops itself (SIGSTOP) in a handler's transaction for longer than its lease and its session, "
    "another one takes over where possible, then it resumes; on a real PostgreSQL or SQLite and a real Kafka",
    scenarios=(33,),
    in_test=2 * len(KINDS),
    target=240,
    batch=2 * len(POINTS) * len(KINDS),
    run=run,
)
