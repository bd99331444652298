"""Two versions of a service in one group on a real Kafka: deployments and rollbacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

import pytest

from integr8s_idem import BaseEvent, EventRouter
from integr8s_idem.errors import ServiceStoppedError
from integr8s_idem.failures import stop
from tests.support.kafka.broker import Kafka
from tests.support.workers import Shop, open_shop

pytestmark = pytest.mark.kafka


class OrderBefore(BaseEvent):
    """The event in the previous version of the service."""

    event_type: Literal["order_placed"] = "order_placed"
    order_id: str


class OrderNow(BaseEvent):
    """The same event with a new optional field."""

    event_type: Literal["order_placed"] = "order_placed"
    order_id: str
    note: str = ""


class LedgerCorruptError(Exception):
    """An error that stops the service."""


@pytest.fixture
async def shop(kafka: Kafka, topic_prefix: str, redis_url: str) -> AsyncIterator[Shop]:
    async with open_shop(kafka, topic_prefix, redis_url) as shop:
        yield shop


def version(shop: Shop, event: type[BaseEvent], *, fails_for: str = "") -> EventRouter:
    """Return the router of a version of the service, whose handler fails for an order."""
    router = EventRouter(failures=[stop(LedgerCorruptError)])

    @router.on(event, name="charge")
    async def charge(order: BaseEvent) -> None:
        order_id: str = getattr(order, "order_id")  # noqa: B009  # of both classes
        if order_id == fails_for:
            raise LedgerCorruptError("the new version is wrong")
        shop.charged.append(order_id)

    return router


def orders(*numbers: int) -> list[OrderNow]:
    return [OrderNow(event_id=f"e{number}", order_id=str(number), note="wrap it") for number in numbers]


@pytest.mark.scenario(139)
async def test_duplicates_are_recognized_by_workers_whose_classes_of_the_event_differ(shop: Shop) -> None:
    settled, versions = 0, list[type[BaseEvent]]([OrderBefore, OrderNow, OrderBefore])
    for step, event in enumerate(versions):
        worker = await shop.worker(version(shop, event))
        for order in orders(*range(3 * (step + 1))):  # those of the steps before once more, and three new ones
            await shop.deliver(order)
        await worker.idle(settled=3 * (step + 1))
        settled += 3 * (step + 1)
        assert (worker.tally.handled, worker.tally.duplicates, worker.tally.dead_letters) == (3, 3 * step, 0)
        await worker.stop()

    assert shop.charged == [str(number) for number in range(9)]
    assert await shop.committed() == settled


@pytest.mark.scenario(138, 140)
async def test_after_a_rollback_the_previous_version_continues_where_the_new_one_has_stopped(shop: Shop) -> None:
    await shop.publisher.publish(*orders(0, 1, 2))
    new = await shop.worker(version(shop, OrderNow, fails_for="1"))
    with pytest.raises(ServiceStoppedError):
        await asyncio.wait_for(new.task, 30)
    new.task = asyncio.create_task(asyncio.sleep(0))  # the shop expects workers without errors
    assert shop.charged == ["0"]

    old = await shop.worker(version(shop, OrderBefore))
    await old.idle(settled=2)

    assert shop.charged == ["0", "1", "2"]
    # The later event of the lane may have been reserved ahead, which counts as an attempt as well.
    assert (old.tally.handled, old.tally.dead_letters) == (2, 0)
    assert old.tally.reruns >= 1
    assert await shop.committed() == 3
