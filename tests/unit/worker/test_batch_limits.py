"""A worker that cannot fill the batches of its handlers says so when it starts; its broker is in memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from integr8s_idem import BaseEvent, EventDispatcher, EventRouter
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"


class OrderPaid(BaseEvent):
    event_type: Literal["order_paid"] = "order_paid"


def _router() -> EventRouter:
    router = EventRouter()

    @router.on_batch(OrderPlaced, max_size=100)
    async def index(events: Sequence[OrderPlaced]) -> None: ...

    @router.on_batch(OrderPaid, max_size=1)
    async def book(events: Sequence[OrderPaid]) -> None: ...

    @router.on(OrderPaid)
    async def thank(event: OrderPaid) -> None: ...

    return router


async def _warnings(caplog: pytest.LogCaptureFixture, **service: Any) -> list[str]:
    """What a worker with these settings warns of, from its start until it has handled something."""
    broker = FakeBroker()
    broker.publish(OrderPlaced())
    with caplog.at_level(logging.WARNING, "integr8s_idem.worker.consumer"):
        async with running(EventDispatcher(_router(), scope="billing"), broker, **service) as worker:
            await worker.until(lambda: worker.worker.report().tally.handled == 1)
    return [record.getMessage() for record in caplog.records]


@virtual_time
async def test_the_order_of_partitions_is_warned_of_once_with_what_to_set(caplog: pytest.LogCaptureFixture) -> None:
    assert await _warnings(caplog, ordering="partition", concurrency=100) == [
        'billing: batch handlers (index) take up to 100 events at once, and services.billing.ordering = "partition" '
        'gives them one of each partition at a time: set ordering = "key", or "none" if no order matters'
    ]


@virtual_time
@pytest.mark.parametrize("setting", ["concurrency", "max_in_flight"])
async def test_less_at_hand_than_a_batch_holds_is_warned_of(caplog: pytest.LogCaptureFixture, setting: str) -> None:
    assert await _warnings(caplog, **{"ordering": "key", "concurrency": 100, setting: 64}) == [
        f"billing: batch handlers (index) take up to 100 events at once, and services.billing.{setting} = 64 is less: "
        "raise it to 100, or lower max_size in @router.on_batch(…)"
    ]


@virtual_time
@pytest.mark.parametrize("ordering", ["key", "none"])
async def test_where_batches_can_be_full_nothing_is_said(caplog: pytest.LogCaptureFixture, ordering: str) -> None:
    assert await _warnings(caplog, ordering=ordering, concurrency=100) == []
