"""Metrics of a worker about dead-lettered messages."""

from __future__ import annotations

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

    assert counted(registry, "dead_letters") == {("order_placed", "handler_failed"): 1, ("", "malformed"): 1}
    assert counted(registry, "undecodable_messages") == {("", "malformed"): 1}


def counted(registry: CollectorRegistry, name: str) -> dict[tuple[str, str], float]:
    """Return counts by event type and reason."""
    return {
        (sample.labels["event_type"], sample.labels["reason"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == f"idempotency_{name}_total" and sample.value
    }
