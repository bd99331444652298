"""Handlers that tests control, and checks of a worker's pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from os import urandom
from typing import Any, Literal

from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.keys import Key
from integr8s_idem.records import IdempotencyStatus, Reserved, ReserveRequest
from integr8s_idem.worker import ServiceWorker
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import RunningWorker
from tests.support.guarded import Guarded, guarded

TOPIC = Partition("parcel_sent", 0)


class ParcelSent(BaseEvent):
    event_type: Literal["parcel_sent"] = "parcel_sent"
    number: int = 0
    """Number of the parcel in the test."""


@dataclass(slots=True)
class Depot:
    """Handles parcels, counts concurrent handlers, and blocks those in `held` until their events are set."""

    seconds: float = 0.0
    errors: dict[int, list[Exception]] = field(default_factory=dict)
    """Errors that the first runs of a parcel raise, one each."""
    held: dict[int, asyncio.Event] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    running_now: int = 0
    max_concurrency: int = 0

    async def handle(self, event: ParcelSent) -> None:
        self.started.append(event.number)
        self.running_now += 1
        self.max_concurrency = max(self.max_concurrency, self.running_now)
        try:
            await self._work(event.number)
        finally:
            self.running_now -= 1
        self.done.append(event.number)

    async def _work(self, number: int) -> None:
        if number in self.held:
            await self.held[number].wait()
        elif self.seconds:
            await asyncio.sleep(self.seconds)
        if errors := self.errors.get(number):
            raise errors.pop(0)


def dispatcher_of(
    handle: Callable[[ParcelSent], Awaitable[Any]], here: Guarded | None = None, **options: Any
) -> EventDispatcher:
    """Return a dispatcher with one handler, guarded if there is a manager; `options` are those of `router.on`."""
    router = EventRouter()
    register: Any = router.on(ParcelSent, name="handle", **options)
    register(handle)
    return IdempotentEventDispatcher(router, here.manager) if here else EventDispatcher(router)


def parcels(number: int, *, keys: int = 0) -> list[ParcelSent]:
    """Return `number` parcels, distributed over `keys` recipients; without a recipient if `keys` is 0."""
    return [
        ParcelSent(number=each, aggregate_id=str(each % keys) if keys else None, event_id=f"parcel-{each}")
        for each in range(number)
    ]


def sent(number: int, *, keys: int = 0, partitions: int = 1) -> FakeBroker:
    """Return a broker with `parcels`, distributed over its partitions."""
    broker = FakeBroker()
    for each in parcels(number, keys=keys):
        broker.publish(each, partition=each.number % partitions)
    return broker


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def all_committed(worker: RunningWorker) -> bool:
    logs = worker.broker.logs
    return all(
        worker.broker.committed.get(at, 0) == log[-1].offset + 1 for at, log in logs.items() if at.topic == TOPIC.topic
    )


def unfinished(worker: ServiceWorker) -> dict[str, object]:
    """Return what the worker's pipeline still holds; empty if it is idle."""
    pipeline, backpressure = worker._pipeline, worker._backpressure
    runners = pipeline._runners
    state = {
        "tasks": len([task for task in pipeline.tasks if not task.done()]) - len(runners._idle),
        "ready": list(pipeline._ready),
        "runnable": list(runners.runnable),
        "returned": list(runners._recorder._returned),
        "waiting": len(pipeline._conclusions._waiting),
        "batches": pipeline._batches,
        "lanes": len(pipeline._lanes),
        "ahead": len(pipeline._ahead._prepared),
        "decoded": len(pipeline._ahead._decoded),
        "limited": len(pipeline._limits or ()),
        "waiting for a limit": pipeline._limits.waiting if pipeline._limits is not None else 0,
        "in flight": backpressure.in_flight,
        "bytes": backpressure._bytes,
        "slots taken": worker._service.concurrency - pipeline._slots.free,
        "waiting for slots": [turn for turn in pipeline._slots._waiting if not turn.done()],
    }
    return {name: left for name, left in state.items() if left}


def key_of(here: Guarded, parcel: int) -> str:
    return here.manager.space.full(Key.of_event("handle", "parcel_sent", "id", f"parcel-{parcel}"))


async def reserved_by_another(here: Guarded, parcel: int, lease: timedelta, *, alone: bool = False) -> list[Reserved]:
    request = ReserveRequest(
        key=key_of(here, parcel),
        token=urandom(16),
        lease=lease,
        retention=timedelta(hours=2),
        owner="another",
        alone=alone,
    )
    (verdict,) = await here.store.reserve([request])
    assert isinstance(verdict, Reserved)
    return [verdict]


async def leases_left(here: Guarded) -> list[str]:
    """Return the keys that are still reserved after background writes have ended."""
    await here.manager.close()
    held = [record.key async for record in here.store.scan("") if await here.store.count_active(record.key)]
    return held + here.manager.executor.runs.keys()


async def completed_parcels(here: Guarded) -> set[int]:
    """Return the numbers of parcels whose records are completed."""
    records = [record async for record in here.store.scan("")]
    return {
        int(record.key.rpartition("parcel-")[2]) for record in records if record.status is IdempotencyStatus.COMPLETED
    }


__all__ = [
    "TOPIC",
    "Depot",
    "ParcelSent",
    "all_committed",
    "completed_parcels",
    "dispatcher_of",
    "guarded",
    "key_of",
    "leases_left",
    "parcels",
    "reserved_by_another",
    "sent",
    "turns",
    "unfinished",
]
