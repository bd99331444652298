"""Workers that die at named points, on a real broker and a real Redis.

A trial is three lives and a last one.  Before each life there is new work of every kind, and copies of some of the
work of earlier lives; each but the last ends by SIGKILL at the point that the trial's number gives it; the last must
settle everything.  Between two lives, while no worker lives, the store says what is completed: none of that may be run
again.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.testing.crash_points import CrashPoint
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.crashes.forks import Forked, Nursery
from tests.crashes.ground import Ground, Topics, open_ground
from tests.crashes.jobs import Job, handful
from tests.crashes.judging import CompletedKeys, judge, last_words
from tests.crashes.orders import Order
from tests.support.effects import Effects

LIVES: Final = 3
"""Lives of a trial that end at a point: its points are three neighbors in a shuffled row of all of them."""

AGAIN: Final = 3
"""Jobs of earlier lives that come again with each life."""

TRIES: Final = 3
"""Lives for one point: another worker may take all that would have led a life past it."""

SIDE_BY_SIDE: Final = 16
"""Trials at once; they mostly wait for sessions and leases to end."""

PATIENCE: Final = 60.0
"""Seconds for a life; a trial that takes longer is stuck."""

AT_THE_END: Final = frozenset({CrashPoint.IN_DRAIN, CrashPoint.BEFORE_LEAVE, CrashPoint.AFTER_LEAVE})
TAKEN_AWAY: Final = frozenset({CrashPoint.BEFORE_REVOKE, CrashPoint.AFTER_REVOKE})
OFTEN: Final = frozenset(
    CrashPoint(name)
    for name in (
        *("before_reserve", "in_reserve", "after_reserve", "before_complete", "in_complete", "after_complete"),
        *("before_handler", "in_handler_before_effect", "in_handler_after_effect", "after_handler"),
    )
)
"""Points that a life passes by three times at least, whatever comes in one batch."""

OF_TRANSACTIONS: Final = frozenset(
    CrashPoint(name)
    for name in (
        *("before_outcome", "in_outcome", "after_outcome", "before_claim", "in_claim", "after_claim"),
        *("before_transaction_commit", "in_transaction_commit", "after_transaction_commit"),
        *("before_send", "after_send", "before_forget", "in_forget", "after_forget"),
    )
)
"""Points that only transactional handlers and the relay pass by, or that they have of their own."""

OF_REQUESTS: Final = frozenset(CrashPoint(name) for name in ("before_response", "in_response", "after_response"))
"""Points that only applications behind HTTP pass by."""

POINTS: Final = tuple(point for point in CrashPoint if point not in OF_TRANSACTIONS | OF_REQUESTS)

ORDERINGS: Final[tuple[Literal["partition", "key", "none"], ...]] = ("partition", "key", "none")


def run(first: int, count: int) -> Figures:
    """The trials numbered `first` to `first + count - 1`."""
    return asyncio.run(run_trials(range(first, first + count), Trial, SIDE_BY_SIDE))


async def run_trials(
    numbers: Iterable[int],
    trial: Callable[[Ground, Nursery, int], Trial],
    side_by_side: int,
    *,
    kinds: Iterable[str] = (),
) -> Figures:
    """What came of all of them, on servers of their own, those for records of `kinds` among them.

    Raises:
        ViolationError: A promise was broken; it names the trial.
    """
    async with open_ground(kinds=kinds) as ground, Nursery() as nursery:
        return await run_on(ground, nursery, numbers, trial, side_by_side)


async def run_on(
    ground: Ground,
    nursery: Nursery,
    numbers: Iterable[int],
    trial: Callable[[Ground, Nursery, int], Trial],
    side_by_side: int,
) -> Figures:
    """As `run_trials`, on servers that are there."""
    figures = Figures(kills=0, lost=0, repeats=0, fenced_repeats=0)
    slots = asyncio.Semaphore(side_by_side)

    async def one(number: int) -> None:
        async with slots:
            try:
                figures.update(await trial(ground, nursery, number).run())
            except AssertionError as error:
                raise ViolationError(f"trial {number}: {error}") from error

    try:
        async with asyncio.TaskGroup() as group:
            for number in numbers:
                group.create_task(one(number))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return figures


def points_of(number: int) -> list[CrashPoint]:
    """Where the lives of a trial end; eleven trials in a row, beginning at a multiple of eleven, have each once."""
    row = list(POINTS)
    trials = len(row) // LIVES
    random.Random(number // trials).shuffle(row)
    place = number % trials * LIVES
    return row[place : place + LIVES]


class Trial:
    """One trial."""

    def __init__(self, ground: Ground, nursery: Nursery, number: int) -> None:
        self._ground = ground
        self._nursery = nursery
        self._number = number
        self._dice = random.Random(number)
        self._folder: Path = ground.folder / f"trial-{number}"
        self._effects = Effects(self._folder)
        self._order = Order(
            bootstrap=ground.broker.bootstrap,
            store=ground.redis_settings,
            prefix=f"crash{number}.",
            folder=str(self._folder),
            ordering=self._dice.choice(ORDERINGS),
        )
        self._slowness = self._order.lease
        """Seconds of which a slow job takes about half."""
        self._patience = PATIENCE
        self._points = points_of(number)
        self._store: IdempotencyRepository = ground.store
        self._jobs: list[Job] = []
        """Of earlier lives."""
        self._figures = Figures(trials=1)

    async def run(self) -> Figures:
        """Lives and deaths, then the verdict.

        Raises:
            ViolationError: A promise was broken.
        """
        self._folder.mkdir()
        self._effects.prepare()
        async with self._opened(), self._ground.topic_set(self._order.prefix) as topics:
            for life, point in enumerate(self._points):
                await self._die(topics, f"{self._number}.{life}", point)
            seen = self._completed_so_far()
            await self._publish(topics, f"{self._number}.last")
            await self._settle_all(topics)
            await self._look(topics)
            self._figures["completed_before_the_end"] += seen
            self._figures.update(await self._verdict(topics))
        return self._figures

    async def _die(self, topics: Topics, name: str, point: CrashPoint) -> None:
        """A life that ends at `point`."""
        for place in range(TRIES):
            await self._publish(topics, f"{name}.{place}")
            died = await self._live(topics, point)
            await self._look(topics)
            if died:
                return

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        """With what the trial needs beside its topics."""
        self._completed = CompletedKeys(self._store, self._effects, f"{self._order.key_prefix}:")
        yield

    def _completed_so_far(self) -> int:
        return len(self._completed)

    async def _look(self, topics: Topics) -> None:
        """Judge what there is while no worker lives."""
        await self._completed.look(nobody_lives=True)

    async def _verdict(self, topics: Topics) -> Figures:
        """Judge what there is in the end."""
        return await judge(topics, self._effects, self._order.key_prefix, self._store)

    async def _finished(self, topics: Topics) -> bool:
        """Whether nothing is left to do."""
        return await topics.settled(self._order.group)

    async def _publish(self, topics: Topics, name: str) -> None:
        new = list(handful(self._dice, name, self._slowness))
        await topics.publish([*new, *self._dice.sample(self._jobs, min(AGAIN, len(self._jobs)))])
        self._jobs += new

    async def _live(self, topics: Topics, point: CrashPoint) -> bool:
        """One worker until it dies at `point`, or has settled all without coming by there; whether it died."""
        async with AsyncExitStack() as stack:
            worker = await self._start(point, self._occurrence(point))
            if self._is_accompanied(point):
                stack.push_async_callback(self._leave, await self._start())
            if point in AT_THE_END | TAKEN_AWAY:
                await self._until(lambda: self._has_begun(worker), worker)
            if point in AT_THE_END:
                worker.send_signal(signal.SIGTERM)
            elif point in TAKEN_AWAY:
                stack.push_async_callback(self._leave, await self._start())
            await self._until_finished(topics, worker)
            if worker.running:
                await self._leave(worker)
            status = await worker.ended
        if status == -signal.SIGKILL:
            self._figures.update({"kills": 1, f"kills:{point.value}": 1})
            return True
        if status == 0:
            self._figures.update({"not_reached": 1, f"not_reached:{point.value}": 1})
            return False
        raise ViolationError(f"a worker ended with {status}:\n{last_words(self._folder)}")

    def _is_accompanied(self, point: CrashPoint) -> bool:
        """Whether another worker, which does not die, is there from the begin."""
        return False

    def _occurrence(self, point: CrashPoint) -> int:
        occurrence = self._dice.randint(1, 3)
        return occurrence if point in OFTEN else 1

    async def _settle_all(self, topics: Topics) -> None:
        worker = await self._start()
        began = time.monotonic()
        await self._until_finished(topics, worker)
        self._figures["settled_after_ms"] += int((time.monotonic() - began) * 1000)
        if await self._leave(worker) != 0:
            raise ViolationError(f"the last worker ended badly:\n{last_words(self._folder)}")

    async def _start(self, point: CrashPoint | None = None, occurrence: int = 1) -> Forked:
        point_name = point.value if point is not None else ""
        return await self._nursery.start(replace(self._order, point=point_name, occurrence=occurrence))

    async def _leave(self, worker: Forked) -> int:
        try:
            return await worker.end(signal.SIGTERM)
        except TimeoutError:
            raise ViolationError(f"a worker does not drain:\n{last_words(self._folder)}") from None

    async def _has_begun(self, worker: Forked) -> bool:
        pid = await worker.pid
        return any(line.pid == pid for line in self._effects.lines())

    async def _until_finished(self, topics: Topics, worker: Forked) -> None:
        try:
            await self._until(lambda: self._finished(topics), worker)
        except ViolationError as error:
            raise ViolationError(f"committed: {await topics.behind(self._order.group)}; {error}") from None

    async def _until(self, fact: Callable[[], Awaitable[bool]], worker: Forked) -> None:
        """Return once `fact` holds, or `worker` has ended."""
        give_up_at = time.monotonic() + self._patience
        for _ in _for_ever():
            if await fact() or not worker.running:
                return
            if time.monotonic() > give_up_at:
                raise ViolationError(f"stuck for {self._patience:g} s:\n{last_words(self._folder)}")
            await asyncio.wait({worker.ended}, timeout=0.15)


def _for_ever() -> Iterator[None]:
    while True:
        yield


CAMPAIGN = Campaign(
    name="crash-points",
    counts="kills",
    says="a process that killed itself by SIGKILL at a named point, on a real Redis and a real Kafka",
    scenarios=(17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27),
    in_test=77,
    at_least=200,
    target=5_000,
    batch=66,
    run=run,
)
