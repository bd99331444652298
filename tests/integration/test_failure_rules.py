"""Rules for errors of handlers on a real Kafka: discarded events, and services that stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from integr8s_idem import EventRouter, PartialFailureError, Platform, Service, Settings
from integr8s_idem.errors import ServiceStoppedError
from integr8s_idem.failures import discard, stop
from integr8s_idem.integrations.dishka import DispatcherProvider, KafkaProvider
from integr8s_idem.runtime import ServiceGroup
from integr8s_idem.telemetry import Signal
from tests.support.conditions import eventually
from tests.support.counting import CountingObserver
from tests.support.kafka.broker import Kafka
from tests.support.workers import QUICK, OrderPlaced, Shop, WorkerInTest, kafka_settings, open_shop, orders

pytestmark = pytest.mark.kafka


class LedgerCorruptError(Exception):
    """An error that stops the service."""


@pytest.fixture
async def shop(kafka: Kafka, topic_prefix: str, redis_url: str) -> AsyncIterator[Shop]:
    async with open_shop(kafka, topic_prefix, redis_url) as shop:
        yield shop


class Ledger:
    """A handler that fails for the damaged orders."""

    def __init__(self, shop: Shop, *damaged: str) -> None:
        self.damaged = set(damaged)
        self.attempts: list[tuple[str, ...]] = []
        self._shop = shop

    async def charge(self, event: OrderPlaced) -> None:
        self.attempts.append((event.order_id,))
        if event.order_id in self.damaged:
            raise LedgerCorruptError("a sum does not match")
        self._shop.charged.append(event.order_id)

    async def charge_all(self, events: Sequence[OrderPlaced]) -> None:
        self.attempts.append(tuple(event.order_id for event in events))
        errors: dict[int, Exception] = {}
        for index, event in enumerate(events):
            if event.order_id in self.damaged:
                errors[index] = LedgerCorruptError("a sum does not match")
            else:
                self._shop.charged.append(event.order_id)
        if errors:
            raise PartialFailureError(errors)

    def router(self, *, batches: bool = False) -> EventRouter:
        router = EventRouter(failures=[stop(LedgerCorruptError)])
        if batches:
            router.on_batch(OrderPlaced, name="charge", max_size=10)(self.charge_all)
        else:
            router.on(OrderPlaced, name="charge")(self.charge)
        return router


async def stopped(worker: WorkerInTest) -> ServiceStoppedError:
    """Wait until a worker has stopped because of an error, and return that."""
    with pytest.raises(ServiceStoppedError) as caught:
        await asyncio.wait_for(worker.task, 30)
    worker.task = asyncio.create_task(asyncio.sleep(0))  # the shop expects workers without errors
    return caught.value


@pytest.mark.scenario(137)
async def test_a_redelivery_of_a_discarded_event_is_a_duplicate(shop: Shop) -> None:
    shop.observer = observer = CountingObserver()
    ledger, router = Ledger(shop, "0"), EventRouter(failures=[discard(LedgerCorruptError)])
    router.on(OrderPlaced)(ledger.charge)
    worker = await shop.worker(router)
    events = orders(2)
    await shop.publisher.publish(*events)
    await worker.idle(settled=2)

    await shop.publisher.publish(*events)
    await worker.idle(settled=4)

    assert ledger.attempts == [("0",), ("1",)]
    assert (worker.tally.discarded, worker.tally.handled, worker.tally.duplicates) == (1, 1, 2)
    assert observer.counts[Signal.DISCARDED] == 1
    assert await shop.committed() == 4


@pytest.mark.scenario(138)
@pytest.mark.parametrize("batches", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize("ordering", ["partition", "key", "none"])
async def test_an_event_that_stops_the_service_is_redelivered_at_the_next_start(
    shop: Shop, ordering: str, batches: bool
) -> None:
    ledger = Ledger(shop, "3")
    settings = QUICK.model_copy(update={"ordering": ordering})
    await shop.publisher.publish(*orders(6))
    first = await shop.worker(ledger.router(batches=batches), service=settings)

    error = await stopped(first)

    assert "LedgerCorruptError: a sum does not match" in str(error)
    assert "stop(LedgerCorruptError)" in str(error)
    assert await shop.committed() == 3
    assert "3" not in shop.charged
    ledger.damaged.clear()
    second = await shop.worker(ledger.router(batches=batches), service=settings)
    await second.idle(settled=3)
    assert sorted(shop.charged) == ["0", "1", "2", "3", "4", "5"]
    assert await shop.committed() == 6
    assert second.tally.dead_letters == 0


@pytest.mark.scenario(138)
async def test_an_event_is_not_given_up_however_often_it_stops_the_service(shop: Shop) -> None:
    shop.observer = observer = CountingObserver()
    ledger = Ledger(shop, "0")
    await shop.publisher.publish(*orders(1))
    for _ in range(4):
        await stopped(await shop.worker(ledger.router(), max_attempts=2))

    ledger.damaged.clear()
    worker = await shop.worker(ledger.router(), max_attempts=2)
    await worker.idle(settled=1)

    assert shop.charged == ["0"]
    assert ledger.attempts == [("0",)] * 5
    assert observer.counts[Signal.SERVICE_STOPPED] == 4


async def test_an_unguarded_service_stops_as_well(shop: Shop) -> None:
    ledger = Ledger(shop, "1")
    await shop.publisher.publish(*orders(3))
    await stopped(await shop.worker(ledger.router(), guarded=False))

    assert shop.charged == ["0"]
    ledger.damaged.clear()
    worker = await shop.worker(ledger.router(), guarded=False)
    await worker.idle(settled=2)

    assert shop.charged == ["0", "1", "2"]


@pytest.mark.scenario(138)
async def test_other_services_of_the_process_continue_and_its_exit_status_is_1(
    shop: Shop, kafka: Kafka, topic_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    billing, audit = EventRouter(), EventRouter()

    @billing.on(OrderPlaced, failures=[stop(LedgerCorruptError)])
    async def charge(event: OrderPlaced) -> None:
        raise LedgerCorruptError("a sum does not match")

    @audit.on(OrderPlaced)
    async def note(event: OrderPlaced) -> None:
        seen.append(event.order_id)

    def service(name: str, router: EventRouter) -> Service:
        return Service(name, providers=[KafkaProvider(), DispatcherProvider(router)], group_id=topic_prefix + name)

    settings = Settings(
        kafka=kafka_settings(kafka, topic_prefix),
        store={"kind": "memory"},
        telemetry={"metrics_enabled": False},
    )
    platform = Platform(service("billing", billing), service("audit", audit))
    group = ServiceGroup(platform.choose(), settings)
    running: asyncio.Task[Any] = asyncio.create_task(group.run())
    await shop.publisher.publish(*orders(1))
    await eventually(lambda: group.reports()[0].state == "failed", state=group.reports)
    await shop.publisher.publish(*orders(2)[1:])
    await eventually(lambda: seen == ["0", "1"])
    group.stop()

    assert await asyncio.wait_for(running, 30) == 1
    failures = [record for record in caplog.records if record.levelno == logging.ERROR and "failed:" in record.message]
    [failure] = [record for record in failures if record.message.startswith("service billing failed")]
    assert "ServiceStoppedError" in failure.message
    assert failure.exc_info is None
