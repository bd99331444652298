"""Crashes, rebalances and outages on real Kafka and real Redis: no event is lost or handled twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from integr8s_idem import EventRouter
from tests.support.conditions import eventually
from tests.support.kafka.broker import Kafka, KafkaBroker
from tests.support.redis import RedisServer
from tests.support.workers import QUICK, OrderPlaced, Shop, kafka_settings, open_shop, orders

pytestmark = pytest.mark.kafka


@pytest.fixture
async def shop(kafka: Kafka, topic_prefix: str, redis_url: str) -> AsyncIterator[Shop]:
    async with open_shop(kafka, topic_prefix, redis_url, partitions=4) as shop:
        yield shop


def slow_charging(shop: Shop, seconds: float) -> EventRouter:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        await asyncio.sleep(seconds)
        shop.charged.append(event.order_id)

    return router


@pytest.mark.scenario(63)
async def test_a_rebalance_with_work_in_flight_loses_and_repeats_no_event(shop: Shop) -> None:
    router = slow_charging(shop, 0.05)
    events = orders(200)
    await shop.publisher.publish(*events)
    first = await shop.worker(router)
    await eventually(lambda: len(shop.charged) > 20)

    second = await shop.worker(router)
    await eventually(lambda: len(shop.charged) > 60)
    assert second.worker.report().partitions == 2
    await second.stop()
    await eventually(lambda: first.worker.report().partitions == 4)
    await eventually(lambda: len(shop.charged) >= 200, state=lambda: len(shop.charged))

    assert sorted(shop.charged, key=int) == [event.order_id for event in events]
    await eventually(lambda: first.worker.report().lag == 0)


@pytest.mark.scenario(12, 38)
async def test_a_handler_that_outlives_its_partition_completes_by_token_and_the_next_owner_replays_it(
    shop: Shop,
) -> None:
    may_end = asyncio.Event()
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        await may_end.wait()
        shop.charged.append(event.order_id)

    impatient = QUICK.model_copy(update={"drain_timeout_seconds": 0.2})
    first = await shop.worker(router, service=impatient)
    for partition in range(4):
        await shop.deliver(OrderPlaced(order_id=str(partition)), partition=partition)
    await eventually(lambda: first.worker.report().in_flight == 4)

    second = await shop.worker(router, service=impatient)
    await eventually(lambda: first.worker.report().partitions == 2 and second.worker.report().partitions == 2)
    may_end.set()
    await eventually(lambda: first.tally.duplicates + second.tally.duplicates == 4)
    await eventually(lambda: first.worker.report().lag == 0 and second.worker.report().lag == 0)

    assert sorted(shop.charged) == ["0", "1", "2", "3"]
    assert first.tally.stale == 4


@pytest.mark.scenario(64)
async def test_a_handler_longer_than_the_poll_interval_keeps_its_partition(shop: Shop) -> None:
    settings = kafka_settings(shop.kafka, shop.settings.topic_prefix, max_poll_interval_seconds=2)
    worker = await shop.worker(slow_charging(shop, 9), kafka=settings)  # 1.5 times the session timeout

    await shop.deliver(orders(1)[0])
    await worker.idle(settled=1)

    assert shop.charged == ["0"]
    assert worker.tally.handled == 1
    assert worker.tally.stale == 0


@pytest.mark.scenario(64)
async def test_a_handler_longer_than_its_lease_keeps_it_by_renewal(shop: Shop) -> None:
    shop.lease = 1.0
    first = await shop.worker(slow_charging(shop, 3.5))
    event = orders(1)[0]

    await shop.deliver(event, partition=0)
    await shop.deliver(event, partition=1)
    await first.idle(settled=2)

    assert shop.charged == ["0"]
    assert first.tally.leases_lost == 0


@pytest.mark.scenario(41)
async def test_a_worker_pauses_during_a_redis_outage_and_continues(kafka: Kafka, topic_prefix: str) -> None:
    with RedisServer(config={"appendonly": "yes", "appendfsync": "always"}) as redis:
        async with open_shop(kafka, topic_prefix, redis.url, partitions=4) as shop:
            worker = await shop.worker(slow_charging(shop, 0.01), max_attempts=2)
            events = orders(300)
            await shop.publisher.publish(*events[:150])
            await eventually(lambda: len(shop.charged) > 30)

            redis.kill()
            await shop.publisher.publish(*events[150:])
            await eventually(lambda: worker.worker.report().state == "paused", state=worker.worker.report)
            assert not worker.worker.health().ready
            redis.restart()
            await worker.idle(settled=300)

            assert sorted(shop.charged, key=int) == [event.order_id for event in events]
            assert worker.tally.dead_letters == 0
            assert worker.tally.retries == 0
            await worker.stop()


@pytest.mark.scenario(40)
async def test_a_worker_started_during_a_store_outage_waits_for_the_store(kafka: Kafka, topic_prefix: str) -> None:
    with RedisServer() as redis:
        async with open_shop(kafka, topic_prefix, redis.url) as shop:
            await shop.publisher.publish(*orders(3))
            redis.kill()
            starting = asyncio.create_task(shop.worker(slow_charging(shop, 0)))
            await asyncio.sleep(0)
            await shop.publisher.publish(*orders(1))
            assert not starting.done()

            redis.restart()
            worker = await starting
            await worker.idle(settled=4)

            assert len(shop.charged) == 4
            await worker.stop()


@pytest.mark.scenario(60)
async def test_no_event_is_lost_or_repeated_in_a_broker_restart(
    own_kafka: KafkaBroker, topic_prefix: str, redis_url: str
) -> None:
    async with open_shop(own_kafka, topic_prefix, redis_url) as shop:
        worker = await shop.worker(slow_charging(shop, 0.02))
        events = orders(100)
        await shop.publisher.publish(*events)
        await eventually(lambda: len(shop.charged) > 10)

        own_kafka.restart()
        await eventually(lambda: len(shop.charged) >= 100, state=worker.worker.report)
        await worker.idle(settled=100)

        assert sorted(shop.charged, key=int) == [event.order_id for event in events]
        await worker.stop()


async def test_a_drained_worker_finishes_running_handlers_and_leaves_the_rest_to_the_next(shop: Shop) -> None:
    events = orders(40)
    await shop.publisher.publish(*events)
    first = await shop.worker(slow_charging(shop, 0.2))
    await eventually(lambda: len(shop.charged) >= 4)

    await first.stop()
    done_by_first = len(shop.charged)
    second = await shop.worker(slow_charging(shop, 0.01))
    await eventually(lambda: len(shop.charged) >= 40)
    await second.idle(settled=40 - done_by_first)

    assert sorted(shop.charged, key=int) == [event.order_id for event in events]
    assert second.tally.duplicates == 0


async def test_a_full_worker_stops_fetching_and_stays_in_its_group(shop: Shop) -> None:
    gate = asyncio.Event()
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        await gate.wait()
        shop.charged.append(event.order_id)

    narrow = QUICK.model_copy(update={"max_in_flight": 10, "ordering": "none", "concurrency": 5})
    settings = kafka_settings(shop.kafka, shop.settings.topic_prefix, max_poll_interval_seconds=2)
    await shop.publisher.publish(*orders(100))
    worker = await shop.worker(router, service=narrow, kafka=settings)
    await eventually(lambda: worker.worker.report().in_flight >= 10)

    await asyncio.sleep(3)  # longer than the poll interval: a worker that stopped polling would have left the group
    assert worker.worker.report().in_flight <= 20
    gate.set()
    await worker.idle(settled=100)

    assert len(set(shop.charged)) == len(shop.charged) == 100
