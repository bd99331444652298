"""A worker whose handler runs five steps, two of them concurrently, and the moments at which it can die."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, TypeVar
from uuid import uuid4

from dishka import STRICT_VALIDATION, Provider, Scope, make_async_container

from integr8s_idem import Attempt, EventDispatcher, EventRouter, Settings
from integr8s_idem.engine.step_slots import Once, mark_of
from integr8s_idem.engine.steps import Steps
from integr8s_idem.errors import StepInterruptedError
from integr8s_idem.integrations.dishka import (
    EventContextProvider,
    FromDishka,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.records import Completion, ReserveRequest, Verdict
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.testing.crash_points import IN_FLIGHT_SECONDS, CrashingStore, CrashPlan, kill_myself
from integr8s_idem.worker import EventPublisher
from tests.crashes.jobs import Job
from tests.crashes.orders import SERVICE, Order
from tests.support.homes import open_records

T = TypeVar("T")

STEPS: Final = {
    "reserve": Once.AT_LEAST_ONCE,
    "charge": Once.AT_MOST_ONCE,
    "book": Once.AT_LEAST_ONCE,
    "ship": Once.AT_MOST_ONCE,
    "notify": Once.AT_LEAST_ONCE,
}
"""Steps in their order; the second and the third run concurrently."""

CONCURRENT_STEPS: Final = ("charge", "book")
UNIT: Final = "unit"
ASK: Final = "ask-"
"""Prefix of steps that find out whether the effect of an interrupted step happened."""


class Moment(str, Enum):
    """Where in a step a process dies: `before_` a call is sent, or `in_` it, when it was sent but not answered."""

    BEFORE_RESERVE = "before_reserve"
    IN_RESERVE = "in_reserve"
    AFTER_RESERVE = "after_reserve"
    BEFORE_EFFECT = "before_effect"
    """The function of the step has started."""
    AFTER_EFFECT = "after_effect"
    BEFORE_COMPLETE = "before_complete"
    IN_COMPLETE = "in_complete"
    AFTER_COMPLETE = "after_complete"
    AFTER_STEP = "behind"  # the value is part of recorded figures
    """The handler has the result of the step, and has not started the next one."""


BOUNDARIES: Final = (
    *((step, moment) for step in STEPS for moment in Moment),
    *((UNIT, moment) for moment in (Moment.BEFORE_COMPLETE, Moment.IN_COMPLETE, Moment.AFTER_COMPLETE)),
)


@dataclass(frozen=True)
class Line:
    """One line of the journal."""

    what: str
    """begin: a run started.  effect: a step had its effect.  got: the handler has the result of a step.
    interrupted: the handler learned that the step was interrupted."""
    step: str
    id: str
    """Id of the effect; for `begin`, the key of the record."""
    attempt: int
    """Attempt of the run."""


class StepJournal:
    """A file that outlives its writers; each line is synced to disk before the writer continues."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "steps"

    def note(self, what: str, step: str, identifier: str, attempt: int) -> None:
        journal = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(journal, (json.dumps([what, step, identifier, attempt]) + "\n").encode())
            os.fsync(journal)
        finally:
            os.close(journal)

    def lines(self) -> list[Line]:
        text = self._path.read_text() if self._path.exists() else ""
        return [Line(*json.loads(line)) for line in text.splitlines()]


class StepPlan:
    """The moment of a step at which this process dies."""

    def __init__(self, boundary: str) -> None:
        """`boundary`: step and moment, such as `charge:after_reserve`; empty for never."""
        self._boundary = boundary

    def reached(self, step: str, moment: Moment) -> None:
        if self._is_at(step, moment):
            kill_myself()

    async def around(self, verb: str, steps: Sequence[str], call: Callable[[], Awaitable[T]]) -> T:
        """Make a store call for `steps`, and die before, in or after it."""
        before, middle, after = (Moment(f"{place}_{verb}") for place in ("before", "in", "after"))
        for step in steps:
            self.reached(step, before)
        pending = asyncio.ensure_future(call())
        if any(self._is_at(step, middle) for step in steps):
            await asyncio.wait({pending}, timeout=IN_FLIGHT_SECONDS)
            kill_myself()
        answer = await pending
        for step in steps:
            self.reached(step, after)
        return answer

    def _is_at(self, step: str, moment: Moment) -> bool:
        return self._boundary == f"{step}:{moment.value}"


class SteppingStore(CrashingStore):
    """A repository that recognizes the step of a call by the fingerprint, like the records of steps."""

    def __init__(self, inner: IdempotencyRepository, plan: StepPlan) -> None:
        super().__init__(inner, CrashPlan())
        self._steps = plan
        self._marks = {mark_of(step): step for step in STEPS}
        self._names: dict[str, str] = {}
        """Step names by key."""

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        for request in requests:
            self._names[request.key] = self._marks.get(request.fingerprint or b"", _other(request.key))
        names = [self._names[request.key] for request in requests]
        return await self._steps.around("reserve", names, lambda: self._inner.reserve(requests))

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        names = [self._names[completion.reservation.key] for completion in completions]
        return await self._steps.around("complete", names, lambda: self._inner.complete(completions))


def _other(key: str) -> str:
    return "" if ";s" in key else UNIT


@dataclass(frozen=True)
class Receipt:
    """The result of a step."""

    step: str
    id: str


class Warehouse:
    """Handles jobs in five steps; if the work ends with `:asks`, the handler resolves interrupted steps."""

    def __init__(self, journal: StepJournal, plan: StepPlan) -> None:
        self._journal = journal
        self._plan = plan
        self.router = EventRouter()
        self.router.on(Job, name="warehouse")(self.handle)

    async def handle(self, job: Job, steps: FromDishka[Steps], attempt: FromDishka[Attempt]) -> list[Receipt]:
        self._journal.note("begin", UNIT, attempt.key, attempt.number)

        async def step(name: str) -> Receipt:
            return await self._step(name, steps, attempt, asks=job.work.endswith(":asks"))

        reserved = await step("reserve")
        charged, booked = await asyncio.gather(*map(step, CONCURRENT_STEPS))
        return [reserved, charged, booked, await step("ship"), await step("notify")]

    async def _step(self, name: str, steps: Steps, attempt: Attempt, *, asks: bool) -> Receipt:
        try:
            receipt = await steps.run(name, self._do, name, attempt, once=STEPS[name])
        except StepInterruptedError:
            self._journal.note("interrupted", name, "", attempt.number)
            if not asks:
                raise
            receipt = await steps.run(ASK + name, self._do, ASK + name, attempt)
        self._journal.note("got", receipt.step, receipt.id, attempt.number)
        self._plan.reached(name, Moment.AFTER_STEP)
        return receipt

    async def _do(self, name: str, attempt: Attempt) -> Receipt:
        # Let the concurrent step interleave.
        await asyncio.sleep(0.01)
        self._plan.reached(name, Moment.BEFORE_EFFECT)
        receipt = Receipt(name, uuid4().hex)
        self._journal.note("effect", name, receipt.id, attempt.number)
        self._plan.reached(name, Moment.AFTER_EFFECT)
        return receipt


def _overrides(store: IdempotencyRepository, publisher: EventPublisher) -> Provider:
    provider = Provider(scope=Scope.APP)
    provider.provide(lambda: store, provides=IdempotencyRepository, override=True)
    provider.provide(lambda: publisher, provides=EventPublisher)
    return provider


@asynccontextmanager
async def open_stepping(
    order: Order, _: CrashPlan
) -> AsyncIterator[tuple[EventDispatcher, EventPublisher, Callable[[], AbstractAsyncContextManager[None]]]]:
    """Provide dispatcher and publisher for the worker of `order`; its handler gets `Steps` from its container."""
    plan = StepPlan(order.step)
    warehouse = Warehouse(StepJournal(Path(order.folder)), plan)
    settings = Settings(kafka=order.kafka, idempotency=order.idempotency, services={SERVICE: order.service})
    async with open_records(order.store, order.key_prefix) as store:
        publisher = EventPublisher(order.kafka)
        container = make_async_container(
            TelemetryProvider(),
            EventContextProvider(),
            IdempotencyProvider(),
            IdempotentDispatcherProvider(warehouse.router),
            _overrides(SteppingStore(store, plan), publisher),
            context={Settings: settings, ServiceName: ServiceName(SERVICE)},
            validation_settings=STRICT_VALIDATION,
        )
        yield await container.get(EventDispatcher), publisher, _no_relay
        await container.close()
        await publisher.close()


@asynccontextmanager
async def _no_relay() -> AsyncIterator[None]:
    yield
