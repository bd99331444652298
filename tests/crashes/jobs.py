"""Events and handlers for crash tests, and the order that their effects must have."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from random import Random
from typing import Any, Final, Literal

from integr8s_idem import Attempt, BaseEvent, EventRouter, PermanentError
from integr8s_idem.failures import discard
from integr8s_idem.handlers.handler_calls import HandlerCall
from integr8s_idem.reconciliation import Answer, Done, NotDone
from integr8s_idem.testing.crash_points import CrashPlan, CrashPoint, kill_myself
from tests.support.effects import Effects

Kind = Literal["plain", "flaky", "poison", "slow", "talking", "deadly", "withdrawn"]


class Job(BaseEvent):
    """A request to do `work`."""

    event_type: Literal["job"] = "job"
    work: str
    kind: Kind = "plain"
    """flaky: the first run fails.  poison: every run fails permanently, before the effect.  talking: the handler
    publishes an event.  deadly: every run kills its process.  withdrawn: every run fails after the effect, with an
    error that a rule discards."""
    seconds: float = 0.0
    """Duration of the handler before its effect."""


class JobDone(BaseEvent):
    """Published by the handler of a `talking` job."""

    event_type: Literal["job_done"] = "job_done"
    work: str
    step: int = 0
    """Distinguishes several events of one job."""


class WithdrawnError(Exception):
    """A job is not needed any more."""


class JobHandler:
    """Handles jobs, with the crash points of a plan around the effect."""

    def __init__(self, effects: Effects, plan: CrashPlan, *, reconciles: bool = False) -> None:
        """`reconciles`: whether the handler has a reconcile function, which finds each effect that has happened."""
        self._effects = effects
        self._plan = plan
        self.router = EventRouter()
        find = self._find if reconciles else None
        self.router.on(Job, name="jobs", failures=[discard(WithdrawnError)], reconcile=find)(self._handle)

    async def _find(self, call: Any) -> Answer:
        job, attempt = call.event, call.attempt
        self._effects.note("asked", job.work, attempt)
        if all((line.what, line.work) != ("effect", job.work) for line in self._effects.lines()):
            return NotDone()
        if job.kind == "talking":
            call.outgoing.publish(JobDone(work=job.work))
        return Done(self._effects.receipt(job.work, attempt))

    async def _handle(self, call: Any) -> str:
        job, attempt = call.event, call.attempt
        assert isinstance(job, Job)
        self._effects.note("begin", job.work, attempt)
        await asyncio.sleep(job.seconds)
        self._fail(job, attempt)
        self._plan.reached(CrashPoint.IN_HANDLER_BEFORE_EFFECT)
        self._effects.apply(job.work, attempt)
        self._plan.reached(CrashPoint.IN_HANDLER_AFTER_EFFECT)
        if job.kind == "withdrawn":
            raise WithdrawnError(f"{job.work} was withdrawn")
        if job.kind == "talking":
            call.outgoing.publish(JobDone(work=job.work))
        self._effects.note("end", job.work, attempt)
        return self._effects.receipt(job.work, attempt)

    def _fail(self, job: Job, attempt: Attempt) -> None:
        if job.kind == "poison":
            raise PermanentError(f"{job.work} always fails")
        if job.kind == "flaky" and attempt.number == 1:
            raise RuntimeError(f"{job.work} fails in its first run")
        if job.kind == "deadly":
            kill_myself()


async def invoke_handler(handler: Any, call: HandlerCall) -> Any:
    """Call a handler with its call object, without a container."""
    return await handler.function(call)


class Stream:
    """Endless stream of jobs, numbered within a few aggregates, mixed with duplicates of earlier jobs."""

    AGGREGATES: Final = 24
    LAST: Final = 100
    """Duplicates repeat one of this many latest jobs."""

    def __init__(self, rng: Random, lease: float) -> None:
        self._rng = rng
        self._lease = lease
        self._numbers: Counter[str] = Counter()
        self._latest: deque[Job] = deque(maxlen=self.LAST)

    def __next__(self) -> Job:
        if self._latest and self._rng.random() < 0.2:
            return self._rng.choice(self._latest)
        aggregate = f"a{self._rng.randrange(self.AGGREGATES)}"
        kind = self._rng.choices(KINDS, weights=(80, 6, 2, 2, 10))[0]
        work = f"{aggregate}:{self._numbers[aggregate]}:{kind}"
        self._numbers[aggregate] += 1
        seconds = _seconds(kind, self._rng, self._lease)
        job = Job(work=work, kind=kind, seconds=seconds, aggregate_id=aggregate)
        self._latest.append(job)
        return job

    def __iter__(self) -> Iterator[Job]:
        return self


def out_of_order(effects: Effects) -> dict[str, list[int]]:
    """Return the job numbers of each aggregate whose first effects happened in the wrong order."""
    first: defaultdict[str, list[int]] = defaultdict(list)
    seen: set[str] = set()
    for line in effects.lines():
        if line.what == "effect" and line.work not in seen:
            seen.add(line.work)
            aggregate, number, _ = line.work.split(":")
            first[aggregate].append(int(number))
    return {aggregate: numbers for aggregate, numbers in first.items() if numbers != sorted(numbers)}


def jobs_of_each_kind(rng: Random, name: str, lease: float) -> Iterator[Job]:
    """Return one job of each kind and a few duplicates, shuffled."""
    jobs = [
        Job(work=f"{name}:{kind}", kind=kind, seconds=_seconds(kind, rng, lease), aggregate_id=f"{name}:{index % 3}")
        for index, kind in enumerate(KINDS)
    ]
    jobs += rng.sample(jobs, 2)
    rng.shuffle(jobs)
    return iter(jobs)


KINDS: tuple[Kind, ...] = ("plain", "flaky", "poison", "slow", "talking")


def _seconds(kind: Kind, rng: Random, lease: float) -> float:
    # Slow jobs take long enough for a renewal, which is due after a third of the lease.
    return lease * rng.uniform(0.45, 0.7) if kind == "slow" else rng.uniform(0.0, 0.05)
