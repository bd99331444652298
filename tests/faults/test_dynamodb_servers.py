"""Workers whose DynamoDB stalls, throttles or has lost its table.

The broker is in memory (see `tests.support.redis_shop`); DynamoDB Local, driver, store and worker are real.  Throttling
is simulated by a server in front of DynamoDB Local.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from integr8s_idem.stores.dynamodb import DynamoIdempotencyRepository, dynamo_client, migrate
from integr8s_idem.telemetry import Signal
from tests.support.conditions import eventually
from tests.support.dynamodb.fixtures import Table
from tests.support.dynamodb.front import DynamoFront
from tests.support.dynamodb.server import DynamoServer
from tests.support.effects import Effects
from tests.support.fault_proxy import Cut, FaultProxy, Stall
from tests.support.redis_shop import briefly, open_redis_shop


@pytest.fixture
async def front(dynamodb: DynamoServer) -> AsyncIterator[DynamoFront]:
    async with DynamoFront(dynamodb.port) as front:
        yield front


@pytest.fixture
async def proxy(front: DynamoFront) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(front.port) as proxy:
        yield proxy


@pytest.fixture
async def store(proxy: FaultProxy, table: Table) -> AsyncIterator[DynamoIdempotencyRepository]:
    changed = {"endpoint_url": f"http://127.0.0.1:{proxy.address}", "timeout_seconds": 1.0}
    async with dynamo_client(table.settings.model_copy(update=changed)) as client:
        yield DynamoIdempotencyRepository(client, table.name, timeout=timedelta(seconds=1))


async def test_a_worker_handles_each_event_once_and_answers_duplicates_from_the_table(
    store: DynamoIdempotencyRepository, effects: Effects
) -> None:
    async with open_redis_shop(effects, store) as shop:
        events = shop.order(50)
        shop.publish(*events)
        await shop.settled()

        assert (shop.tally.handled, shop.tally.duplicates) == (50, 50)
        shop.untouched()


@pytest.mark.scenario(41, 43)
async def test_a_dynamodb_stall_costs_no_attempt_and_work_resumes(
    store: DynamoIdempotencyRepository, effects: Effects, proxy: FaultProxy
) -> None:
    async with open_redis_shop(effects, store, behave=briefly) as shop:
        shop.order(30)
        await eventually(lambda: shop.acknowledged >= 10)

        with proxy.fault(Stall()):
            shop.order(20)
            await shop.paused()
        await shop.settled()

        shop.untouched()


@pytest.mark.scenario(57)
async def test_throttling_pauses_work_and_costs_no_attempt(
    store: DynamoIdempotencyRepository, effects: Effects, front: DynamoFront
) -> None:
    async with open_redis_shop(effects, store, behave=briefly) as shop:
        shop.order(30)
        await eventually(lambda: shop.acknowledged >= 10)

        front.refuse("ThrottlingException")
        shop.order(20)
        reason = await shop.paused()
        front.allow()
        await shop.settled()

        assert "DynamoDB throttles requests" in reason
        shop.untouched()


@pytest.mark.scenario(57)
async def test_lost_responses_of_dynamodb_repeat_no_effect(
    store: DynamoIdempotencyRepository, effects: Effects, proxy: FaultProxy
) -> None:
    lost = [proxy.put(Cut(matching=verb, every=4, times=None)) for verb in (b".PutItem", b".UpdateItem")]
    async with open_redis_shop(effects, store) as shop:
        events = shop.order(25)
        shop.publish(*events)
        await shop.settled()

        assert all(cut.struck >= 5 for cut in lost)
        shop.untouched()


@pytest.mark.scenario(46)
async def test_a_recreated_table_is_detected_and_counted(
    store: DynamoIdempotencyRepository, effects: Effects, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("integr8s_idem.worker.store_circuit.WATCH_SECONDS", 0.3)
    async with open_redis_shop(effects, store) as shop:
        events = shop.order(10)
        await shop.settled()

        await table.client.delete_table(TableName=table.name)
        await migrate(table.client, table.name)
        await eventually(lambda: shop.observer.counts[Signal.STORE_DATA_LOST] == 1)
        shop.publish(*events)
        await shop.settled()

        assert shop.judge(records_lost=True)["repeats"] == 10
