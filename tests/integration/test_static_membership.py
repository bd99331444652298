"""Static members of a group, on real Kafka: restarts without rebalances, and workers that share an id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiokafka.client import ConnectionGroup
from aiokafka.protocol.group import LeaveGroupRequest

from integr8s_idem import EventRouter
from integr8s_idem.config import KafkaSettings
from integr8s_idem.errors import MemberFencedError
from integr8s_idem.telemetry import Signal, SilentObserver
from tests.support.conditions import eventually
from tests.support.kafka.broker import Kafka
from tests.support.workers import OrderPlaced, Shop, WorkerInTest, open_shop, orders

pytestmark = pytest.mark.kafka


class Rebalances(SilentObserver):
    """Counts the rebalances of all workers of a shop."""

    def __init__(self) -> None:
        self.count_of_all = 0

    def count(self, signal: Signal, event_type: str = "", amount: int = 1, *, reason: str = "") -> None:
        if signal is Signal.REBALANCE:
            self.count_of_all += amount


@pytest.fixture
async def shop(kafka: Kafka, topic_prefix: str, redis_url: str) -> AsyncIterator[Shop]:
    async with open_shop(kafka, topic_prefix, redis_url, partitions=2) as shop:
        shop.observer = Rebalances()
        yield shop


def rebalances(shop: Shop) -> int:
    assert isinstance(shop.observer, Rebalances)
    return shop.observer.count_of_all


def charging(shop: Shop) -> EventRouter:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        shop.charged.append(event.order_id)

    return router


def static(shop: Shop, instance_id: str) -> KafkaSettings:
    return shop.settings.model_copy(update={"group_instance_id": instance_id})


async def started(shop: Shop, instance_id: str, router: EventRouter | None = None) -> WorkerInTest:
    return await shop.worker(router or charging(shop), kafka=static(shop, instance_id))


def partitions(*workers: WorkerInTest) -> list[int]:
    return [each.worker.report().partitions for each in workers]


async def ended(worker: WorkerInTest) -> MemberFencedError:
    with pytest.raises(MemberFencedError) as fenced:
        await asyncio.wait_for(asyncio.shield(worker.task), 20)
    # At the end of the test it is stopped like the others, without its error.
    worker.task = asyncio.create_task(asyncio.sleep(0))
    return fenced.value


async def test_a_static_member_restarts_without_a_rebalance(shop: Shop) -> None:
    one, other = await started(shop, "one"), await started(shop, "other")
    await eventually(lambda: partitions(one, other) == [1, 1], state=lambda: partitions(one, other))
    before = rebalances(shop)

    await one.stop()
    await shop.publisher.publish(*orders(20))
    again = await started(shop, "one")

    await eventually(lambda: len(shop.charged) == 20, state=lambda: shop.charged)
    await eventually(lambda: partitions(again, other) == [1, 1], state=lambda: partitions(again, other))
    assert len(set(shop.charged)) == 20
    # The new member reports the end of an empty assignment when it joins.
    assert rebalances(shop) - before <= 1, "the other worker kept its partition"


async def test_of_two_workers_with_one_id_the_first_ends_with_an_error(shop: Shop) -> None:
    first = await started(shop, "same")
    second = await started(shop, "same")

    error = await ended(first)
    await shop.publisher.publish(*orders(10))
    await eventually(lambda: len(shop.charged) == 10, state=lambda: shop.charged)
    assert (error.group, error.instance_id) == (f"{shop.settings.topic_prefix}billing", "same.billing.1")
    assert "same.billing.1" in first.worker.health().reason
    assert not first.worker.health().live
    assert second.worker.health().ready, "the worker that was fenced did not take the id back"


async def test_a_worker_that_is_replaced_while_its_handler_runs_ends_and_the_event_is_not_lost(shop: Shop) -> None:
    router, may_end, running = EventRouter(), asyncio.Event(), asyncio.Event()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        running.set()
        await may_end.wait()
        shop.charged.append(event.order_id)

    first = await started(shop, "same", router)
    await shop.publisher.publish(*orders(1))
    await running.wait()
    second = await started(shop, "same")
    may_end.set()

    await ended(first)
    await eventually(lambda: second.tally.handled + second.tally.duplicates == 1, state=second.worker.report)

    assert shop.charged == ["0"]


async def test_a_static_member_whose_session_has_expired_joins_again(shop: Shop) -> None:
    worker = await started(shop, "one")
    poller = worker.worker._poller
    assert poller is not None
    consumer: Any = poller.consumer
    coordinator = consumer._coordinator
    before = coordinator.member_id

    # What a broker does when a session expires: it removes the member.
    leave = LeaveGroupRequest(coordinator.group_id, before)
    await consumer._client.send(coordinator.coordinator_id, leave, group=ConnectionGroup.COORDINATION)
    await eventually(lambda: coordinator.member_id not in ("", before), state=lambda: coordinator.member_id)
    await shop.publisher.publish(*orders(5))

    await eventually(lambda: len(shop.charged) == 5, state=lambda: shop.charged)
    assert not worker.task.done()
