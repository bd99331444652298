"""Two services on one topic: `python -m integr8s_idem run tests.support.broken_shop:platform`.

The handler of billing fails for every order in the file SHOP_BROKEN, which has one order id per line; removing the line
fixes it. Both handlers append a line to SHOP_JOURNAL at their end.
"""

from __future__ import annotations

import os
from pathlib import Path

from integr8s_idem import EventRouter, Platform, Service
from integr8s_idem.integrations.dishka import (
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
)
from tests.support.shop import note
from tests.support.workers import OrderPlaced

billing, audit = EventRouter(), EventRouter()


class NoSuchCardError(Exception):
    """An error that the handler cannot resolve."""


@billing.on(OrderPlaced)
async def charge(event: OrderPlaced) -> None:
    if event.order_id in _broken():
        raise NoSuchCardError(f"no such card: {event.order_id}")
    note("charged", event.order_id, 1)


@audit.on(OrderPlaced)
async def write_down(event: OrderPlaced) -> None:
    note("audited", event.order_id, 1)


def _broken() -> list[str]:
    return Path(os.environ["SHOP_BROKEN"]).read_text().splitlines()


def _service(name: str, router: EventRouter) -> Service:
    providers = [
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(router),
    ]

    return Service(name, providers=providers)


platform = Platform(_service("billing", billing), _service("audit", audit))
