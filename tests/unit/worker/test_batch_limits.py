"""A worker warns at startup if its settings keep batches below the handlers' `max_size`."""

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
    """Return the warnings of a worker with these settings, from its start until it has handled an event."""
    broker = FakeBroker()
    broker.publish(OrderPlaced())
    with caplog.at_level(logging.WARNING, "integr8s_idem.worker.consumer"):
        async with running(EventDispatcher(_router(), scope="billing"), broker, **service) as worker:
            await worker.until(lambda: worker.worker.report().tally.handled == 1)
    return [record.getMessage() for record in caplog.records]


@virtual_time
async def test_ordering_by_partition_is_warned_about_once_with_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    assert await _warnings(caplog, ordering="partition", concurrency=100) == [
        'billing: batch handlers (index) accept up to 100 events at once, but services.billing.ordering = "partition" '
        'passes them one event of each partition at a time: set ordering = "key", or "none" if order does not matter'
    ]


@virtual_time
@pytest.mark.parametrize("setting", ["concurrency", "max_in_flight"])
async def test_a_limit_below_max_size_is_warned_about(caplog: pytest.LogCaptureFixture, setting: str) -> None:
    assert await _warnings(caplog, **{"ordering": "key", "concurrency": 100, setting: 64}) == [
        f"billing: batch handlers (index) accept up to 100 events at once, but services.billing.{setting} = 64: "
        "raise it to 100, or lower max_size in @router.on_batch(…)"
    ]


@virtual_time
@pytest.mark.parametrize("ordering", ["key", "none"])
async def test_full_batches_cause_no_warning(caplog: pytest.LogCaptureFixture, ordering: str) -> None:
    assert await _warnings(caplog, ordering=ordering, concurrency=100) == []
