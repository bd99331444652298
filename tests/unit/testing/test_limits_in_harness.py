"""Limits by a field of the event, in a `WorkerHarness`."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Literal

import pytest

from integr8s_idem import BaseEvent, EventRouter, Service, Settings
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.testing import WorkerHarness

router = EventRouter()
running: Counter[str] = Counter()
most: Counter[str] = Counter()
handled: list[str] = []


class OrderImported(BaseEvent):
    event_type: Literal["order_imported"] = "order_imported"
    order_id: str
    customer_id: str


@router.on(OrderImported, limit_by="customer_id", at_most=2)
async def notify(event: OrderImported) -> None:
    running[event.customer_id] += 1
    most[event.customer_id] = max(most[event.customer_id], running[event.customer_id])
    await asyncio.sleep(0.01)
    running[event.customer_id] -= 1
    handled.append(event.order_id)


@pytest.mark.parametrize("ordering", ["partition", "key", "none"])
async def test_a_harness_keeps_to_the_limits_of_handlers(ordering: Literal["partition", "key", "none"]) -> None:
    most.clear()
    handled.clear()
    providers = [IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)]
    events = [
        OrderImported(order_id=str(number), customer_id="ada" if number % 3 else "bob", aggregate_id=str(number))
        for number in range(24)
    ]
    settings = Settings.model_validate({"services": {"notices": {"ordering": ordering}}})

    async with WorkerHarness(Service("notices", providers=providers), settings=settings) as harness:
        await harness.publish(*events, *events)

    assert sorted(handled, key=int) == [str(number) for number in range(24)]
    assert max(most.values()) <= 2
    if ordering != "partition":
        assert most == {"ada": 2, "bob": 2}
