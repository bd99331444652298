"""A service with a batch handler for worker processes: `integr8s-idem run tests.support.batch_shop:platform`.

The handler appends to the file SHOP_JOURNAL a line for each event in a batch, and a line for each effect.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from integr8s_idem import BaseEvent, EventRouter, Platform, Service
from integr8s_idem.handlers.handler_calls import Batch
from integr8s_idem.integrations.dishka import (
    FromDishka,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
)

SIZE = 5


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str
    holds: bool = False
    """Whether its first run waits after the effect until the process ends."""


router = EventRouter()


@router.on_batch(OrderPlaced, max_size=SIZE, max_wait=timedelta(seconds=0.2))
async def index(events: Sequence[OrderPlaced], batch: FromDishka[Batch]) -> None:
    together = list(zip(events, batch.attempts, strict=True))
    for event, attempt in together:
        note("given", event.order_id, attempt.number, len(events))
    for event, attempt in together:
        note("effect", event.order_id, attempt.number, len(events))
        if event.holds and attempt.number == 1:
            await asyncio.sleep(3600)


@dataclass(frozen=True)
class Line:
    what: str
    order: str
    attempt: int
    size: int
    """Size of the batch."""


def note(what: str, order_id: str, attempt: int, size: int) -> None:
    """Append a line with a single write, so that lines of several processes do not mix."""
    journal = os.open(os.environ["SHOP_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(journal, f"{what} {order_id} {attempt} {size}\n".encode())
    os.close(journal)


def journal_of(path: Path) -> list[Line]:
    """Return the lines of the journal."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [Line(what, order, int(attempt), int(size)) for what, order, attempt, size in map(str.split, lines)]


providers = [
    IdempotencyProvider(),
    KafkaProvider(),
    IdempotentDispatcherProvider(router),
]


platform = Platform(Service("search", providers=providers))
