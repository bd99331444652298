"""Workers of two versions of a service, which declare an event with and without an optional field, on one store."""

from __future__ import annotations

from typing import Any

import pytest

from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import Guarded, guarded
from tests.support.versions import OrderPlaced, OrderPlacedLater

TOPIC = Partition("order_placed", 0)
DEAD = "order_placed.dlq"


async def deliver(here: Guarded, event: BaseEvent, to: type[BaseEvent], runs: list[Any]) -> FakeBroker:
    """Deliver `event` to a worker that declares it as the class `to`."""
    router, broker = EventRouter(), FakeBroker()

    @router.on(to, name="charge")
    async def charge(received: BaseEvent) -> None:
        runs.append(received)

    broker.publish(event)
    dispatcher = IdempotentEventDispatcher(router, guarded(here.store).manager)
    async with running(dispatcher, broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)
    return broker


@pytest.mark.parametrize(
    ("first", "second"), [(OrderPlaced, OrderPlacedLater), (OrderPlacedLater, OrderPlaced)], ids=["deploy", "rollback"]
)
@virtual_time
async def test_a_redelivery_to_another_version_with_one_field_more_or_less_is_a_duplicate(
    first: type[BaseEvent], second: type[BaseEvent]
) -> None:
    here, event = guarded(), OrderPlaced(event_id="1")
    runs: list[Any] = []
    await deliver(here, event, first, runs)

    broker = await deliver(here, event, second, runs)

    assert len(runs) == 1
    assert not broker.values(DEAD)


@virtual_time
async def test_an_id_reused_within_a_version_is_still_dead_lettered_after_a_deployment() -> None:
    here = guarded()
    runs: list[Any] = []
    await deliver(here, OrderPlaced(event_id="1"), OrderPlacedLater, runs)

    broker = await deliver(here, OrderPlaced(event_id="1", order_id="2"), OrderPlacedLater, runs)

    assert len(runs) == 1
    assert len(broker.values(DEAD)) == 1
