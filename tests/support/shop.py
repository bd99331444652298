"""A small application for worker processes: `python -m integr8s_idem run tests.support.shop:platform`.

Its handler appends a line to the file SHOP_JOURNAL when it starts and when it ends, so that tests can count its runs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from integr8s_idem import Attempt, BaseEvent, EventRouter, Outgoing, Platform, Service
from integr8s_idem.integrations.dishka import (
    FromDishka,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
)


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str
    seconds: float = 0.0
    """Duration of the handler; if negative, it never ends and ignores cancellation."""
    thread_seconds: float = 0.0
    """Duration in a thread, which cannot be canceled."""
    kills: bool = False
    """Whether the handler kills its process."""


class OrderPaid(BaseEvent):
    event_type: Literal["order_paid"] = "order_paid"
    order_id: str


router = EventRouter()


@router.on(OrderPlaced)
async def charge(event: OrderPlaced, attempt: FromDishka[Attempt], outgoing: FromDishka[Outgoing]) -> str:
    note("begin", event.order_id, attempt.number)
    if event.kills:
        os.kill(os.getpid(), signal.SIGKILL)
    while event.seconds < 0:  # a misbehaving handler that ignores cancellation
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.1)
    if event.thread_seconds:
        await asyncio.to_thread(time.sleep, event.thread_seconds)
    await asyncio.sleep(event.seconds)
    note("end", event.order_id, attempt.number)
    outgoing.publish(OrderPaid(order_id=event.order_id))
    return f"receipt-{event.order_id}"


def note(what: str, order_id: str, attempt: int) -> None:
    """Append a line with a single write, so that lines of several processes do not mix."""
    journal = os.open(os.environ["SHOP_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(journal, f"{what} {order_id} {attempt} {os.getpid()}\n".encode())
    os.close(journal)


billing_providers = [
    IdempotencyProvider(),
    KafkaProvider(),
    IdempotentDispatcherProvider(router),
]


platform = Platform(Service("billing", providers=billing_providers))


def journal_of(path: Path) -> list[tuple[str, str, int, int]]:
    """Return the lines of the journal: kind, order id, attempt and process id."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(what, order, int(attempt), int(pid)) for what, order, attempt, pid in map(str.split, lines)]
