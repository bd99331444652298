"""Kafka clients that silently stop fetching.

The broker is in memory, except in the tests that are marked kafka.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError, RequestTimedOutError

from integr8s_idem.config import KafkaSettings, ServiceSettings
from integr8s_idem.handlers.dispatcher import EventDispatcher, EventRouter
from integr8s_idem.worker import ServiceWorker, consumer, poller
from integr8s_idem.worker.fetch_watchdog import MOST_RENEWALS
from integr8s_idem.worker.kafka_protocols import Consumer
from tests.kafka_faults import servers
from tests.kafka_faults.tools import need_kafka
from tests.kafka_faults.workload import Workload, open_workload
from tests.support.conditions import eventually
from tests.support.fake_consumer import FakeBroker, FakeConsumer
from tests.support.fake_worker import FakePublisher
from tests.support.workers import OrderPlaced


@pytest.fixture(autouse=True)
def _quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "PATIENCE", 0.5)
    monkeypatch.setattr(poller, "WATCH_SECONDS", 0.1)


class StuckConsumer(FakeConsumer):
    """A consumer that has stopped fetching: polls succeed but return nothing."""

    async def getmany(self, *partitions: Any, timeout_ms: int, max_records: int) -> Mapping[Any, Any]:
        await asyncio.sleep(timeout_ms / 1000)
        return {}


def client_of(worker: ServiceWorker) -> Consumer:
    assert worker._poller is not None
    return worker._poller.consumer


def worker_of(broker: FakeBroker, clients: list[FakeConsumer], charged: list[str]) -> ServiceWorker:
    """Return a worker that uses one of these clients after the other."""
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        charged.append(event.order_id)

    return ServiceWorker(
        "billing",
        EventDispatcher(router),
        FakePublisher(broker),
        KafkaSettings(),
        ServiceSettings(),
        consumer=lambda settings, group: clients.pop(0),
    )


async def test_a_client_that_stops_fetching_is_replaced() -> None:
    broker, charged = FakeBroker(), list[str]()
    broker.publish(OrderPlaced(order_id="1"))
    worker = worker_of(broker, [StuckConsumer(broker), StuckConsumer(broker), FakeConsumer(broker)], charged)
    running = asyncio.create_task(worker.run())

    await eventually(lambda: charged)
    worker.stop()
    await running

    assert charged == ["1"]


async def test_a_service_fails_when_replaced_clients_do_not_fetch_either() -> None:
    broker = FakeBroker()
    broker.publish(OrderPlaced(order_id="1"))
    clients: list[FakeConsumer] = [StuckConsumer(broker) for _ in range(5)]
    worker = worker_of(broker, clients, [])

    with pytest.raises(KafkaError, match=r"no messages received for .* order_placed\[0\] has messages from 0 to 1"):
        await asyncio.wait_for(worker.run(), 60)

    assert len(clients) == 1  # four were used: the first one and three replacements
    assert not worker.health().live


class TimingOutConsumer(FakeConsumer):
    """A consumer whose brokers do not respond in time after it was assigned partitions."""

    async def position(self, partition: Any) -> int:
        raise RequestTimedOutError

    async def getmany(self, *partitions: Any, timeout_ms: int, max_records: int) -> Mapping[Any, Any]:
        raise RequestTimedOutError


async def test_a_service_survives_brokers_that_do_not_respond_to_new_clients() -> None:
    """Nothing is known of a new partition after a failed poll, so that the client is replaced, but it is not stuck."""
    broker, charged = FakeBroker(), list[str]()
    broker.publish(OrderPlaced(order_id="1"))
    clients: list[FakeConsumer] = [TimingOutConsumer(broker) for _ in range(MOST_RENEWALS + 2)]
    worker = worker_of(broker, [*clients, FakeConsumer(broker)], charged)
    running = asyncio.create_task(worker.run())

    await eventually(lambda: charged or running.done())
    worker.stop()
    await running

    assert charged == ["1"]


async def test_an_idle_client_is_not_replaced() -> None:
    broker, charged = FakeBroker(), list[str]()
    broker.publish(OrderPlaced(order_id="1"))
    clients = [FakeConsumer(broker)]
    worker = worker_of(broker, clients, charged)
    running = asyncio.create_task(worker.run())
    await eventually(lambda: charged)

    await asyncio.sleep(2)  # four times PATIENCE; a second client does not exist
    worker.stop()
    await running

    assert charged == ["1"]


@pytest.mark.kafka
async def test_a_dead_fetch_task_is_detected_on_a_real_broker() -> None:
    need_kafka()
    async with open_workload(servers.kafka()) as workload:
        member = await workload.join()
        await eventually(lambda: member.worker.health().ready)
        await workload.publish_round()
        await workload.all_settled()

        client: Any = client_of(member.worker)
        client._fetcher._fetch_task.cancel()
        await workload.publish_round()
        await workload.all_settled()

        assert client_of(member.worker) is not client
        assert (await workload.judge())["repeats"] == 0


@pytest.mark.kafka
@pytest.mark.scenario(72)
async def test_transaction_markers_and_aborted_batches_block_neither_offsets_nor_the_fetch_watch() -> None:
    need_kafka()
    async with open_workload(servers.kafka(), partitions=1) as workload:
        member = await workload.join()
        await eventually(lambda: member.worker.health().ready)
        await workload.publish_round()
        await publish_in_transactions(workload)
        await workload.all_settled()
        client = client_of(member.worker)

        await asyncio.sleep(2)  # four times PATIENCE, at a position after the markers
        await workload.publish_round()
        await workload.all_settled()

        assert client_of(member.worker) is client
        assert member.tally.dead_letters == 0  # aborted messages were never seen
        await workload.judge()


async def publish_in_transactions(workload: Workload) -> None:
    """Publish two aborted transactions, and one that commits only an offset of another group."""
    producer: Any = AIOKafkaProducer(
        bootstrap_servers=workload.settings.bootstrap_servers, transactional_id=workload.group
    )
    await producer.start()
    try:
        await producer.begin_transaction()
        for _ in range(20):
            await producer.send_and_wait(workload.topic, b"aborted, never seen", partition=0)
        await producer.abort_transaction()
        async with producer.transaction():
            await producer.send_offsets_to_transaction(
                {TopicPartition(workload.topic, 0): 0}, f"{workload.group}.other"
            )
        await producer.begin_transaction()
        await producer.send_and_wait(workload.topic, b"aborted, too", partition=0)
        await producer.abort_transaction()
    finally:
        await producer.stop()
