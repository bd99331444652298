"""A service that is told to end: `python -m integr8s_idem run tests.crashes.application:platform`.

What really happened is left in the folder that CRASHES_EFFECTS names.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Literal

from integr8s_idem import Attempt, BaseEvent, EventRouter, Platform, Service, Settings
from integr8s_idem.integrations.dishka import (
    STRICT_VALIDATION,
    AsyncContainer,
    FromDishka,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    make_async_container,
)
from tests.support.effects import Effects


class Errand(BaseEvent):
    """Some work."""

    event_type: Literal["errand"] = "errand"
    work: str
    seconds: float = 0.0
    """How long the first attempt takes; later ones take no time."""


router = EventRouter()


@router.on(Errand)
async def run(event: Errand, attempt: FromDishka[Attempt]) -> str:
    effects = Effects(Path(os.environ["CRASHES_EFFECTS"]))
    effects.note("begin", event.work, attempt)
    if attempt.number == 1:
        await asyncio.sleep(event.seconds)
    effects.apply(event.work, attempt)
    effects.note("end", event.work, attempt)
    return effects.receipt(event.work, attempt)


def container(settings: Settings) -> AsyncContainer:
    return make_async_container(
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(router),
        context={Settings: settings, ServiceName: ServiceName("errands")},
        validation_settings=STRICT_VALIDATION,
    )


platform = Platform(Service("errands", container=container))
