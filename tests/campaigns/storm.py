"""Storms of duplicates: every message three times, shuffled, through the real worker in virtual time.

The broker and the store are in memory.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Final, Literal

from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.testing.virtual_time import run_virtual
from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import guarded

EVENTS: Final = 1_000
COPIES: Final = 3
PARTITIONS: Final = 4


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str


def run(first: int, count: int) -> Figures:
    """Run the storms numbered `first` to `first + count - 1`."""
    figures = Figures(lost=0, repeats=0)
    for number in range(first, first + count):
        figures.update(run_virtual(_storm(number)))
    return figures


async def _storm(number: int) -> Figures:
    rng = random.Random(number)
    broker, runs, router = FakeBroker(), Counter[str](), EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        runs[event.order_id] += 1

    events = [OrderPlaced(order_id=str(order)) for order in range(EVENTS)]
    deliveries = events * COPIES
    rng.shuffle(deliveries)
    for at, event in enumerate(deliveries):
        broker.publish(event, partition=at % PARTITIONS)
    ends = {at: log[-1].offset + 1 for at, log in broker.logs.items()}
    ordering: Literal["partition", "none"] = rng.choice(["partition", "none"])

    async with running(IdempotentEventDispatcher(router, guarded().manager), broker, ordering=ordering) as worker:
        await worker.until(lambda: broker.committed == ends)
        tally = worker.worker.report().tally

    _judge(number, runs, broker, tally.duplicates)
    return Figures(storms=1, deliveries=len(deliveries), events=EVENTS, duplicates=tally.duplicates)


def _judge(number: int, runs: Counter[str], broker: FakeBroker, duplicates: int) -> None:
    lost = EVENTS - len(runs)
    repeated = [order for order, times in runs.items() if times > 1]
    dead_letters = broker.values("order_placed.dlq")
    if lost or repeated or dead_letters or duplicates != EVENTS * (COPIES - 1):
        raise ViolationError(
            f"storm {number}: {lost} lost, {repeated} repeated, {len(dead_letters)} dead-lettered, "
            f"{duplicates} duplicates"
        )


CAMPAIGN = Campaign(
    name="storm",
    counts="storms",
    says=f"{EVENTS} messages {COPIES} times each, shuffled, through the worker, with broker and store in memory",
    scenarios=(111,),
    in_test=4,
    target=1_000,
    batch=50,
    run=run,
)
