"""Events whose retries wait in retry topics, their handler, and the order of a worker that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Any, Final, Literal

from pydantic import SecretStr

from integr8s_idem import Attempt, BaseEvent, EventRouter
from integr8s_idem.config import ReplaySettings, ServiceSettings
from integr8s_idem.errors import RetryAfter
from integr8s_idem.failures import retry_later
from integr8s_idem.testing.crash_points import CrashPoint
from tests.crashes.orders import SERVICE, Order
from tests.crashes.retry_steps import StepPlan
from tests.support.effects import Effects

TIERS: Final = ("1s", "2s")
SOON: Final = 0.3
"""Seconds: less than the first tier."""
LATER: Final = 1.4
"""Seconds: between the two tiers."""
FAR: Final = 4.6
"""Seconds: more than two waits in the longest tier, so that its copy is copied again."""

HOPELESS_ATTEMPTS: Final = 3

Kind = Literal["awaits", "instant", "once", "often", "far", "late", "slow", "hopeless"]
KINDS: Final[tuple[Kind, ...]] = ("awaits", "instant", "once", "often", "far", "late", "slow", "hopeless")

DELAYS: Final[dict[Kind, tuple[float, ...]]] = {
    "awaits": (),
    "instant": (SOON,),
    "once": (LATER,),
    "often": (SOON, LATER, SOON),
    "far": (FAR,),
    "late": (SOON,),
    "slow": (LATER,),
    "hopeless": (),
}
"""The delay of each failure of an event, in seconds; a hopeless event always fails."""


class RetryJob(BaseEvent):
    """A request to do `work`."""

    event_type: Literal["job"] = "job"
    work: str
    kind: Kind
    """instant: the handler never awaits.  late: it fails after its effect.  slow: it takes long enough for a renewal.
    hopeless: it fails until its attempts are used up."""
    seconds: float = 0.0
    """Duration of the handler before its effect."""


class HopelessError(Exception):
    """A hopeless job has failed."""


@dataclass(frozen=True)
class RetryOrder(Order):
    """Instructions for a worker with retry topics."""

    secret: str = ""
    """Secret that signs copies; empty for none."""

    @property
    def service(self) -> ServiceSettings:
        return super().service.model_copy(update={"retry_topics": TIERS})

    @property
    def replay(self) -> ReplaySettings:
        return ReplaySettings(secret=(SecretStr(self.secret),) if self.secret else ())


def retry_topics(group: str) -> list[str]:
    """Return the names of the retry topics, without the prefix of the trial."""
    return [f"job.{group}.retry.{tier}" for tier in TIERS]


def group_of(prefix: str) -> str:
    return f"{prefix}{SERVICE}"


def jobs_of_each_kind(rng: Random, name: str, lease: float) -> Iterator[RetryJob]:
    """Return one job of each kind, shuffled."""
    kinds = list(KINDS)
    rng.shuffle(kinds)
    for number, kind in enumerate(kinds):
        seconds = {"slow": lease * rng.uniform(0.45, 0.7), "instant": 0.0}.get(kind, rng.uniform(0.0, 0.05))
        yield RetryJob(work=f"{name}:{kind}", kind=kind, seconds=seconds, aggregate_id=f"{name}:{number % 3}")


def most_runs(work: str) -> int:
    """Return how often an event runs if no process dies."""
    kind = kind_of(work)
    return HOPELESS_ATTEMPTS if kind == "hopeless" else len(DELAYS[kind]) + 1


def kind_of(work: str) -> Kind:
    name = work.rpartition(":")[2]
    return next(kind for kind in KINDS if kind == name)


class RetryHandler:
    """Fails as planned, with the steps of a plan around its failures and its effect."""

    def __init__(self, effects: Effects, plan: StepPlan) -> None:
        self._effects = effects
        self._plan = plan
        self.router = EventRouter()
        rules = [retry_later(HopelessError, delay=timedelta(seconds=SOON), attempts=HOPELESS_ATTEMPTS)]
        self.router.on(RetryJob, name="jobs", delayed_retries="overtake", failures=rules)(self._handle)

    async def _handle(self, call: Any) -> str:
        job, attempt = call.event, call.attempt
        assert isinstance(job, RetryJob)
        self._effects.note("begin", job.work, attempt)
        if job.kind != "instant":
            await asyncio.sleep(job.seconds)
        failed = sum((line.what, line.work) == ("failed", job.work) for line in self._effects.lines())
        fails = job.kind == "hopeless" or failed < len(DELAYS[job.kind])
        if not fails or job.kind == "late":
            self._plan.crashes.reached(CrashPoint.IN_HANDLER_BEFORE_EFFECT)
            self._effects.apply(job.work, attempt)
            self._plan.crashes.reached(CrashPoint.IN_HANDLER_AFTER_EFFECT)
        if fails:
            self._fail(job, attempt, failed)
        self._effects.note("end", job.work, attempt)
        return self._effects.receipt(job.work, attempt)

    def _fail(self, job: RetryJob, attempt: Attempt, failed: int) -> None:
        self._effects.note("failed", job.work, attempt)
        self._plan.note_failure(job.work, attempt.number)
        self._plan.reached("before_failure")
        if job.kind == "hopeless":
            raise HopelessError(f"{job.work} always fails")
        raise RetryAfter(timedelta(seconds=DELAYS[job.kind][failed]))
