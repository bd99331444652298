"""Workers with transactional handlers and a relay that die at named points: on a real broker and a real database.

The trials work like those of `tests.crashes.points`, but handlers write a row into the database of the store and
publish through the outbox.  While no worker is running, and at the end, a snapshot of the database shows whether rows,
completions and events exist together.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from integr8s_idem.testing.crash_points import CrashPoint
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.crashes.books import Books, Event, judge_books, judge_end, published_events, read_books
from tests.crashes.forks import ForkServer
from tests.crashes.ground import Servers, Topics
from tests.crashes.judging import judge_dead_letters
from tests.crashes.points import CRASHES, FREQUENT_POINTS, REQUEST_POINTS, TRANSACTION_POINTS, Trial, run_trials
from tests.crashes.stores import open_database
from tests.crashes.transacting import STEPS, tables

KINDS: Final = ("postgresql", "sqlite")
"""Kinds of databases: the first for even trial numbers, the second for odd ones."""

LEVELS: Final = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
"""Isolation levels of PostgreSQL; SQLite has only one."""

CONCURRENT_TRIALS: Final = 13

LEASE: Final = 2.0
"""Seconds; it is not renewed, and jobs must not exceed it again and again on a busy machine."""

UNREACHED_POINTS: Final = REQUEST_POINTS | frozenset(
    CrashPoint(name)
    for name in (
        *("before_renew", "in_renew", "after_renew", "before_publish", "after_publish"),
        *("before_complete", "in_complete", "after_complete"),
    )
)
"""Points that transactional handlers do not reach: their lease is not renewed, and events and outcome are rows of the
transaction."""

POINTS: Final = tuple(point for point in CrashPoint if point not in UNREACHED_POINTS)

FREQUENT_TRANSACTION_POINTS: Final = FREQUENT_POINTS | {
    CrashPoint(name)
    for name in (
        *("before_outcome", "in_outcome", "after_outcome", "before_claim", "in_claim", "after_claim"),
        *("before_transaction_commit", "in_transaction_commit", "after_transaction_commit"),
        *("before_send", "after_send"),
    )
}

CLAIMS: Final = frozenset({CrashPoint.BEFORE_CLAIM, CrashPoint.IN_CLAIM, CrashPoint.AFTER_CLAIM})
"""Points of a claim; the first claim is made at start, when the outbox is empty."""


def run(first: int, count: int) -> Figures:
    """Run the trials numbered `first` to `first + count - 1`."""
    trials = run_trials(range(first, first + count), TransactionalTrial, CONCURRENT_TRIALS, kinds=KINDS)
    return asyncio.run(trials)


def points_of(number: int) -> list[CrashPoint]:
    """Return the crash points of a trial.

    Thirteen trials, starting at a multiple of thirteen, cover each point once, and the transactional points in the
    first five.  26 trials, starting at a multiple of 26, cover each point once per kind of database.
    """
    trials = len(POINTS) // CRASHES
    rng = random.Random(number // (trials * len(KINDS)))
    own = [point for point in POINTS if point in TRANSACTION_POINTS]
    others = [point for point in POINTS if point not in TRANSACTION_POINTS]
    points = rng.sample(own, len(own)) + rng.sample(others, len(others))
    start = number % trials * CRASHES
    return points[start : start + CRASHES]


class TransactionalTrial(Trial):
    """A trial with transactional handlers."""

    def __init__(
        self,
        servers: Servers,
        fork_server: ForkServer,
        number: int,
        *,
        points: list[CrashPoint] | None = None,
        bug: str = "",
    ) -> None:
        """Create the trial.

        Args:
            servers: The servers.
            fork_server: Starts the workers.
            number: The number of the trial.
            points: The crash points, if not derived from the number.
            bug: A bug from `tests.crashes.transactional_bugs` to inject.
        """
        super().__init__(servers, fork_server, number)
        self._kind = KINDS[number % len(KINDS)]
        self._points = points_of(number) if points is None else points
        level = self._rng.choice(LEVELS) if self._kind == "postgresql" else ""
        self._order = replace(
            self._order,
            transactional=True,
            lease=LEASE,
            isolation=level,
            bug=bug,
            request_timeout=1.9,
        )
        self._slowness = LEASE / 2
        self._books: Books | None = None
        self._figures[f"trials:{level or self._kind}"] += 1

    @asynccontextmanager
    async def _resources(self) -> AsyncIterator[None]:
        async with open_database(self._servers.homes[self._kind], f"trial{self._number}", self._folder) as database:
            async with database.store.engine.begin() as connection:
                await connection.run_sync(tables.create_all)
            self._order = replace(self._order, store={"url": database.url})
            yield

    def _has_companion(self, point: CrashPoint) -> bool:
        return point in FREQUENT_TRANSACTION_POINTS and self._rng.random() < 0.25

    def _occurrence(self, point: CrashPoint) -> int:
        occurrence = self._rng.randint(1, 3)
        if point in CLAIMS:
            return occurrence + 1
        return occurrence if point in FREQUENT_TRANSACTION_POINTS else 1

    async def _finished(self, topics: Topics) -> bool:
        if not await super()._finished(topics):
            return False
        return not (await read_books(self._order.store["url"])).waiting

    def _completed_so_far(self) -> int:
        return len(self._books.entries) if self._books is not None else 0

    async def _check(self, topics: Topics) -> None:
        before, self._books = self._books, await read_books(self._order.store["url"])
        judge_books(self._books, await self._published(topics), STEPS)
        if before is not None and (gone := set(before.entries) - set(self._books.entries)):
            raise ViolationError(f"rows that have disappeared: {sorted(gone)}")

    async def _published(self, topics: Topics) -> list[Event]:
        return published_events(await topics.messages("job_done"))

    async def _verdict(self, topics: Topics) -> Figures:
        assert self._books is not None
        poison = {work for work in topics.published if work.endswith(":poison")}
        copies = await judge_dead_letters(topics, poison)
        in_order = self._order.ordering != "none"
        published = await self._published(topics)
        figures = judge_end(self._books, published, topics.published, steps=STEPS, in_order=in_order)
        kills = self._figures["kills"]
        figures.update({"dead_letter_copies": copies, f"kills:{self._kind}": kills})
        runs = sum(line.what == "begin" for line in self._effects.lines())
        return Figures(figures | {"deliveries": len(topics.published), "reruns": runs - len(set(topics.published))})


CAMPAIGN = Campaign(
    name="transactional",
    counts="kills",
    says="a process with transactional handlers kills itself with SIGKILL at a named point, "
    "on a real PostgreSQL or SQLite and a real Kafka",
    scenarios=(28,),
    in_test=5,
    at_least=14,
    target=1_000,
    batch=26,
    run=run,
)
