"""Crash points with an in-memory broker and store: a process crashes at its planned point only."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Literal

import pytest

from integr8s_idem import IdempotentEventDispatcher, Outgoing
from integr8s_idem.config import IdempotencyConfig, KafkaSettings, ServiceSettings
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.errors import PermanentError
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.handler_calls import HandlerCall, RegisteredHandler
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.records import Completed, Reserved, ReserveRequest
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.crash_points import (
    CrashingPublisher,
    CrashingStore,
    CrashPlan,
    CrashPoint,
    crashing_consumer,
    crashing_invoke,
    kill_myself,
)
from integr8s_idem.testing.virtual_time import virtual_now, virtual_time
from integr8s_idem.worker import EventPublisher, ServiceWorker
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeBroker, FakeConsumer

TOPIC = Partition("order_placed", 0)
REQUEST = ReserveRequest(key="k", token=bytes(16), lease=timedelta(seconds=10), retention=timedelta(hours=1))


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    fails: Literal["", "once", "always"] = ""


class OrderPaid(BaseEvent):
    event_type: Literal["order_paid"] = "order_paid"


class DiedError(Exception):
    """Simulates the end of the process."""


def die() -> None:
    raise DiedError


def memory() -> MemoryIdempotencyRepository:
    return MemoryIdempotencyRepository(clock=virtual_now)


def test_the_default_action_sends_sigkill_to_this_process() -> None:
    pid = os.fork()
    if pid == 0:
        CrashPlan(CrashPoint.AFTER_FETCH).reached(CrashPoint.AFTER_FETCH)
        os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert CrashPlan().action is kill_myself


def test_a_plan_acts_only_at_its_point_and_occurrence() -> None:
    acted: list[CrashPoint] = []
    plan = CrashPlan(CrashPoint.AFTER_FETCH, 2, action=lambda: acted.append(CrashPoint.AFTER_FETCH))

    plan.reached(CrashPoint.ON_ASSIGN)
    plan.reached(CrashPoint.AFTER_FETCH)
    assert not acted
    plan.reached(CrashPoint.AFTER_FETCH)
    plan.reached(CrashPoint.AFTER_FETCH)

    assert acted == [CrashPoint.AFTER_FETCH]
    assert plan.seen[CrashPoint.AFTER_FETCH] == 3


def test_a_plan_without_a_point_only_counts() -> None:
    plan = CrashPlan(action=die)

    for point in CrashPoint:
        plan.reached(point)

    assert set(plan.seen.values()) == {1}


def test_every_point_of_a_draining_worker_counts_as_in_drain() -> None:
    plan = CrashPlan(CrashPoint.IN_DRAIN, 2, action=die)

    plan.reached(CrashPoint.BEFORE_COMMIT)
    plan.drain()
    plan.reached(CrashPoint.BEFORE_COMMIT)

    with pytest.raises(DiedError):
        plan.reached(CrashPoint.AFTER_COMMIT)


@virtual_time
async def test_at_a_before_point_the_store_has_not_executed_the_call() -> None:
    inner = memory()
    store = CrashingStore(inner, CrashPlan(CrashPoint.BEFORE_RESERVE, action=die))

    with pytest.raises(DiedError):
        await store.reserve([REQUEST])

    assert await inner.get(["k"]) == [None]


@virtual_time
async def test_at_in_and_after_points_the_store_has_executed_the_call() -> None:
    for point in (CrashPoint.IN_RESERVE, CrashPoint.AFTER_RESERVE):
        inner = memory()
        store = CrashingStore(inner, CrashPlan(point, action=die))

        with pytest.raises(DiedError):
            await store.reserve([REQUEST])

        assert (await inner.get(["k"]))[0] is not None


@virtual_time
async def test_a_store_without_a_planned_crash_answers_like_its_inner_store() -> None:
    store = CrashingStore(memory(), CrashPlan())

    verdict = (await store.reserve([REQUEST]))[0]

    assert isinstance(verdict, Reserved)
    assert await store.renew([verdict], REQUEST.lease) == [True]
    assert await store.count_active("k") == 1
    assert [record.key async for record in store.scan("k")] == ["k"]
    assert await store.release([verdict]) == [True]
    assert await store.delete(["k"]) == 1
    assert (await store.ping()).kind == "memory"
    assert isinstance(store, IdempotencyRepository)


@virtual_time
async def test_a_worker_reaches_all_points_of_a_delivery_in_order() -> None:
    broker, plan = FakeBroker(), CrashPlan()
    broker.publish(OrderPlaced())
    async with worker_with(plan, broker, memory()) as (worker, consumer):
        await until(lambda: plan.seen[CrashPoint.AFTER_COMMIT] > 0)
        await consumer.take([TOPIC])
        worker.stop()

    points = [point.value for point in plan.seen]
    assert points == [
        *("on_assign", "after_fetch", "before_reserve", "after_reserve", "before_handler", "after_handler"),
        *("before_publish", "before_send", "after_send", "after_publish"),
        *("before_complete", "after_complete", "before_commit", "after_commit"),
        *("before_revoke", "after_revoke", "before_leave", "after_leave"),
    ]


@virtual_time
async def test_failures_reach_the_points_of_release_fail_and_dead_letter() -> None:
    broker, plan = FakeBroker(), CrashPlan()
    broker.publish(OrderPlaced(fails="once"), OrderPlaced(fails="always"))
    async with worker_with(plan, broker, memory()) as _:
        await until(lambda: plan.seen[CrashPoint.AFTER_DEAD_LETTER] > 0)

    verbs = ("release", "fail", "dead_letter")
    assert {verb: plan.seen[CrashPoint(f"after_{verb}")] for verb in verbs} == dict.fromkeys(verbs, 1)


@virtual_time
async def test_after_a_crash_behind_complete_the_record_answers_the_redelivery() -> None:
    broker, store, plan = FakeBroker(), memory(), CrashPlan(CrashPoint.AFTER_COMPLETE, action=die)
    event = OrderPlaced()
    runs: list[str] = []
    with pytest.raises(DiedError):
        await dispatcher_with(plan, store, runs).dispatch(event)

    ends = await dispatcher_with(CrashPlan(), store, runs).dispatch(event)

    assert isinstance(ends[0], Completed)
    assert runs == [event.event_id]
    assert not broker.values("order_paid")


def dispatcher_with(
    plan: CrashPlan,
    store: IdempotencyRepository,
    runs: list[str] | None = None,
    publisher: EventPublisher | None = None,
) -> IdempotentEventDispatcher:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def pay(event: OrderPlaced, number: int, outgoing: Outgoing) -> str:
        if runs is not None:
            runs.append(event.event_id)
        if event.fails == "always":
            raise PermanentError("never")
        if event.fails == "once" and number == 1:
            raise RuntimeError("not now")
        if publisher is not None:
            outgoing.publish(OrderPaid())
        return "receipt"

    async def invoke(handler: RegisteredHandler, call: HandlerCall) -> Any:
        return await handler.function(call.event, call.attempt.number, call.outgoing)

    manager = IdempotencyManager(IdempotencyConfig(), CrashingStore(store, plan), scope="billing")
    return IdempotentEventDispatcher(router, manager, invoke=crashing_invoke(plan, invoke), publisher=publisher)


class PublisherInMemory(CrashingPublisher):
    """The real publisher with an in-memory producer."""

    def __init__(self, plan: CrashPlan, broker: FakeBroker) -> None:
        super().__init__(KafkaSettings(), plan)
        self.broker = broker

    async def _connected(self) -> Any:
        return ProducerInMemory(self.broker)


class ProducerInMemory:
    """A producer that confirms immediately."""

    def __init__(self, broker: FakeBroker) -> None:
        self._broker = broker

    async def send(self, topic: str, **message: Any) -> asyncio.Future[Any]:
        confirmed = asyncio.get_running_loop().create_future()
        confirmed.set_result(self._broker.put(topic, message["value"], key=message["key"], headers=message["headers"]))
        return confirmed


@asynccontextmanager
async def worker_with(
    plan: CrashPlan, broker: FakeBroker, store: IdempotencyRepository
) -> AsyncIterator[tuple[ServiceWorker, FakeConsumer]]:
    consumer = FakeConsumer(broker)
    publisher = PublisherInMemory(plan, broker)
    worker = ServiceWorker(
        "billing",
        dispatcher_with(plan, store, publisher=publisher),
        publisher,
        KafkaSettings(),
        ServiceSettings(retry_initial_seconds=0.1),
        consumer=crashing_consumer(plan, lambda settings, group: consumer),
    )
    task = asyncio.create_task(worker.run())
    await until(lambda: worker.health().ready)
    yield worker, consumer
    worker.stop()
    await asyncio.wait({task})
    task.result()


async def until(fact: Any) -> None:
    async with asyncio.timeout(600):
        while not fact():  # noqa: ASYNC110  # polling is free in virtual time
            await asyncio.sleep(0.05)
