"""Application for fault tests: `python -m integr8s_idem run tests.kafka_faults.application:platform`.

Each event determines the behavior of its handler.  Effects are recorded in the folder FAULTS_EFFECTS.
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
    """Seconds from the start to the effect in the first attempt."""
    rerun_after: float = 0.0
    """Seconds from the effect to the end in later attempts."""
    blocks: float = 0.0
    """Seconds for which the first attempt blocks the event loop before the effect."""
    blocks_after: float = 0.0
    """Seconds for which the first attempt blocks the event loop after the effect."""
    fails: bool = False
    """Whether the first attempt raises an error."""


router = EventRouter()


@router.on(TaskGiven)
async def work(event: TaskGiven, attempt: FromDishka[Attempt]) -> str:
    effects = Effects(Path(os.environ["FAULTS_EFFECTS"]))
    effects.note("begin", event.work, attempt)
    first = attempt.number == 1
    if first and event.blocks:
        time.sleep(event.blocks)  # noqa: ASYNC251  # blocks on purpose: the handler continues as soon as its process resumes
    if first and event.before:
        await _sleep_before_effect(event, attempt, effects)
    effects.apply(event.work, attempt)
    effects.note("applied", event.work, attempt)  # a worker stopped before this may hold the sink's lock
    if first and event.blocks_after:
        time.sleep(event.blocks_after)  # noqa: ASYNC251  # blocks on purpose
    if not first and event.rerun_after:
        await asyncio.sleep(event.rerun_after)
    if first and event.fails:
        raise ConnectionError("the first attempt fails")
    effects.note("end", event.work, attempt)
    return effects.receipt(event.work, attempt)


async def _sleep_before_effect(event: TaskGiven, attempt: Attempt, effects: Effects) -> None:
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
