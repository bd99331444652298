"""A batch starts without those of its events whose leases have expired; they are reserved again."""

from __future__ import annotations

import asyncio
from contextvars import Context
from datetime import timedelta
from typing import Any

import pytest
from faststream import AckPolicy
from faststream.kafka import KafkaBroker, TestKafkaBroker

from integr8s_idem import EventRouter
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.handler_calls import BatchCall, HandlerCall, RegisteredHandler, call_with_event
from integr8s_idem.integrations.faststream import IdempotencyMiddleware
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from tests.support.conditions import eventually
from tests.support.guarded import LEASE
from tests.support.late_starts import (
    OrderPlaced,
    Run,
)
from tests.support.stalling import ManualClock


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.integrations.faststream_guard.pause_after", lambda _: 0.0)


async def test_a_batch_handler_is_called_without_events_whose_lease_is_late(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = Run(clock, inner)
    sizes: list[list[str]] = []
    router, calls = EventRouter(), list[BatchCall]()

    @router.on_batch(OrderPlaced, max_size=3, max_wait=timedelta(seconds=60))
    async def charge(events: list[OrderPlaced]) -> None:
        sizes.append([event.order_id for event in events])
        entry.starts.extend(calls[-1].batch.attempts)

    async def invoke(handler: RegisteredHandler, call: HandlerCall | BatchCall) -> Any:
        assert isinstance(call, BatchCall)
        calls.append(call)
        return await call_with_event(handler, call)

    dispatcher = IdempotentEventDispatcher(router, entry.manager, invoke=invoke)

    def dispatch(order: int) -> asyncio.Task[Any]:
        return asyncio.create_task(dispatcher.dispatch(OrderPlaced(event_id=f"event-{order}", order_id=f"{order}")))

    late = dispatch(1)
    await eventually(lambda: len(entry.store.reserved) == 1)
    clock.seconds += LEASE - 0.5
    rest = [dispatch(2), dispatch(3)]
    await asyncio.wait(rest)
    # The omitted event waits for the next batch.
    rest += [dispatch(4), dispatch(5)]
    await asyncio.wait([late, *rest])
    await entry.close()

    assert sizes[0] == ["2", "3"]
    assert sorted(sizes[1]) == ["1", "4", "5"]
    assert {attempt.number for attempt in entry.starts} == {1}
    assert entry.prevented == 1


class FastStreamBatch(Run):
    """A FastStream subscriber of batches of two messages."""

    def __init__(self, clock: ManualClock, inner: IdempotencyRepository) -> None:
        super().__init__(clock, inner)
        self.given: list[list[str]] = []

    async def call(self, *orders: str) -> None:
        broker = KafkaBroker(middlewares=[IdempotencyMiddleware(self.manager, key=lambda record: str(record.value))])

        @broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR, batch=True)
        async def charge(bodies: list[str]) -> None:
            self.given.append(bodies)

        async with TestKafkaBroker(broker):
            await asyncio.create_task(broker.publish_batch(*orders, topic="orders"))


async def test_a_faststream_batch_with_late_leases_is_reserved_again_as_the_same_attempts(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = FastStreamBatch(clock, inner)

    entry.store.stall = clock.stall
    await entry.call("1", "2")
    await entry.close()

    assert entry.given == [["1", "2"]]
    assert {record.attempt async for record in inner.scan("")} == {1}
    assert len(entry.store.reserved) == 4
    assert len({(each.key, each.token, each.fence) for each in entry.store.reserved}) == 2
    assert entry.prevented == 2


async def test_a_faststream_batch_omits_messages_completed_by_another_process(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry, other = FastStreamBatch(clock, inner), FastStreamBatch(clock, inner)

    async def done_elsewhere() -> None:
        clock.leap()
        await asyncio.create_task(other.call("1"), context=Context())

    entry.store.stall = done_elsewhere
    await entry.call("1", "2")
    await entry.close()
    await other.close()

    assert (other.given, entry.given) == ([["1"]], [["2"]])


async def test_a_faststream_batch_does_not_start_on_late_leases_while_the_store_does_not_answer(
    clock: ManualClock, inner: MemoryIdempotencyRepository
) -> None:
    entry = FastStreamBatch(clock, inner)

    async def leap_into_an_outage() -> None:
        clock.leap()
        entry.store.down.add("reserve")

    entry.store.stall = leap_into_an_outage
    await entry.call("1", "2")
    assert entry.given == []

    entry.store.down.clear()
    await entry.call("1", "2")
    await entry.close()
    assert entry.given == [["1", "2"]]
