"""The work that is done while processes die: events, their handler, and what a test knows of them."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from random import Random
from typing import Any, Final, Literal

from integr8s_idem import Attempt, BaseEvent, EventRouter, PermanentError
from integr8s_idem.handlers.router import HandlerCall
from integr8s_idem.testing.crash_points import CrashPlan, CrashPoint, kill_myself
from tests.support.effects import Effects

Kind = Literal["plain", "flaky", "poison", "slow", "talking", "deadly"]


class Job(BaseEvent):
    """Some work."""

    event_type: Literal["job"] = "job"
    work: str
    kind: Kind = "plain"
    """flaky: its first run fails.  poison: every run fails for good, before the effect.  talking: it publishes.
    deadly: every run kills its process."""
    seconds: float = 0.0
    """How long its handler takes before the effect."""


class JobDone(BaseEvent):
    """What a talking job leaves behind."""

    event_type: Literal["job_done"] = "job_done"
    work: str
    step: int = 0
    """Where one job leaves several."""


class Boss:
    """Handles jobs: the effect once, with the points of a plan around it."""

    def __init__(self, effects: Effects, plan: CrashPlan) -> None:
        self._effects = effects
        self._plan = plan
        self.router = EventRouter()
        self.router.on(Job, name="boss")(self._handle)

    async def _handle(self, call: Any) -> str:
        job, attempt = call.event, call.attempt
        assert isinstance(job, Job)
        self._effects.note("begin", job.work, attempt)
        await asyncio.sleep(job.seconds)
        self._fail(job, attempt)
        self._plan.reached(CrashPoint.IN_HANDLER_BEFORE_EFFECT)
        self._effects.apply(job.work, attempt)
        self._plan.reached(CrashPoint.IN_HANDLER_AFTER_EFFECT)
        if job.kind == "talking":
            call.outgoing.publish(JobDone(work=job.work))
        self._effects.note("end", job.work, attempt)
        return self._effects.receipt(job.work, attempt)

    def _fail(self, job: Job, attempt: Attempt) -> None:
        if job.kind == "poison":
            raise PermanentError(f"{job.work} can never be done")
        if job.kind == "flaky" and attempt.number == 1:
            raise RuntimeError(f"{job.work} cannot be done now")
        if job.kind == "deadly":
            kill_myself()


async def with_the_call(handler: Any, call: HandlerCall) -> Any:
    """Calls a handler with all there is, instead of a container."""
    return await handler.function(call)


class Stream:
    """Jobs without end: of a few aggregates, numbered within each, copies of earlier ones among them."""

    AGGREGATES: Final = 24
    LAST: Final = 100
    """Copies are of one of so many jobs before."""

    def __init__(self, dice: Random, lease: float) -> None:
        self._dice = dice
        self._lease = lease
        self._numbers: Counter[str] = Counter()
        self._latest: deque[Job] = deque(maxlen=self.LAST)

    def __next__(self) -> Job:
        if self._latest and self._dice.random() < 0.2:
            return self._dice.choice(self._latest)
        aggregate = f"a{self._dice.randrange(self.AGGREGATES)}"
        kind = self._dice.choices(KINDS, weights=(80, 6, 2, 2, 10))[0]
        work = f"{aggregate}:{self._numbers[aggregate]}:{kind}"
        self._numbers[aggregate] += 1
        seconds = _seconds(kind, self._dice, self._lease)
        job = Job(work=work, kind=kind, seconds=seconds, aggregate_id=aggregate)
        self._latest.append(job)
        return job

    def __iter__(self) -> Iterator[Job]:
        return self


def out_of_order(effects: Effects) -> dict[str, list[int]]:
    """Aggregates of a stream whose jobs had their first effects in another order than that of their numbers."""
    first: defaultdict[str, list[int]] = defaultdict(list)
    seen: set[str] = set()
    for line in effects.lines():
        if line.what == "effect" and line.work not in seen:
            seen.add(line.work)
            aggregate, number, _ = line.work.split(":")
            first[aggregate].append(int(number))
    return {aggregate: numbers for aggregate, numbers in first.items() if numbers != sorted(numbers)}


def handful(dice: Random, name: str, lease: float) -> Iterator[Job]:
    """One job of each kind and a few copies, in some order."""
    jobs = [
        Job(work=f"{name}:{kind}", kind=kind, seconds=_seconds(kind, dice, lease), aggregate_id=f"{name}:{place % 3}")
        for place, kind in enumerate(KINDS)
    ]
    jobs += dice.sample(jobs, 2)
    dice.shuffle(jobs)
    return iter(jobs)


KINDS: tuple[Kind, ...] = ("plain", "flaky", "poison", "slow", "talking")


def _seconds(kind: Kind, dice: Random, lease: float) -> float:
    # Long enough for a renewal, which is due after a third of the lease.
    return lease * dice.uniform(0.45, 0.7) if kind == "slow" else dice.uniform(0.0, 0.05)
