"""Handlers may change their events, as classes that are not frozen allow: the worker does not read them again."""

from __future__ import annotations

from integr8s_idem import EventRouter, IdempotentEventDispatcher
from integr8s_idem.errors import PermanentError
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.replay_signatures import event_hash
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import guarded
from tests.support.pipelines import TOPIC, ParcelSent


@virtual_time
async def test_a_dead_letter_names_the_event_as_it_came() -> None:
    """Otherwise, a signed replay of it would be refused as one of another event."""
    here, broker, router = guarded(), FakeBroker(), EventRouter()

    async def handle(event: ParcelSent) -> None:
        event.__dict__["event_id"] = "changed"
        raise PermanentError("as planned")

    router.on(ParcelSent)(handle)
    broker.publish(ParcelSent(number=0, event_id="parcel-0"))

    async with running(IdempotentEventDispatcher(router, here.manager), broker) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    (dead,) = broker.values(f"{TOPIC.topic}.dlq")
    assert dict(dead.headers)["idempotency-dlq-event-hash"] == event_hash("parcel-0")
