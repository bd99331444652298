"""Workers with transactional handlers and a relay, which die at named points: on a real broker and a real database.

As in `tests.crashes.points`, but what a handler does is a plain row in the database that the store is in, and what it
publishes goes by the outbox.  While no worker lives, and in the end, one snapshot of the database says whether rows,
completions and events are there together.
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
from tests.crashes.forks import Nursery
from tests.crashes.ground import Ground, Topics
from tests.crashes.judging import judge_letters
from tests.crashes.points import LIVES, OF_REQUESTS, OF_TRANSACTIONS, OFTEN, Trial, run_trials
from tests.crashes.stores import open_database
from tests.crashes.transacting import STEPS, tables

KINDS: Final = ("postgresql", "sqlite")
"""Of the trials with even and with odd numbers."""

LEVELS: Final = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
"""Of PostgreSQL; SQLite has one."""

SIDE_BY_SIDE: Final = 13

LEASE: Final = 2.0
"""Seconds; nobody renews it, and a busy machine must not run a job out of it again and again."""

PASSED_BY_NOBODY: Final = OF_REQUESTS | frozenset(
    CrashPoint(name)
    for name in (
        *("before_renew", "in_renew", "after_renew", "before_publish", "after_publish"),
        *("before_complete", "in_complete", "after_complete"),
    )
)
"""A transactional handler has one lease's time, and its events and its outcome are rows of its transaction."""

POINTS: Final = tuple(point for point in CrashPoint if point not in PASSED_BY_NOBODY)

OFTEN_HERE: Final = OFTEN | {
    CrashPoint(name)
    for name in (
        *("before_outcome", "in_outcome", "after_outcome", "before_claim", "in_claim", "after_claim"),
        *("before_transaction_commit", "in_transaction_commit", "after_transaction_commit"),
        *("before_send", "after_send"),
    )
}

CLAIMS: Final = frozenset({CrashPoint.BEFORE_CLAIM, CrashPoint.IN_CLAIM, CrashPoint.AFTER_CLAIM})
"""The first one comes with the start, when there is nothing to claim."""


def run(first: int, count: int) -> Figures:
    """The trials numbered `first` to `first + count - 1`."""
    trials = run_trials(range(first, first + count), TransactionalTrial, SIDE_BY_SIDE, kinds=KINDS)
    return asyncio.run(trials)


def points_of(number: int) -> list[CrashPoint]:
    """Where the lives of a trial end.

    Thirteen trials in a row, beginning at a multiple of thirteen, have each point once, those that only they have in
    the first five; 26, beginning at a multiple of 26, have each once in each kind of database.
    """
    trials = len(POINTS) // LIVES
    dice = random.Random(number // (trials * len(KINDS)))
    own = [point for point in POINTS if point in OF_TRANSACTIONS]
    others = [point for point in POINTS if point not in OF_TRANSACTIONS]
    row = dice.sample(own, len(own)) + dice.sample(others, len(others))
    place = number % trials * LIVES
    return row[place : place + LIVES]


class TransactionalTrial(Trial):
    """One trial."""

    def __init__(
        self,
        ground: Ground,
        nursery: Nursery,
        number: int,
        *,
        points: list[CrashPoint] | None = None,
        bug: str = "",
    ) -> None:
        """`points`: where its lives end, if not by the number; `bug`: of `tests.crashes.transactional_bugs`."""
        super().__init__(ground, nursery, number)
        self._kind = KINDS[number % len(KINDS)]
        self._points = points_of(number) if points is None else points
        level = self._dice.choice(LEVELS) if self._kind == "postgresql" else ""
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
    async def _opened(self) -> AsyncIterator[None]:
        async with open_database(self._ground.homes[self._kind], f"trial{self._number}", self._folder) as database:
            async with database.store.engine.begin() as connection:
                await connection.run_sync(tables.create_all)
            self._order = replace(self._order, store={"url": database.url})
            yield

    def _is_accompanied(self, point: CrashPoint) -> bool:
        return point in OFTEN_HERE and self._dice.random() < 0.25

    def _occurrence(self, point: CrashPoint) -> int:
        occurrence = self._dice.randint(1, 3)
        if point in CLAIMS:
            return occurrence + 1
        return occurrence if point in OFTEN_HERE else 1

    async def _finished(self, topics: Topics) -> bool:
        if not await super()._finished(topics):
            return False
        return not (await read_books(self._order.store["url"])).waiting

    def _completed_so_far(self) -> int:
        return len(self._books.entries) if self._books is not None else 0

    async def _look(self, topics: Topics) -> None:
        before, self._books = self._books, await read_books(self._order.store["url"])
        judge_books(self._books, await self._published(topics), STEPS)
        if before is not None and (gone := set(before.entries) - set(self._books.entries)):
            raise ViolationError(f"rows that were there and are gone: {sorted(gone)}")

    async def _published(self, topics: Topics) -> list[Event]:
        return published_events(await topics.messages("job_done"))

    async def _verdict(self, topics: Topics) -> Figures:
        assert self._books is not None
        poison = {work for work in topics.published if work.endswith(":poison")}
        copies = await judge_letters(topics, poison)
        in_order = self._order.ordering != "none"
        published = await self._published(topics)
        figures = judge_end(self._books, published, topics.published, steps=STEPS, in_order=in_order)
        kills = self._figures["kills"]
        figures.update({"dead_letter_copies": copies, f"kills:{self._kind}": kills})
        begun = sum(line.what == "begin" for line in self._effects.lines())
        return Figures(figures | {"deliveries": len(topics.published), "reruns": begun - len(set(topics.published))})


CAMPAIGN = Campaign(
    name="transactional",
    counts="kills",
    says="a process that killed itself by SIGKILL at a named point, its handlers in the transaction of their effects, "
    "on a real PostgreSQL or SQLite and a real Kafka",
    scenarios=(28,),
    in_test=5,
    at_least=14,
    target=1_000,
    batch=26,
    run=run,
)
