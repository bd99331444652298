"""The workload of a run: events, behavior of their handlers, and settings of the service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any, Final, Literal

from integr8s_idem.config import IdempotencyConfig, KafkaSettings, OnFailure, OnInProgress
from integr8s_idem.config.sections import ServiceSettings
from integr8s_idem.errors import PermanentError
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.handler_calls import HandlerCall, RegisteredHandler
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.reconciliation import Answer, Done, NotDone, Unknown
from tests.simulation.failing import OF_HANDLERS, OF_ROUTER, Kind, RuledFailures, failures_of
from tests.simulation.history import History, Run
from tests.simulation.processes import PROCESS, Process

if TYPE_CHECKING:
    from tests.simulation.overtaking import Overtaking

LEASE: Final = 4.0
"""Seconds."""

SCOPE: Final = "shop"
WHEN: Final = datetime(2030, 1, 1, tzinfo=UTC)


class Placed(BaseEvent):
    """An event that the producer publishes."""

    event_type: Literal["placed"] = "placed"
    number: int = 0
    items: list[str] = []  # noqa: RUF012  # pydantic copies it


class PlacedNow(BaseEvent):
    """The same event in the next version of the code, which has one field more."""

    event_type: Literal["placed"] = "placed"
    number: int = 0
    items: list[str] = []  # noqa: RUF012  # pydantic copies it
    note: str = ""


class Shipped(BaseEvent):
    """An event that the first handler publishes."""

    event_type: Literal["shipped"] = "shipped"
    number: int = 0


TOPICS: Final = ("placed", "shipped")
HANDLERS: Final = {"placed": ("pack", "invoice"), "shipped": ("notify",)}


@dataclass(frozen=True, slots=True)
class Plan:
    """The behavior of the handler for a work."""

    before: float
    """Seconds before its effect."""
    after: float
    failures: int
    """Number of attempts that fail before the effect."""
    late_failures: int
    """Number of attempts that fail after the effect, following the `failures`."""
    hopeless: bool
    mutates: bool
    ships: bool
    ruled: RuledFailures
    """Failures that rules decide about; then there are no others."""


@dataclass(slots=True)
class Habits:
    """Probabilities of handler behavior, which differ between runs: biased runs find more than average ones."""

    slow: float
    failing: float
    late: float
    hopeless: float
    mutating: float
    shipping: float
    deadly: str = ""
    """The id of an event whose handlers kill their process; empty if there is none."""
    ruled: float = 0.0
    """Share of works whose failures a rule knows."""
    calm: bool = False
    """Whether all handlers are fast, so that the run ends."""
    unknown: float = 0.0
    """How often reconcile functions do not know the outcome."""
    overtaking: Overtaking | None = None
    """The retry topics of the run, if it has any."""

    @staticmethod
    def of(random: Random) -> Habits:
        def some(often: float, most: float) -> float:
            return random.uniform(0, most) if random.random() < often else 0.0

        return Habits(
            some(0.6, 0.4),
            some(0.6, 0.5),
            some(0.5, 0.4),
            some(0.3, 0.3),
            some(0.4, 0.8),
            some(0.5, 0.8),
            f"e{random.randrange(8)}" if random.random() < 0.3 else "",
        )


def plan_of(seed: int, handler: str, event_id: str, habits: Habits) -> Plan:
    """Return the plan of a work, which is the same for every attempt and worker."""
    random = Random(f"{seed}/{handler}/{event_id}")  # a simulation
    delayed = None if habits.overtaking is None else habits.overtaking.failures_of(handler, event_id)
    ruled = delayed or failures_of(seed, handler, event_id, habits.ruled)
    is_ruled = ruled.kind is not Kind.NONE

    def seconds() -> float:
        slow = random.random() < habits.slow and not habits.calm
        return random.uniform(LEASE / 2, LEASE * 2) if slow else random.expovariate(5)

    plan = Plan(
        before=seconds(),
        after=random.choice((0.0, 0.0, seconds())),
        failures=random.randint(1, 2) if random.random() < habits.failing else 0,
        late_failures=random.random() < habits.late,
        hopeless=random.random() < habits.hopeless,
        mutates=random.random() < habits.mutating,
        ships=handler == "pack" and random.random() < habits.shipping,
        ruled=ruled,
    )
    return replace(plan, failures=0, late_failures=0, hopeless=False) if is_ruled else plan


@dataclass(frozen=True, slots=True)
class Handlers:
    """Runs handlers as planned, in place of a Dishka container."""

    seed: int
    habits: Habits
    history: History
    kill: Callable[[Process], None]
    """Kills the process that handles a deadly event."""
    begun: Callable[[Run, int], None]
    """Called with each run, and with the number of its event."""

    async def __call__(self, handler: RegisteredHandler, call: HandlerCall) -> Any:
        process = PROCESS.get()
        assert process is not None
        await call.check_start()  # as each `Invoke`: a process may have stalled since its reconcile function answered
        event, attempt = call.event, call.attempt
        event_id = event.event_id
        if self.history.reconciles or self.habits.overtaking is not None:
            # An earlier attempt may have changed the event, and another worker has to find the same plan.
            event_id = attempt.label.removeprefix(f"{event.event_type}:")
        plan = plan_of(self.seed, handler.name, event_id, self.habits)
        if handler.is_reconcile:
            return await self._reconcile(plan, handler.name, call)
        number: int = getattr(event, "number")  # noqa: B009  # any kind
        run = self.history.begin(process, attempt, f"{handler.name} {number}")
        self.begun(run, number)
        how = "returned"
        # Harmless in the final phase, in which processes are not restarted.
        is_deadly = event.event_id == self.habits.deadly and not self.habits.calm
        try:
            if is_deadly:
                await asyncio.sleep(0.3)
                self.kill(process)
                await asyncio.sleep(LEASE)  # the process is dead before this ends
            return await self._work(plan, call, run)
        except asyncio.CancelledError:
            how = "cancelled"
            raise
        except Exception as error:
            how = type(error).__name__
            raise
        finally:
            self.history.end(run, how)

    async def _work(self, plan: Plan, call: HandlerCall, run: Run) -> str:
        number = run.attempt
        if plan.mutates:
            # Handlers may change their event; the library must not read it again.
            call.event.__dict__["event_id"] = f"{call.event.event_id}-changed"
            call.event.__dict__["items"] = ["changed"]
        await asyncio.sleep(plan.before)
        plan.ruled.raise_for(number, late=False)
        if plan.hopeless:
            raise PermanentError("as planned")
        if number <= plan.failures:
            raise ValueError("as planned")
        self.history.effect(run)
        await asyncio.sleep(plan.after)
        plan.ruled.raise_for(number, late=True)
        if number <= plan.failures + plan.late_failures:
            raise ValueError("as planned, after the effect")
        if plan.ships:
            _ship(call)
        return f"{run.key} at {run.fence}"

    async def _reconcile(self, plan: Plan, handler: str, call: HandlerCall) -> Answer:
        """Look for the effect, as a reconcile function that finds each effect that has happened."""
        attempt = call.attempt
        random = Random(f"{self.seed}/{handler}/{attempt.label}/{attempt.number}/reconcile")  # a simulation
        self.history.note("reconcile", attempt.label, attempt.number, attempt.fence)
        await asyncio.sleep(random.expovariate(5))
        if not self.habits.calm and random.random() < self.habits.unknown:
            if random.random() < 0.5:
                raise OSError("as planned, instead of an answer")
            return Unknown(retry_after=random.uniform(0, 2))
        if not self.history.has_effect(attempt):
            return NotDone()
        if plan.ships:
            _ship(call)
        return Done(f"{attempt.key} as found by {attempt.fence}")


def _ship(call: HandlerCall) -> None:
    event = call.event
    call.outgoing.publish(Shipped(number=getattr(event, "number", 0), timestamp=WHEN, aggregate_id=event.aggregate_id))


@lru_cache(maxsize=512)
def make_router(placed: type[BaseEvent], *, reconciles: bool, overtaken: frozenset[str]) -> EventRouter:
    """Return the router of a version of the code.

    Args:
        placed: The class of the first event that this version knows.
        reconciles: Whether the handlers of that event have reconcile functions.
        overtaken: Names of the handlers whose delayed retries wait in retry topics.
    """

    async def never(event: BaseEvent) -> Any:
        raise AssertionError("unreachable: `Handlers` runs the plan instead")

    router = EventRouter(failures=OF_ROUTER)
    for event, names in ((placed, HANDLERS["placed"]), (Shipped, HANDLERS["shipped"])):
        for name in names:
            router.on(
                event,
                name=name,
                failures=OF_HANDLERS,
                reconcile=never if reconciles and event is placed else None,
                delayed_retries="overtake" if name in overtaken else "block",
            )(never)
    return router


VERSIONS: Final = (Placed, PlacedNow)
"""The class of the first event by version of the code: this one, and the next one."""


def versions_of(seed: int) -> Callable[[], int]:
    """Return a function for the version of each process and event; in half of all runs there is only one.

    It has a random generator of its own, so that the other choices of a seed do not depend on it.
    """
    random = Random(f"{seed}/versions")  # a simulation
    share = random.choice((0.0, random.uniform(0.2, 0.8)))
    return lambda: int(random.random() < share)


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of the service in a run."""

    config: IdempotencyConfig
    kafka: KafkaSettings
    service: ServiceSettings


@lru_cache(maxsize=512)
def _setup(
    ordering: str,
    on_failure: str,
    on_in_progress: str,
    attempts: int,
    concurrency: int,
    most: int,
    tiers: tuple[str, ...],
    ttl: int,
) -> Setup:
    return Setup(
        IdempotencyConfig(
            processing_timeout_seconds=LEASE,
            on_failure=OnFailure(on_failure),
            on_in_progress=OnInProgress(on_in_progress),
            max_attempts=attempts,
            default_ttl_seconds=ttl,
        ),
        KafkaSettings(
            session_timeout_seconds=3,
            heartbeat_interval_seconds=0.5,
            rebalance_timeout_seconds=3,
            request_timeout_seconds=2,
        ),
        ServiceSettings.model_validate(
            {
                "ordering": ordering,
                "concurrency": concurrency,
                "max_in_flight": most,
                "retry_initial_seconds": 0.2,
                "retry_max_seconds": 1.0,
                "commit_interval_seconds": 1.0,
                "drain_timeout_seconds": 1.5,
                "retry_topics": tiers,
            }
        ),
    )


def draw_setup(random: Random, overtaking: Overtaking | None) -> Setup:
    """Draw the settings of a run."""
    ttl = overtaking.ttl if overtaking is not None else None
    return _setup(
        random.choice(("partition", "key", "none")),
        random.choice(("retry", "retry", "retry", "block")),
        random.choice(("wait", "wait", "raise")),
        random.choice((2, 3, 5)),
        random.choice((1, 2, 8)),
        random.choice((1, 3, 10, 50)),
        overtaking.tiers if overtaking is not None else (),
        ttl or 3600,
    )
