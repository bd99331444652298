"""Concurrent requests for one key, on a real Redis and with a broker in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.work import Executed, HandlerFailed, Work
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.handler_calls import HandlerCall, RegisteredHandler
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.keys import Key
from integr8s_idem.keys.event_keys import KeyResolver, KeyStrategy
from integr8s_idem.records import Completed, Completion, InProgress, Reserved, StoredResult
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.kafka_protocols import Partition
from tests.campaigns import races
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import FakePublisher, running
from tests.support.guarded import Job, guarded
from tests.support.redis import RedisServer

TOPIC = Partition("order_placed", 0)


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"


class OrderMoved(BaseEvent):
    event_type: Literal["order_moved"] = "order_moved"
    order_id: str = "1"


@pytest.fixture
async def managers(redis_server: RedisServer) -> AsyncIterator[list[IdempotencyManager]]:
    """Provide ten managers with separate clients, as in separate processes."""
    redis_server.flush()
    clients = [redis_server.client() for _ in range(10)]
    managers = [IdempotencyManager(None, RedisIdempotencyRepository(client), scope="billing") for client in clients]
    yield managers
    for manager, client in zip(managers, clients, strict=True):
        await manager.close()
        await client.aclose()


@pytest.mark.scenario(8, 9)
def test_one_of_a_hundred_takeovers_wins_and_the_first_owner_writes_nothing() -> None:
    figures = races.run(0, races.CAMPAIGN.in_test)

    assert figures["rounds"] == figures["takeovers"] == races.CAMPAIGN.in_test


@pytest.mark.scenario(2)
async def test_one_of_a_hundred_concurrent_callers_reserves_the_key_and_all_see_the_result(
    managers: list[IdempotencyManager],
) -> None:
    barrier = asyncio.Barrier(100)

    async def ask(manager: IdempotencyManager) -> Any:
        await barrier.wait()
        return await manager.reserve("order:1")

    verdicts = await asyncio.gather(*(ask(managers[number % 10]) for number in range(100)))
    [reserved] = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
    assert sum(isinstance(verdict, InProgress) for verdict in verdicts) == 99

    assert await managers[0].complete(reserved, "receipt-1")
    afterwards = await asyncio.gather(*(ask(managers[number % 10]) for number in range(100)))
    assert {verdict.result for verdict in afterwards} == {StoredResult(b'"receipt-1"')}


@pytest.mark.scenario(2)
async def test_a_hundred_concurrent_calls_run_once_and_share_the_result(managers: list[IdempotencyManager]) -> None:
    job = Job(seconds=0.2)

    results = await asyncio.gather(*(managers[number % 10].run("order:1", job) for number in range(100)))

    assert (job.runs, results) == (1, ["receipt-1"] * 100)


@pytest.mark.scenario(1, 11)
async def test_a_second_delivery_gets_the_result_byte_for_byte(managers: list[IdempotencyManager]) -> None:
    here, there = managers[:2]
    result = {"é": ["\x00", 1.5, None, -0.0], "big": 2**60}
    reserved = await here.reserve("order:1")
    assert isinstance(reserved, Reserved)
    completion = here.completion(reserved, result)
    assert completion.result is not None

    assert await here.complete_many([completion]) == [True]
    repeated = Completion(reservation=reserved, ttl=completion.ttl, result=StoredResult(b'"another"'))
    assert await here.complete_many([repeated]) == [True]

    verdict = await there.reserve("order:1")
    assert isinstance(verdict, Completed)
    assert verdict.result == completion.result


@pytest.mark.scenario(4)
async def test_waiting_duplicates_of_a_failed_run_make_one_retry(
    managers: list[IdempotencyManager],
) -> None:
    job, work = Job(seconds=0.2, errors=[ConnectionError("for a moment")]), Key.of("order:1")
    first = asyncio.create_task(managers[0].execute(Work(work), job.with_attempt))
    await job.started.wait()

    others = await asyncio.gather(*(manager.run(work, job) for manager in managers[1:]))

    outcome = await first
    assert isinstance(outcome, HandlerFailed)
    assert (outcome.attempt, outcome.given_up) == (1, False)
    assert others == ["receipt-1"] * 9
    assert job.runs == 2
    record = await managers[0].get(work)
    assert record is not None
    assert (record.attempt, record.status.value) == (2, "completed")


@pytest.mark.scenario(7)
@virtual_time
async def test_equal_content_is_handled_once_per_event_type() -> None:
    runs, router = list[str](), EventRouter()

    @router.on(OrderPlaced, OrderMoved, name="handle")
    async def handle(event: OrderPlaced | OrderMoved) -> None:
        runs.append(event.event_type)

    resolver = KeyResolver(KeyStrategy.CONTENT_HASH)
    dispatcher = IdempotentEventDispatcher(router, guarded().manager, resolver=resolver)

    outcomes = [
        await dispatcher.dispatch(event) for event in (OrderPlaced(), OrderPlaced(), OrderMoved(), OrderMoved())
    ]

    assert [type(outcome) for [outcome] in outcomes] == [Executed, Completed, Executed, Completed]
    assert runs == ["order_placed", "order_moved"]


@pytest.mark.scenario(16)
@pytest.mark.parametrize("ordering", ["partition", "none"])
@virtual_time
async def test_a_handler_that_republishes_its_own_event_does_not_run_again_or_block(
    ordering: Literal["partition", "none"],
) -> None:
    broker, runs, router = FakeBroker(), list[str](), EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        runs.append(event.order_id)

    async def publishing(handler: RegisteredHandler, call: HandlerCall) -> None:
        await handler.function(call.event)
        call.outgoing.publish(call.event)

    publisher = FakePublisher(broker)
    dispatcher = IdempotentEventDispatcher(router, guarded().manager, invoke=publishing, publisher=publisher)
    broker.publish(OrderPlaced(), OrderPlaced(order_id="2"))

    async with running(dispatcher, broker, publisher, ordering=ordering) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 4, 30)

    assert sorted(runs) == ["1", "2"]
    assert worker.worker.report().tally.duplicates == 2
