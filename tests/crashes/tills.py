"""What applications on other people's frameworks do while they die: one row for each job, in a database of their own.

Nothing but the guard in front of them keeps a row from being two.  `allowed` says after which death there may be two.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dishka import Provider, Scope, provide
from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from integr8s_idem import IdempotencyManager
from integr8s_idem.stores.sql import sql_engine
from integr8s_idem.testing.crash_points import CrashPlan, CrashPoint
from tests.campaigns.figures import Figures, ViolationError
from tests.crashes.orders import Order
from tests.crashes.stores import LOCK_TIMEOUT
from tests.crashes.transacting import entries
from tests.support.homes import CONNECTIONS

SIDE_BY_SIDE: Final = 12
"""Trials at once; they mostly wait for sessions and leases to end."""


@dataclass(frozen=True)
class TillOrder(Order):
    """What an application is to do."""

    database: str = ""
    """Of its rows, as SQLAlchemy writes it."""
    shape: str = ""
    """Who commits, who publishes, and when."""
    port: int = 0
    """That it listens on."""


def till_engine(url: str) -> AsyncEngine:
    """For the application's sessions."""
    return sql_engine(url, pool_size=CONNECTIONS, lock_timeout_seconds=LOCK_TIMEOUT)


class Sessions(Provider):
    """A session for each scope, which commits at its end."""

    scope = Scope.REQUEST

    def __init__(self, engine: AsyncEngine, plan: CrashPlan) -> None:
        super().__init__()
        self._engine = engine
        self._plan = plan

    @provide
    async def session(self) -> AsyncGenerator[AsyncSession, BaseException | None]:
        async with AsyncSession(self._engine) as session:
            error = yield session
            if error is None and session.in_transaction():
                await self._plan.around("transaction_commit", session.commit)


@dataclass(frozen=True)
class Till:
    """Enters jobs, between the points of a plan."""

    plan: CrashPlan
    manager: IdempotencyManager

    async def enter(self, session: AsyncSession, work: str) -> None:
        """One row for `work`.  Its attempt is 0 where there is none: a batch has as many as messages."""
        run = self.manager.executor.runs.current()
        told = {} if run is None else {"key": run.attempt.key, "fence": run.attempt.fence}
        number = 0 if run is None else run.attempt.number
        self.plan.reached(CrashPoint.IN_HANDLER_BEFORE_EFFECT)
        row = {"work": work, "key": "", "fence": 0, **told, "attempt": number, "pid": os.getpid()}
        await session.execute(insert(entries).values(row))
        self.plan.reached(CrashPoint.IN_HANDLER_AFTER_EFFECT)


async def attempts_of(url: str) -> dict[str, list[int]]:
    """By work: the attempts whose row is there, in the order of the rows."""
    engine = till_engine(url)
    found: defaultdict[str, list[int]] = defaultdict(list)
    try:
        async with engine.connect() as connection:
            rows = await connection.execute(select(entries.c.work, entries.c.attempt).order_by(entries.c.id))
            for work, attempt in rows:
                found[work].append(attempt)
    finally:
        await engine.dispose()
    return dict(found)


_RUNS: Final[Mapping[CrashPoint, Sequence[Sequence[int]]]] = {
    # Up to which point of the way a death leaves rows by which attempts.  In the middle of a call, one of two.
    CrashPoint.BEFORE_RESERVE: [[1]],
    CrashPoint.IN_RESERVE: [[1], [2]],
    CrashPoint.BEFORE_TRANSACTION_COMMIT: [[2]],
    CrashPoint.IN_TRANSACTION_COMMIT: [[2], [1, 2]],
    CrashPoint.BEFORE_COMPLETE: [[1, 2]],
    CrashPoint.IN_COMPLETE: [[1], [1, 2]],
}


def allowed(way: Sequence[CrashPoint], point: CrashPoint) -> Sequence[Sequence[int]]:
    """By which attempts the rows of a job may be, if a process died at `point` of the `way` and another one went on."""
    for mark, runs in _RUNS.items():
        if way.index(point) <= way.index(mark):
            return runs
    return [[1]]


def repeats_in(way: Sequence[CrashPoint], point: CrashPoint) -> bool:
    """Whether what is done may be done again after a death there."""
    return any(len(runs) > 1 for runs in allowed(way, point))


def judge_rows(rows: Mapping[str, Sequence[int]], asked: Sequence[str], *, repeatable: int) -> Figures:
    """Compare the rows with what was asked for.  Call it when nothing is under way any more.

    Args:
        rows: By work, the attempts whose row is there.
        repeatable: How many rows at most may be repeats, by where processes have died.

    Raises:
        ViolationError: Something was lost, or repeated in silence, or for no reason.
    """
    lost = sorted(set(asked) - rows.keys())
    unasked = sorted(rows.keys() - set(asked))
    repeated = {work: list(attempts) for work, attempts in rows.items() if len(attempts) > 1}
    # A batch of many has no attempt that a handler could be told.
    silent = {work: told for work, told in repeated.items() if any(told) and told != sorted(set(told))}
    repeats = sum(len(attempts) - 1 for attempts in repeated.values())
    if lost or unasked or silent or repeats > repeatable:
        raise ViolationError(
            f"lost {lost}; done and not asked for {unasked}; repeated in silence {silent}; "
            f"repeated {repeated}, and by the deaths there may be {repeatable}"
        )
    return Figures(events=len(set(asked)), lost=0, repeats=repeats)


async def trials_side_by_side(numbers: Iterable[int], trial: Callable[[int], Awaitable[Figures]]) -> Figures:
    """What came of all of them.

    Raises:
        ViolationError: A promise was broken; it names the trial.
    """
    figures = Figures(kills=0, lost=0, repeats=0)
    slots = asyncio.Semaphore(SIDE_BY_SIDE)

    async def one(number: int) -> None:
        async with slots:
            try:
                figures.update(await trial(number))
            except AssertionError as error:
                raise ViolationError(f"trial {number}: {error}") from error

    try:
        async with asyncio.TaskGroup() as group:
            for number in numbers:
                group.create_task(one(number))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return figures
