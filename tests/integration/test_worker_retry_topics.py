"""Retry topics on a real Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from integr8s_idem.worker.broker_facts import list_topics
from tests.kafka_faults import servers
from tests.kafka_faults.tools import need_kafka
from tests.support.conditions import eventually
from tests.support.kafka.broker import Kafka
from tests.support.retries import TIERS, Flaky, create_retry_topics, is_idle, retry_topic, settings
from tests.support.workers import Shop, open_shop, orders

pytestmark = pytest.mark.kafka


@pytest.fixture
async def shop(kafka: Kafka, topic_prefix: str, redis_url: str) -> AsyncIterator[Shop]:
    async with open_shop(kafka, topic_prefix, redis_url, partitions=2) as shop:
        yield shop


async def test_later_orders_are_charged_while_one_waits_for_its_retry(shop: Shop) -> None:
    await create_retry_topics(shop, *TIERS)
    flaky = Flaky(shop, 1.5, "3")
    worker = await shop.worker(flaky.router(), service=settings(*TIERS))

    for order in orders(20):
        await shop.deliver(order)
    await eventually(lambda: len(shop.charged) == 20 and is_idle(worker), state=lambda: shop.charged)

    assert shop.charged == [str(number) for number in range(20) if number != 3] + ["3"]
    assert flaky.pause("3") >= 1.5
    assert await shop.committed() == 20
    tally = worker.tally
    assert (tally.handled, tally.deferred, tally.duplicates, tally.dead_letters) == (20, 1, 0, 0)
    (copy,) = await shop.messages(retry_topic(shop, "2s"), 1)
    assert dict(copy.headers)["idempotency-retry-signature"]


@pytest.mark.scenario(146)
async def test_without_its_retry_topic_an_order_is_charged_in_place_when_it_is_due(
    topic_prefix: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    need_kafka(own=True)
    broker = await asyncio.to_thread(servers.own_broker, {"auto.create.topics.enable": "false"})
    try:
        async with open_shop(broker, topic_prefix, redis_url) as shop:
            await create_retry_topics(shop, "1m")
            flaky = Flaky(shop, 5, "0")
            quick = shop.settings.model_copy(update={"request_timeout_seconds": 1})
            worker = await shop.worker(
                flaky.router(), service=settings("10s", "1m"), kafka=quick, list_topics=list_topics
            )

            for order in orders(3):
                await shop.deliver(order)
            await eventually(lambda: "cannot publish its copy" in caplog.text, state=worker.worker.report)
            assert f"retry topics do not exist: {retry_topic(shop, '10s')}" in caplog.text
            assert await shop.committed() in (None, 0)
            await eventually(lambda: len(shop.charged) == 3 and is_idle(worker), state=lambda: shop.charged)

            assert shop.charged == ["0", "1", "2"]
            assert flaky.pause("0") >= 5
            assert worker.tally.deferred == 0
    finally:
        await asyncio.to_thread(broker.kill)


@pytest.mark.scenario(146)
async def test_a_copy_that_the_broker_refuses_as_too_large_waits_in_place(shop: Shop) -> None:
    await shop.kafka.create_topics({retry_topic(shop, "2s"): 1}, {"max.message.bytes": "200"})
    flaky = Flaky(shop, 1.5, "0")
    worker = await shop.worker(flaky.router(), service=settings("2s"))

    for order in orders(3):
        await shop.deliver(order)
    await eventually(lambda: len(shop.charged) == 3 and is_idle(worker), state=lambda: shop.charged)

    assert shop.charged == ["0", "1", "2"]
    assert flaky.pause("0") >= 1.5


@pytest.mark.scenario(147)
async def test_another_worker_takes_over_the_copies_that_wait(shop: Shop) -> None:
    await create_retry_topics(shop, *TIERS)
    flaky = Flaky(shop, 4, *(str(number) for number in range(10)))
    first = await shop.worker(flaky.router(), service=settings(*TIERS))
    for order in orders(10):
        await shop.deliver(order, partition=int(order.order_id) % 2)
    await eventually(lambda: first.tally.deferred >= 10, state=first.worker.report)

    second = await shop.worker(flaky.router(), service=settings(*TIERS))
    await first.stop()
    await eventually(lambda: len(shop.charged) == 10 and is_idle(second), state=lambda: shop.charged)

    assert sorted(shop.charged) == [str(number) for number in range(10)]
    assert len(flaky.attempts) == 20
    assert second.tally.dead_letters == 0


async def test_a_removed_retry_topic_is_read_until_it_is_empty(shop: Shop) -> None:
    await create_retry_topics(shop, *TIERS)
    flaky = Flaky(shop, 1.5, "0")
    first = await shop.worker(flaky.router(), service=settings(*TIERS))
    await shop.deliver(orders(1)[0])
    await eventually(lambda: first.tally.deferred == 1, state=first.worker.report)
    await first.stop()

    assert retry_topic(shop, "2s") in await list_topics(shop.settings)
    second = await shop.worker(flaky.router(), service=settings("1m"), list_topics=list_topics)
    await eventually(lambda: shop.charged == ["0"] and is_idle(second), state=second.worker.report)


async def test_a_worker_stops_at_once_while_copies_wait(shop: Shop) -> None:
    await create_retry_topics(shop, *TIERS)
    worker = await shop.worker(Flaky(shop, 50, "0").router(), service=settings(*TIERS))
    await shop.deliver(orders(1)[0])
    await eventually(lambda: worker.tally.waits == 1, state=worker.worker.report)

    began = asyncio.get_running_loop().time()
    await worker.stop()

    assert asyncio.get_running_loop().time() - began < 5
    assert await shop.committed() == 1
