"""Metrics of a running worker."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Literal

from prometheus_client import CollectorRegistry

from integr8s_idem.errors import PermanentError
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import guarded
from tests.support.pipelines import TOPIC as PARCELS
from tests.support.pipelines import Depot, all_committed, dispatcher_of, reserved_by_another, sent

TOPIC = Partition("order_placed", 0)


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"


async def refuse(event: OrderPlaced) -> None:
    raise PermanentError("no such customer")


@virtual_time
async def test_a_dead_lettered_message_is_counted_by_event_type_and_reason() -> None:
    registry, broker, router = CollectorRegistry(), FakeBroker(), EventRouter()
    router.on(OrderPlaced, name="refuse")(refuse)
    broker.put("order_placed", b"no json")
    broker.publish(OrderPlaced())

    dispatcher = EventDispatcher(router, observer=PrometheusObserver("billing", registry))
    async with running(dispatcher, broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 2)

    assert counted(registry, "dead_letters", "event_type", "reason") == {
        ("order_placed", "handler_failed"): 1,
        ("", "malformed"): 1,
    }
    assert counted(registry, "undecodable_messages", "reason") == {("malformed",): 1}


@virtual_time
async def test_a_delivery_that_waits_out_the_lease_of_a_dead_owner_is_one_wait() -> None:
    registry, depot, broker = CollectorRegistry(), Depot(), sent(1)
    here = guarded(observer=PrometheusObserver("billing", registry))
    await reserved_by_another(here, 0, timedelta(seconds=20))

    async with running(dispatcher_of(depot.handle, here), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    labels = {"service": "billing", "event_type": "parcel_sent"}
    count = "idempotency_phase_seconds_count"
    assert here.store.calls["reserve"] > 10, "the key was looked at again and again"
    assert counted(registry, "waits", "event_type") == {("parcel_sent",): 1}
    assert registry.get_sample_value(count, labels | {"phase": "wait"}) == 1
    assert registry.get_sample_value(count, labels | {"phase": "reserve"}) == 2


@virtual_time
async def test_failed_renewals_are_store_errors_of_the_event_types_whose_leases_they_concern() -> None:
    registry, depot, broker = CollectorRegistry(), Depot(seconds=60), sent(2)
    here = guarded(observer=PrometheusObserver("billing", registry), processing_timeout_seconds=30)
    here.store.down.add("renew")

    async with running(dispatcher_of(depot.handle, here), broker, concurrency=2, ordering="none") as worker:
        await worker.until(lambda: here.store.calls["renew"] == 1)
        await asyncio.sleep(0)

        assert counted(registry, "store_errors", "event_type") == {("parcel_sent",): 2}
        here.store.down.clear()
        await worker.until(lambda: all_committed(worker))


@virtual_time
async def test_a_late_completion_is_counted_by_event_type() -> None:
    registry, depot, broker = CollectorRegistry(), Depot(held={0: asyncio.Event()}), sent(1)
    here = guarded(observer=PrometheusObserver("billing", registry))

    async with running(dispatcher_of(depot.handle, here), broker, drain_timeout_seconds=1) as worker:
        await worker.until(lambda: depot.started == [0])
        await worker.consumer.take([PARCELS])
        depot.held[0].set()
        await worker.until(lambda: worker.worker.report().tally.stale == 1)

    assert counted(registry, "stale_completions", "event_type") == {("parcel_sent",): 1}


def counted(registry: CollectorRegistry, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the counts that are not 0, by `labels`."""
    return {
        tuple(sample.labels[label] for label in labels): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == f"idempotency_{name}_total" and sample.value
    }
