"""The work of FastAPI and FastStream applications in crash tests: one row per job, in a database of their own.

Only the idempotency middleware prevents a second row.  `allowed` returns the crashes after which there may be two.
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

CONCURRENT_TRIALS: Final = 12
"""Trials that run concurrently; they mostly wait for sessions and leases to end."""


@dataclass(frozen=True)
class TillOrder(Order):
    """Instructions for an application."""

    database: str = ""
    """SQLAlchemy URL of the database for its rows."""
    shape: str = ""
    """Which part commits and publishes, and when."""
    port: int = 0
    """Port to listen on."""


def till_engine(url: str) -> AsyncEngine:
    """Create the engine for the application's sessions."""
    return sql_engine(url, pool_size=CONNECTIONS, lock_timeout_seconds=LOCK_TIMEOUT)


class Sessions(Provider):
    """Provides a session per scope, and commits it at the end of the scope."""

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
    """Writes the rows of jobs, between the crash points of a plan."""

    plan: CrashPlan
    manager: IdempotencyManager

    async def enter(self, session: AsyncSession, work: str) -> None:
        """Write a row for `work`.  Its attempt is 0 in a batch, whose messages each have their own attempt."""
        run = self.manager.executor.runs.current()
        run_columns = {} if run is None else {"key": run.attempt.key, "fence": run.attempt.fence}
        number = 0 if run is None else run.attempt.number
        self.plan.reached(CrashPoint.IN_HANDLER_BEFORE_EFFECT)
        row = {"work": work, "key": "", "fence": 0, **run_columns, "attempt": number, "pid": os.getpid()}
        await session.execute(insert(entries).values(row))
        self.plan.reached(CrashPoint.IN_HANDLER_AFTER_EFFECT)


async def attempts_of(url: str) -> dict[str, list[int]]:
    """Return the attempts that wrote a row, by work, in the order of the rows."""
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
    # Possible attempts of the rows after a crash up to this point.  In the middle of a call, there are two outcomes.
    CrashPoint.BEFORE_RESERVE: [[1]],
    CrashPoint.IN_RESERVE: [[1], [2]],
    CrashPoint.BEFORE_TRANSACTION_COMMIT: [[2]],
    CrashPoint.IN_TRANSACTION_COMMIT: [[2], [1, 2]],
    CrashPoint.BEFORE_COMPLETE: [[1, 2]],
    CrashPoint.IN_COMPLETE: [[1], [1, 2]],
}


def allowed(points: Sequence[CrashPoint], point: CrashPoint) -> Sequence[Sequence[int]]:
    """Return the attempts that may have written the rows of a job after a crash at `point` and a takeover.

    Args:
        points: All points, in the order in which a job reaches them.
        point: The point of the crash.
    """
    for limit, attempts in _RUNS.items():
        if points.index(point) <= points.index(limit):
            return attempts
    return [[1]]


def repeats_in(points: Sequence[CrashPoint], point: CrashPoint) -> bool:
    """Return whether the effect may be repeated after a crash at `point`."""
    return any(len(attempts) > 1 for attempts in allowed(points, point))


def judge_rows(rows: Mapping[str, Sequence[int]], asked: Sequence[str], *, repeatable: int) -> Figures:
    """Compare the rows with the requested work, once all of it is settled.

    Args:
        rows: The attempts that wrote a row, by work.
        asked: The requested work.
        repeatable: The maximum number of repeated rows, derived from the crashes.

    Raises:
        ViolationError: Work was lost, or repeated without a reason or without the handler being able to tell.
    """
    lost = sorted(set(asked) - rows.keys())
    unasked = sorted(rows.keys() - set(asked))
    repeated = {work: list(attempts) for work, attempts in rows.items() if len(attempts) > 1}
    # The handler of a batch with several messages gets no attempt.
    silent = {work: runs for work, runs in repeated.items() if any(runs) and runs != sorted(set(runs))}
    repeats = sum(len(attempts) - 1 for attempts in repeated.values())
    if lost or unasked or silent or repeats > repeatable:
        raise ViolationError(
            f"lost: {lost}; done without a request: {unasked}; repeated with the same attempt: {silent}; "
            f"repeated: {repeated}, where the crashes allow {repeatable}"
        )
    return Figures(events=len(set(asked)), lost=0, repeats=repeats)


async def concurrent_trials(numbers: Iterable[int], trial: Callable[[int], Awaitable[Figures]]) -> Figures:
    """Run the trials concurrently, and return the sum of their figures.

    Raises:
        ViolationError: A promise was broken; the message names the trial.
    """
    figures = Figures(kills=0, lost=0, repeats=0)
    slots = asyncio.Semaphore(CONCURRENT_TRIALS)

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
