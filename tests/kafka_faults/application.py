"""The service that is stopped and told to end: `python -m integr8s_idem run tests.kafka_faults.application:platform`.

What its handler does comes with the event; what really happened is left in the folder that FAULTS_EFFECTS names.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Literal

from integr8s_idem import Attempt, BaseEvent, EventRouter, Platform, Service
from integr8s_idem.integrations.dishka import (
    FromDishka,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
)
from tests.support.effects import Effects


class TaskGiven(BaseEvent):
    event_type: Literal["task_given"] = "task_given"
    work: str
    before: float = 0.0
    """Seconds from the begin to the effect, for the first attempt."""
    rerun_after: float = 0.0
    """Seconds from the effect to the end, for later attempts."""
    blocks: float = 0.0
    """Seconds before the effect for which the first attempt holds the event loop."""
    blocks_after: float = 0.0
    """The same, behind the effect."""
    fails: bool = False
    """The first attempt ends with an error."""


router = EventRouter()


@router.on(TaskGiven)
async def work(event: TaskGiven, attempt: FromDishka[Attempt]) -> str:
    effects = Effects(Path(os.environ["FAULTS_EFFECTS"]))
    effects.note("begin", event.work, attempt)
    first = attempt.number == 1
    if first and event.blocks:
        time.sleep(event.blocks)  # noqa: ASYNC251  # as a handler should not: it acts as soon as its process wakes
    if first and event.before:
        await _long(event, attempt, effects)
    effects.apply(event.work, attempt)
    effects.note("applied", event.work, attempt)  # a worker stopped before this may hold the sink's lock
    if first and event.blocks_after:
        time.sleep(event.blocks_after)  # noqa: ASYNC251  # as above
    if not first and event.rerun_after:
        await asyncio.sleep(event.rerun_after)
    if first and event.fails:
        raise ConnectionError("the first attempt fails")
    effects.note("end", event.work, attempt)
    return effects.receipt(event.work, attempt)


async def _long(event: TaskGiven, attempt: Attempt, effects: Effects) -> None:
    try:
        await asyncio.sleep(event.before)
    except asyncio.CancelledError:
        effects.note("cancelled", event.work, attempt)
        raise


providers = [
    IdempotencyProvider(),
    KafkaProvider(),
    IdempotentDispatcherProvider(router),
]


platform = Platform(Service("tasks", providers=providers))
