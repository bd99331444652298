"""Minimal regression tests for bugs that the simulation has found.

Broker and store are in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
from aiokafka.errors import RequestTimedOutError

from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running

TOPIC = Partition("order_placed", 0)


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"


@pytest.mark.scenario(66)
@virtual_time
async def test_a_poll_that_fails_after_a_rebalance_loses_no_fetched_message() -> None:
    """`getmany` can wait for a rebalance, so that its partitions are new to the worker when it raises an error."""
    broker, runs = FakeBroker(), list[str]()
    failed = asyncio.Event()
    router = EventRouter()

    @router.on(OrderPlaced)
    async def handle(event: OrderPlaced) -> None:
        runs.append(event.order_id)

    async with running(EventDispatcher(router), broker) as worker:
        fetch = worker.consumer.getmany

        async def getmany(*partitions: Any, **options: Any) -> Mapping[Any, Sequence[Any]]:
            if failed.is_set():
                return await fetch(*partitions, **options)
            for number in range(3):
                broker.publish(OrderPlaced(order_id=str(number)))
            await worker.consumer.give([TOPIC])
            fetched = await fetch(*partitions, **options)
            failed.set()
            raise RequestTimedOutError if fetched else AssertionError

        worker.consumer.getmany = getmany  # type: ignore[method-assign]  # the moment under test
        await worker.until(failed.is_set)
        broker.publish(OrderPlaced(order_id="later"))
        await worker.until(lambda: broker.committed.get(TOPIC) == 4)

    assert runs == ["0", "1", "2", "later"]


@virtual_time
async def test_a_poll_that_fails_after_a_rebalance_while_the_worker_stops_loses_nothing() -> None:
    """A stopping worker ignores that its client was given up, and continues to poll until it has stopped."""
    broker, failed, other = FakeBroker(), asyncio.Event(), Partition("order_placed", 1)
    runs = list[str]()
    router = EventRouter()
    broker.publish(OrderPlaced(order_id="slow"))

    @router.on(OrderPlaced)
    async def handle(event: OrderPlaced) -> None:
        runs.append(event.order_id)
        await asyncio.sleep(10 if event.order_id == "slow" else 0)

    async with running(EventDispatcher(router), broker) as worker:
        await worker.until(lambda: runs == ["slow"])
        fetch = worker.consumer.getmany

        async def getmany(*partitions: Any, **options: Any) -> Mapping[Any, Sequence[Any]]:
            if not failed.is_set():
                failed.set()
                broker.publish(OrderPlaced(order_id="1"), partition=1)
                await worker.consumer.give([other])
                await fetch(*partitions, **options)
                broker.publish(OrderPlaced(order_id="2"), partition=1)
                raise RequestTimedOutError
            return await fetch(*partitions, **options)

        worker.worker.stop()
        worker.consumer.getmany = getmany  # type: ignore[method-assign]  # the moment under test

    assert failed.is_set()
    assert broker.committed.get(other, 0) == 0 or "1" in runs


@virtual_time
async def test_a_worker_continues_to_fetch_after_its_client_was_replaced_under_load() -> None:
    """Messages in its lanes are dropped with the old client, and must not count towards the limit any more."""
    broker, runs = FakeBroker(), list[str]()
    router = EventRouter()
    broker.publish(*(OrderPlaced(order_id=str(number)) for number in range(3)))

    @router.on(OrderPlaced)
    async def handle(event: OrderPlaced) -> None:
        runs.append(event.order_id)
        await asyncio.sleep(30 if len(runs) == 1 else 0)

    async with running(EventDispatcher(router), broker, max_in_flight=3, drain_timeout_seconds=1) as worker:
        await worker.until(lambda: runs == ["0"])
        poller = worker.worker._poller
        assert poller is not None
        poller._give_up("by the test")
        await worker.until(lambda: broker.committed.get(TOPIC) == 3, seconds=120)

    assert runs == ["0", "0", "1", "2"]
