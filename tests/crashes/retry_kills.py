"""Campaign `retry-kills`: workers die at each step of a delayed retry, on a real broker and a real Redis.

A trial is a group with its own topics.  It runs six workers, one after the other.  Before each of them, new events of
every kind and duplicates of earlier ones are published.  Five workers die by SIGKILL at steps that are derived from the
trial's number; in every fourth trial, a second worker runs beside those that die.  The last one must settle all events
and all copies.  In half of the trials, another worker is killed while copies wait, and whenever no worker runs, the
records of events whose copies wait are deleted, as if they had expired.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from integr8s_idem import IdempotencyStatus
from integr8s_idem.testing.crash_points import CrashPoint
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.crashes.forks import ForkedWorker, ForkServer
from tests.crashes.ground import Servers, Topics
from tests.crashes.judging import CompletedKeys, judge_dead_letters, log_tail
from tests.crashes.points import ORDERINGS, run_trials
from tests.crashes.points import POINTS as CRASH_POINTS
from tests.crashes.retry_copies import Copies
from tests.crashes.retry_jobs import RetryJob, RetryOrder, jobs_of_each_kind, kind_of, retry_topics
from tests.crashes.retry_judging import attempts_of, judge_copies, judge_runs
from tests.crashes.retry_steps import STEPS
from tests.support.effects import Effects
from tests.support.replays import SECRET

MODULE: Final = "tests.crashes.retrying"

KILLS: Final = 5
"""Workers of a trial that die at a step."""
DUPLICATES: Final = 2
"""Duplicates of earlier events that are published before each worker starts."""
TRIES: Final = 3
"""Attempts to reach one step."""
CONCURRENT_TRIALS: Final = 12
PATIENCE: Final = 90.0
"""Seconds after which a worker is considered stuck."""
LONGEST_WAIT: Final = 2.5
"""Maximum number of seconds until a worker is killed while copies wait."""

WAITING: Final = "waiting"
"""The worker is killed from outside when only copies wait."""
NEVER_REACHED: Final = frozenset(
    {CrashPoint.BEFORE_COMMIT, CrashPoint.IN_COMMIT, CrashPoint.AFTER_COMMIT}
    | {CrashPoint.BEFORE_PUBLISH, CrashPoint.AFTER_PUBLISH}
    | {CrashPoint.BEFORE_RELEASE, CrashPoint.IN_RELEASE, CrashPoint.AFTER_RELEASE}
)
"""Crash points that the steps of `retry_steps` distinguish further, or that no handler here reaches."""
POINTS: Final = (*(point.value for point in CRASH_POINTS if point not in NEVER_REACHED), *STEPS, WAITING)

DRAINS: Final = frozenset({"in_drain", "before_leave", "after_leave"})
REVOKES: Final = frozenset({"before_revoke", "after_revoke"})
FREQUENT: Final = frozenset(
    (
        *(f"{when}_{call}" for when in ("before", "in", "after") for call in ("reserve", "complete", "schedule")),
        *("before_copy", "in_copy", "after_copy", "after_scheduled_verdict"),
        *("before_handler", "in_handler_before_effect", "before_failure"),
    )
)
"""Steps that every worker reaches at least three times, however its calls are batched."""


def points_of(number: int) -> list[str]:
    """Return the steps at which the workers of a trial die; `ROUND` trials in a row cover each step once."""
    points = list(POINTS)
    random.Random(number // ROUND).shuffle(points)
    start = number % ROUND * KILLS
    return (points + points)[start : start + KILLS]


ROUND: Final = -(-len(POINTS) // KILLS)


class Trial:
    """Workers that die at steps of delayed retries, and a last one that settles everything."""

    def __init__(
        self,
        servers: Servers,
        fork_server: ForkServer,
        number: int,
        *,
        points: Sequence[str] = (),
        bug: str = "",
    ) -> None:
        """
        Args:
            servers: Shared by all trials.
            fork_server: Starts workers of `MODULE`.
            number: Seeds the trial.
            points: The steps at which workers die, instead of those of the number.
            bug: A bug from `tests.crashes.retry_bugs` to inject.
        """
        self._servers = servers
        self._fork_server = fork_server
        self._number = number
        self._rng = random.Random(number)
        self._lets_records_expire = number % 2 == 0
        self._points = points or [*points_of(number), *[WAITING] * self._lets_records_expire]
        self._folder: Path = servers.folder / f"retries-{number}"
        self._effects = Effects(self._folder)
        self._order = RetryOrder(
            bootstrap=servers.broker.bootstrap,
            store=servers.redis_settings,
            prefix=f"retries{number}.",
            folder=str(self._folder),
            ordering=self._rng.choice(ORDERINGS),
            secret=self._rng.choice(["", SECRET]),
            bug=bug,
        )
        self._has_companion = number % 4 == 3
        self._completed = CompletedKeys(servers.store, self._effects, f"{self._order.key_prefix}:")
        self._jobs: list[RetryJob] = []
        self._expired = Counter[str]()
        self._figures = Figures(trials=1, kills=0)

    async def run(self) -> Figures:
        """Run all workers and check the results.

        Raises:
            ViolationError: A promise was broken.
        """
        self._folder.mkdir()
        self._effects.prepare()
        prefix = self._order.prefix
        topic_set = self._servers.topic_set(prefix, retry=retry_topics(self._order.group))
        async with topic_set as topics, Copies.open(self._servers, prefix) as copies:
            for kill, point in enumerate(self._points):
                await self._kill(topics, copies, f"{self._number}.{kill}", point)
            await self._publish(topics, f"{self._number}.last")
            await self._settle_all(topics, copies)
            self._figures.update(await self._judge(topics, copies))
        return self._figures

    async def _kill(self, topics: Topics, copies: Copies, name: str, point: str) -> None:
        """Start workers until one dies at `point`."""
        for attempt in range(TRIES):
            await self._publish(topics, f"{name}.{attempt}")
            died = await self._run_worker(topics, copies, point)
            await self._completed.check(no_worker_running=True)
            if self._lets_records_expire:
                await self._let_records_expire(topics, copies)
            if died:
                return

    async def _publish(self, topics: Topics, name: str) -> None:
        new = list(jobs_of_each_kind(self._rng, name, self._order.lease))
        # Nothing tells a duplicate that reaches the source topic after its record has expired that it is one.
        known = [job for job in self._jobs if job.work not in self._expired]
        await topics.publish([*new, *self._rng.sample(known, min(DUPLICATES, len(known)))])
        self._jobs += new

    async def _let_records_expire(self, topics: Topics, copies: Copies) -> None:
        """Delete the records of events that only their copies know about."""
        if not await topics.settled(self._order.group):
            return
        waiting = await copies.waiting()
        last = attempts_of(self._effects.lines(), waiting.keys())
        keys = {line.work: line.key for line in self._effects.lines()}
        # Another copy of an earlier attempt would continue from that one.
        works = [work for work, attempts in waiting.items() if attempts == {last[work]}]
        records = await self._servers.store.get([keys[work] for work in works])
        expiring = [
            work for work, record in zip(works, records, strict=True) if record is not None and record.is_scheduled
        ]
        await self._servers.store.delete([keys[work] for work in expiring])
        self._expired.update(expiring)

    async def _run_worker(self, topics: Topics, copies: Copies, point: str) -> bool:
        """Run a worker until it dies at `point` or everything is settled, and return whether it died."""
        async with AsyncExitStack() as stack:
            worker = await self._start(point, self._rng.randint(1, 3) if point in FREQUENT else 1)
            if self._has_companion:
                stack.push_async_callback(self._stop, await self._start())
            if point in DRAINS | REVOKES:
                await self._until(partial(self._has_failed_or_is_settled, topics, copies, worker), worker)
            if point in DRAINS:
                worker.send_signal(signal.SIGTERM)
            elif point in REVOKES:
                stack.push_async_callback(self._stop, await self._start())
            elif point == WAITING:
                await self._until(partial(topics.settled, self._order.group), worker)
                await asyncio.wait({worker.ended}, timeout=self._rng.uniform(0, LONGEST_WAIT))
                worker.send_signal(signal.SIGKILL)
            await self._until(partial(self._is_settled, topics, copies), worker)
            if worker.running:
                await self._stop(worker)
            status = await worker.ended
        return self._note_end(status, point)

    def _note_end(self, status: int, point: str) -> bool:
        if status == -signal.SIGKILL:
            self._figures.update({"kills": 1, f"kills:{point}": 1})
            return True
        if status == 0:
            self._figures.update({"not_reached": 1, f"not_reached:{point}": 1})
            return False
        raise ViolationError(f"a worker exited with status {status}:\n{log_tail(self._folder)}")

    async def _settle_all(self, topics: Topics, copies: Copies) -> None:
        worker = await self._start()
        began = time.monotonic()
        await self._until(partial(self._is_settled, topics, copies), worker)
        self._figures["settled_after_ms"] += int((time.monotonic() - began) * 1000)
        if await self._stop(worker) != 0:
            raise ViolationError(f"the last worker did not exit cleanly:\n{log_tail(self._folder)}")

    async def _is_settled(self, topics: Topics, copies: Copies) -> bool:
        # In this order: an event is settled after its copy has been published.
        return await topics.settled(self._order.group) and await copies.are_settled()

    async def _has_failed_or_is_settled(self, topics: Topics, copies: Copies, worker: ForkedWorker) -> bool:
        """Whether a handler has failed in `worker`, or another worker has done all its work."""
        pid = await worker.pid
        if any(line.pid == pid and line.what == "failed" for line in self._effects.lines()):
            return True
        return await self._is_settled(topics, copies)

    async def _start(self, point: str = "", occurrence: int = 1) -> ForkedWorker:
        point = "" if point == WAITING else point
        return await self._fork_server.start(replace(self._order, point=point, occurrence=occurrence))

    async def _stop(self, worker: ForkedWorker) -> int:
        try:
            return await worker.end(signal.SIGTERM)
        except TimeoutError:
            raise ViolationError(f"a worker does not drain:\n{log_tail(self._folder)}") from None

    async def _until(self, condition: Callable[[], Awaitable[bool]], worker: ForkedWorker) -> None:
        """Wait until `condition` holds or `worker` has exited."""
        give_up_at = time.monotonic() + PATIENCE
        while worker.running and not await condition():
            if time.monotonic() > give_up_at:
                raise ViolationError(f"stuck for {PATIENCE:g} s:\n{log_tail(self._folder)}")
            await asyncio.wait({worker.ended}, timeout=0.2)

    async def _judge(self, topics: Topics, copies: Copies) -> Figures:
        """Check the final state."""
        await self._completed.check(no_worker_running=True)
        lines = self._effects.lines()
        hopeless = {work for work in topics.published if kind_of(work) == "hopeless"}
        # `judge_runs` checks attempts and fences of all runs, not only of those with an effect.
        figures = self._effects.judge(set(topics.published), given_up=hopeless, records_lost=True)
        if done := self._effects.done() & hopeless:
            raise ViolationError(f"hopeless events had an effect: {sorted(done)}")
        figures.update(judge_runs(lines, self._expired, self._figures["kills"]))
        figures.update(judge_copies(await copies.all(), lines, signed=bool(self._order.secret)))
        figures["dead_letter_copies"] = await judge_dead_letters(topics, hopeless)
        records = [record async for record in self._servers.store.scan(f"{self._order.key_prefix}:")]
        stuck = [record.key for record in records if record.status is IdempotencyStatus.PROCESSING]
        if stuck:
            raise ViolationError(f"records that are still PROCESSING: {stuck}")
        figures.update(self._effects.judge_records(records))
        return figures


def run(first: int, count: int) -> Figures:
    """Run the trials numbered `first` to `first + count - 1`."""
    return asyncio.run(run_trials(range(first, first + count), Trial, CONCURRENT_TRIALS, module=MODULE))


CAMPAIGN: Final = Campaign(
    name="retry-kills",
    counts="kills",
    says="a worker is killed with SIGKILL at a step of a delayed retry, on a real Redis and a real Kafka",
    scenarios=(145, 147, 148),
    in_test=3,
    at_least=3 * KILLS,
    target=1_000,
    batch=2 * ROUND,
    run=run,
)
